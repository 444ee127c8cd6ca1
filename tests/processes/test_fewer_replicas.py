"""A node is lost for a while and nobody stands by: if this fails the run waits for it, comes to other numbers
with fewer replicas, or stays with them when the node is back."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from same_run import slow_steps, train_undisturbed
from tiny_corpora import make_corpus
from watching import descendants

from myriad.checkpoint.snapshots.server_start import server_name
from myriad.faults.rank_faults import ARMED
from myriad.job import load_job
from myriad.launchers.external_nodes import run_joined
from myriad.reports.run_report.run_facts import facts_of
from myriad.run import Run

SMALL = ["model.layers=2", "model.hidden=32", "model.sequence=32", "train.threads=1", "train.steps=100000"]
BATCH = ["optimizer.decay=constant", "train.global_batch=8", "layout.micro_batch=1"]
THREE = [
    "layout.dp=3",
    "layout.zero=1",
    "layout.shares=[3, 3, 2]",
    "resilience.engine=join",
    "resilience.nodes=3",
]
OFTEN = ["checkpoint.copies_every=3", "checkpoint.linger_seconds=60", "resilience.wait_seconds=0.5"]


class Nodes:
    """That join a run, each a process with all that it starts."""

    def __init__(self, run: Run) -> None:
        self._run, self._joined = run, dict[int, subprocess.Popen[bytes]]()

    def join(self, node: int) -> None:
        command = [sys.executable, "-m", "myriad.cli.main", "join", self._run.path, "--node", node]
        self._joined[node] = subprocess.Popen(list(map(str, command)), start_new_session=True)

    def lose(self, node: int) -> None:
        """All of it dies, and its snapshots with it."""
        process = self._joined.pop(node)
        for pid in [process.pid, *descendants(process.pid), *self._snapshot_servers(node)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def _snapshot_servers(self, node: int) -> list[int]:
        name, found = server_name(self._run.path, node), []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "cmdline").read_text().split("\0")
            except OSError:
                continue
            found += [int(path.name)] if name in words else []
        return found

    def end(self) -> list[int]:
        return [process.wait(60) for process in self._joined.values()]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "run")
    corpus = make_corpus(tmp_path, count=300)
    run.create_or_resume(load_job("tiny", [f"data.corpus={corpus}", *SMALL, *BATCH, *THREE, *OFTEN]))
    return run


@pytest.fixture
def nodes(run: Run) -> Iterator[Nodes]:
    nodes = Nodes(run)
    yield nodes
    for node in list(nodes._joined):
        nodes.lose(node)


class Story:
    """What happens to the nodes, told by the attempts of the run; at last it is stopped."""

    def __init__(self, run: Run, nodes: Nodes) -> None:
        self._run, self._nodes, self._told = run, nodes, 0

    def tick(self) -> None:
        starts, lines = events(self._run, "start"), self._run.read_metrics()
        steps = sum(line["time"] > starts[-1]["time"] for line in lines) if starts else 0
        if (len(starts), self._told) == (1, 0) and steps >= 5:
            self._nodes.lose(1)
        elif (len(starts), self._told) == (2, 1) and steps >= 1:
            self._nodes.join(1)
        elif (len(starts), self._told) == (3, 2) and steps >= 5:
            os.kill(os.getpid(), signal.SIGINT)
        else:
            return
        self._told += 1

    def stopping(self) -> None: ...


def events(run: Run, *names: str) -> list[dict]:
    return [event for event in run.read_events() if event["event"] in names]


def test_a_run_continues_with_two_of_three_replicas_and_then_with_three_again(
    run: Run, nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in slow_steps(run.path / "faults", 30.0, world=3).items():
        monkeypatch.setenv(name, value)
    for node in range(3):
        nodes.join(node)
    assert run_joined(run, 3, threads=1, observer=Story(run, nodes)) == "interrupted"
    assert nodes.end() == [0, 0, 0]
    assert [start["world"] for start in events(run, "start")] == [3, 2, 3]
    fewer, move, more = events(run, "restart", "move")
    assert (fewer["dp"], fewer["shares"], fewer["evidence"]["replicas"]) == (2, [4, 4], [3, 2])
    assert move["evidence"]["replicas"] == more["evidence"]["replicas"] == [2, 3]
    assert [resume["source"] for resume in events(run, "resume")] == ["memory", "memory"]
    lines = run.read_metrics()
    turned = events(run, "resume")[1]["step"]
    done = [line["step"] for line in lines if line["time"] > events(run, "start")[1]["time"]]
    assert turned == max(step for step in done if step <= turned) and done == sorted(set(done)), (
        "none is lost"
    )

    account = facts_of(run).account
    seconds = account.ledger.seconds()
    assert [attempt.world for attempt in account.attempts] == [3, 2, 3] and seconds["waiting"] > 0
    assert sum(seconds.values()) == pytest.approx(account.ledger.wall_seconds), "the report accounts for all"

    monkeypatch.delenv(ARMED)
    undisturbed = Run(tmp_path / "undisturbed")
    alone = {"layout": load_job("tiny", BATCH).layout, "resilience": load_job("tiny").resilience}
    alone["train"] = run.job().train.model_copy(update={"steps": lines[-1]["step"]})
    undisturbed.create_or_resume(run.job().model_copy(update=alone))
    expected = {line["step"]: line["loss"] for line in train_undisturbed(undisturbed).read_metrics()}
    found = {line["step"]: line["loss"] for line in lines}
    assert found == pytest.approx({step: expected[step] for step in found}, rel=1e-5)
