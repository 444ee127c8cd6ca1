"""A rank that computes slowly, on real processes: it is named, work moves away from it, and the run learns
what it would have learned. Here layers move; `test_fewer_replicas` moves micro-batches between replicas."""

import os
import signal
import time
from pathlib import Path

import pytest
from same_run import train_undisturbed
from tiny_corpora import make_corpus

from myriad.faults.injector import plan_rank_faults
from myriad.faults.rank_faults import ARMED
from myriad.faults.scenario import Fault
from myriad.job import load_job
from myriad.launchers.local import run_local
from myriad.run import Run

SLOW_SECONDS = 180.0
STEPS_AFTER = 5
"""Steps of a run after work has moved."""
_TOLD = ("diagnosis", "move", "restart", "fault")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"), count=300)


class Until:
    """Ends the run some steps after work has moved, or when it takes too long."""

    def __init__(self, run: Run) -> None:
        self._run, self._deadline, self._asked = run, time.monotonic() + SLOW_SECONDS, False

    def tick(self) -> None:
        resumed = [event["step"] for event in self._run.read_events() if event["event"] == "resume"]
        lines = self._run.read_metrics()
        done = resumed and lines and lines[-1]["step"] >= resumed[-1] + STEPS_AFTER
        if not self._asked and (done or time.monotonic() > self._deadline):
            self._asked = True
            os.kill(os.getpid(), signal.SIGINT)

    def stopping(self) -> None: ...


def train_slow(run: Run, faults: list[Fault], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ARMED, str(plan_rank_faults(run.path / "faults", faults, None)))
    assert run_local(run, 2, threads=1, observer=Until(run)) == "interrupted"
    monkeypatch.delenv(ARMED)


def assert_same_losses(run: Run, undisturbed: Run, restarted_after: int) -> None:
    """To the bit before work moves; then sums are in another order."""
    lines = run.read_metrics()
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1)), "no step is lost"
    expected = [line["loss"] for line in undisturbed.read_metrics()]
    losses = [line["loss"] for line in lines[: len(expected)]]
    assert len(losses) >= restarted_after + STEPS_AFTER
    assert losses[:restarted_after] == expected[:restarted_after]
    assert losses == pytest.approx(expected[: len(losses)], rel=1e-5)


PIPELINE = [
    "layout.pp=2", "resilience.nodes=2", "model.layers=4", "model.hidden=32", "model.sequence=32",
    "model.vocabulary=320", "train.global_batch=4", "train.threads=1", "checkpoint.memory_seconds=0",
    "resilience.timeout_scale=4", "optimizer.decay=constant",
]  # fmt: skip
STEP_SECONDS, MEASURED = 0.5, 6


def test_layers_move_from_a_slow_node_of_a_pipeline(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ranks sleep most of a step, so that it takes as long on any machine; one of them later sleeps
    three times as long. Without that the same steps take a moment."""
    keys = [f"data.corpus={corpus}", *PIPELINE]
    undisturbed = Run(tmp_path / "undisturbed")
    undisturbed.create_or_resume(load_job("tiny", [*keys, f"train.steps={2 * MEASURED}"]))
    known = train_undisturbed(undisturbed).read_metrics()

    factor = 1 + STEP_SECONDS / min(line["step_seconds"] for line in known[MEASURED:])
    begins = (Fault(kind="slow", rank=rank, step=2, factor=factor) for rank in range(2))
    faults = [*begins, Fault(kind="slow", rank=1, step=int(14 / STEP_SECONDS), factor=2 * factor)]
    run = Run(tmp_path / "run")
    run.create_or_resume(load_job("tiny", [*keys, "train.steps=100000"]))
    train_slow(run, faults, monkeypatch)
    told = [event for event in run.read_events() if event["event"] in _TOLD]
    told = [event for event in told if event.get("culprit") != "stage"]  # of a machine that others slow, too
    assert [event["event"] for event in told] == ["diagnosis", "move", "restart"], told
    diagnosis, _, restart = told
    assert (diagnosis["culprit"], diagnosis["ranks"], diagnosis["node"]) == ("rank", [1], 1)
    (resume,) = (event for event in run.read_events() if event["event"] == "resume")
    assert resume["source"] == "memory" and int(restart["partition"].removeprefix("manual:")) > 2
    undisturbed.create_or_resume(load_job("tiny", [*keys, f"train.steps={resume['step'] + STEPS_AFTER}"]))
    assert_same_losses(run, train_undisturbed(undisturbed), resume["step"])
