"""A run that repairs itself, on real processes: what is killed, stopped or hung costs at most a step, and the
weights at the end are those of a run that nothing happened to."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from same_run import assert_same_run, slow_steps, train_undisturbed
from tiny_corpora import make_corpus
from watching import process_of

from myriad.job import load_job
from myriad.launchers.local import run_local
from myriad.run import Run

SMALL = ["model.layers=2", "model.hidden=32", "model.sequence=32", "train.threads=1"]
TWO = [
    "train.steps=22",
    "layout.dp=2",
    "layout.zero=3",
    "layout.micro_batch=2",
    "checkpoint.memory_seconds=0",
]


def make_run(path: Path, corpus: Path, *overrides: str) -> Run:
    run = Run(path)
    run.create_or_resume(load_job("tiny", [f"data.corpus={corpus}", *SMALL, *overrides]))
    return run


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"), count=300)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Run:
    return train_undisturbed(make_run(tmp_path_factory.mktemp("undisturbed") / "run", corpus, *TWO))


class Acts:
    """Watches a run as the screen does, and does something once at each of some steps."""

    def __init__(self, run: Run, **acts: Callable[[], object]) -> None:
        """``at_9=...``"""
        self._run = run
        self._acts = {int(name.removeprefix("at_")): act for name, act in acts.items()}

    def tick(self) -> None:
        lines = self._run.read_metrics()
        step = lines[-1]["step"] if lines else 0
        for at in [at for at in self._acts if at <= step]:
            self._acts.pop(at)()

    def stopping(self) -> None: ...


def events(run: Run, name: str) -> list[dict]:
    return [event for event in run.read_events() if event["event"] == name]


def kill(what: str, number: signal.Signals = signal.SIGKILL) -> None:
    os.kill(process_of(what), number)


def test_a_killed_driver_node_agent_and_rank_and_a_stopped_rank_cost_a_step_at_most_and_not_a_bit(
    tmp_path: Path, corpus: Path, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other. Training continues without its driver."""
    for name, value in slow_steps(tmp_path / "faults", 15.0).items():
        monkeypatch.setenv(name, value)
    run = make_run(tmp_path / "run", corpus, *TWO)
    acts = Acts(
        run,
        at_3=lambda: kill("driver"),
        at_9=lambda: kill("agent_process"),
        at_13=lambda: kill("rank-1"),
        at_18=lambda: kill("rank-0", signal.SIGSTOP),
    )
    assert run_local(run, 2, observer=acts) == "finished"
    lost, killed, stopped = events(run, "fault")
    assert lost["cause"] == "node" and lost["problem"] == "node 0 with ranks 0 and 1 was lost"
    assert (killed["cause"], killed["rank"]) == ("killed", 1)
    assert (stopped["cause"], stopped["rank"]) == ("stopped", 0)
    assert len(events(run, "start")) == 4, "the driver's death ended nothing"
    _, *resumes = events(run, "resume")
    for fault, resume in zip((killed, stopped), resumes, strict=True):
        assert resume["source"] == "memory" and fault["step"] - resume["step"] <= 2
    assert [event["epoch"] for event in events(run, "restart")] == [2, 3, 4]
    assert_same_run(run, undisturbed)
