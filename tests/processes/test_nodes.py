"""Several nodes, as processes of this machine: what is lost with one costs the steps since its copies, or
one, and no bit; a spare takes its place, and comes and goes as nodes do."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from same_run import assert_same_run, slow_steps, train_undisturbed
from tiny_corpora import make_corpus
from watching import descendants, is_alive, wait_until

from myriad.checkpoint.snapshots.server_start import server_name, server_names
from myriad.checkpoint.snapshots.snapshot_client import list_in_memory
from myriad.doctor.baseline import write_baseline
from myriad.doctor.hardware import cpu_key
from myriad.errors import BadInputError
from myriad.faults.rank_faults import ARMED
from myriad.job import load_job
from myriad.launchers.local import run_local
from myriad.run import Run
from myriad.supervise.driver_requests import evict
from myriad.system.jsonl import JsonlTail

SMALL = [
    "model.layers=2",
    "model.hidden=32",
    "model.sequence=32",
    "train.threads=1",
    "optimizer.decay=constant",
]
TWO = [
    "layout.dp=2",
    "layout.zero=3",
    "layout.micro_batch=2",
    "resilience.nodes=2",
    "resilience.on_slow=report",
]
OFTEN = ["checkpoint.memory_seconds=0", "checkpoint.copies_every=3", "checkpoint.linger_seconds=10"]
SLOW_SECONDS = 180.0


def make_run(path: Path, corpus: Path, *overrides: str) -> Run:
    run = Run(path)
    run.create_or_resume(load_job("tiny", [f"data.corpus={corpus}", *SMALL, *TWO, *OFTEN, *overrides]))
    return run


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"), count=300)


def pids_of(run: Run, node: int) -> tuple[list[int], list[int]]:
    """The executor of a node with all that it has started; its snapshot server."""
    executors, snapshot_servers = [], []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if "myriad.supervise.agent.agent_process" in words and words[3:5] == [str(run.path), str(node)]:
            executors.append(int(path.name))
        elif server_name(run.path, node) in words:
            snapshot_servers.append(int(path.name))
    return [pid for one in executors for pid in (one, *descendants(one))], snapshot_servers


def kill(pids: list[int]) -> None:
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


class Acts:
    """Watches a run as the screen does; does what comes next when its time has come."""

    def __init__(self, *acts: tuple[Callable[[], bool], Callable[[], object]]) -> None:
        """The run ends, as by Ctrl-C, after the last act, or when one fails or does not come."""
        self._acts, self._deadline = list(acts), time.monotonic() + SLOW_SECONDS
        self.error: Exception | None = None

    def tick(self) -> None:
        if not self._acts:
            return
        try:
            if self._acts[0][0]():
                self._acts.pop(0)[1]()
            assert time.monotonic() < self._deadline, f"{len(self._acts)} acts are left"
        except Exception as error:
            self.error = error
            self._acts.clear()
        if not self._acts:
            os.kill(os.getpid(), signal.SIGINT)

    def stopping(self) -> None: ...


def events(run: Run, name: str) -> list[dict]:
    return [event for event in run.read_events() if event["event"] == name]


def has_done(run: Run, steps: int, attempt: int) -> bool:
    """Whether an attempt has done that many steps."""
    starts, lines = events(run, "start"), run.read_metrics()
    return len(starts) == attempt and sum(line["time"] > starts[-1]["time"] for line in lines) >= steps


def placements(run: Run) -> list[list[int]]:
    """The nodes of each attempt, in the order of their ranks, as the journal has them."""
    records = JsonlTail(run.path / "journal.jsonl").poll()
    started = [one for record in records for one in record.get("actions", ()) if "placement" in one]
    return [sorted(map(int, one["placement"]), key=lambda n: one["placement"][str(n)]) for one in started]


def verdicts(run: Run) -> list[dict]:
    """Of the doctor; other diagnoses are of the pace of a busy machine."""
    return [event for event in events(run, "diagnosis") if "verdict" in event]


def test_a_lost_node_comes_back_as_a_spare_that_the_doctor_examines_and_replaces_one_that_leaves(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 0 is lost, whose snapshot server has all others store, and whose host the ranks meet at. It comes
    back with another version than the cluster's nodes, so it may get no ranks; then with theirs. For the node
    that a person wants to leave no step is done twice. No bit is other, and no process is left behind. Steps
    are slow: the run lasts until all this has happened."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    baseline = tmp_path / "myriad" / "baseline.json"
    run = make_run(tmp_path / "run", corpus, "train.steps=100000", "resilience.spares=1")
    for name, value in slow_steps(run.path / "faults", 40.0).items():
        monkeypatch.setenv(name, value)
    servers, held, told, left = list[str](), list[int](), list[str](), list[int]()
    before = descendants()  # what other tests of this process keep, such as its tracker of shared memory

    def lose() -> None:
        servers.extend(server_names(run.path))
        held.extend(step for step, _ in list_in_memory(run.path, ranks=2))
        with pytest.raises(BadInputError, match=r"node 0 \(.*to spare: node 2 \("):
            evict(run, 7)
        write_baseline(baseline, {cpu_key(): {"version of torch": "1.0"}})
        processes, snapshot_servers = pids_of(run, 0)
        assert snapshot_servers
        kill([*processes, *snapshot_servers])

    def repair() -> None:
        with pytest.raises(BadInputError, match="no spare stands by"):
            evict(run, 1)
        baseline.unlink()
        kill(pids_of(run, 0)[0])

    def leaves() -> bool:
        """Whether node 1 does: once node 0 is there again."""
        with suppress(BadInputError):
            told.append(evict(run, 1, reason="a fan is loud"))
        return bool(told)

    acts = Acts(
        (lambda: has_done(run, 8, attempt=1) and bool(events(run, "spares")), lose),
        (lambda: has_done(run, 2, attempt=2) and bool(verdicts(run)), repair),
        (leaves, lambda: left.extend(set(descendants()).difference(before))),
        (lambda: has_done(run, 2, attempt=3), lambda: None),
    )
    outcome = run_local(run, 2, observer=acts)
    assert (outcome, acts.error) == ("interrupted", None)
    assert {server_name(run.path, node) for node in (0, 1)} <= {*servers}
    assert max(held) >= 3, "copies are taken every 3 steps"
    (fault,), (lost, moved) = events(run, "fault"), events(run, "resume")
    assert (fault["cause"], fault["node"]) == ("node", 0) and "rank 0 was lost" in fault["problem"]
    assert lost["source"] == "memory" and lost["step"] >= 3, "from the copies that node 1 has"
    assert placements(run) == [[0, 1], [2, 1], [2, 0]], "a rank stays where its snapshots are"

    unfit = verdicts(run)[0]
    assert (unfit["node"], unfit["verdict"]) == (0, "unfit") and "version of torch" in unfit["problem"]
    assert "gives way to a spare" in told[0]
    *_, eviction = events(run, "eviction")
    assert (eviction["node"], eviction["rule"]) == (1, "asked for by a person")
    assert eviction["evidence"]["reason"] == "a fan is loud" and eviction["evidence"]["who"]
    records = JsonlTail(run.metrics_path).poll()
    steps = [one["step"] for one in records if one["time"] > events(run, "start")[1]["time"]]
    assert moved["source"] == "memory" and steps == sorted(set(steps)), "none was done twice"

    assert len(left) > 8
    # a server waits 30 s for its first rank, and 10 s if no rank has ended its session
    wait_until(lambda: not any(map(is_alive, left)), 120)
    wait_until(lambda: server_names(run.path) == [], 120)
    assert list_in_memory(run.path) == []
    monkeypatch.delenv(ARMED)
    last = run.read_metrics()[-1]["step"]
    undisturbed = make_run(tmp_path / "undisturbed", corpus, f"train.steps={last}")
    assert_same_run(run, train_undisturbed(undisturbed))
