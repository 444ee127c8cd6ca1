"""Several nodes, as processes of this machine: what is lost with one costs the steps since its copies, or
one, and no bit; a spare takes its place, and comes and goes as nodes do."""

import os
import signal
from collections.abc import Callable
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
from myriad.job import load_job
from myriad.launchers.local import run_local
from myriad.run import Run
from myriad.supervise.driver_requests import evict
from myriad.system.jsonl import JsonlTail

SMALL = ["model.layers=2", "model.hidden=32", "model.sequence=32", "train.threads=1", "train.steps=60"]
TWO = ["layout.dp=2", "layout.zero=3", "layout.micro_batch=2", "resilience.nodes=2"]
OFTEN = ["checkpoint.memory_seconds=0", "checkpoint.copies_every=5", "checkpoint.linger_seconds=60"]


def make_run(path: Path, corpus: Path, *overrides: str) -> Run:
    run = Run(path)
    run.create_or_resume(load_job("tiny", [f"data.corpus={corpus}", *SMALL, *TWO, *OFTEN, *overrides]))
    return run


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"), count=300)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Run:
    return train_undisturbed(make_run(tmp_path_factory.mktemp("undisturbed") / "run", corpus))


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


def lose(run: Run, node: int, *, memory: bool = True) -> None:
    """All of it dies; ``memory``: the snapshots too."""
    processes, snapshot_servers = pids_of(run, node)
    assert processes and snapshot_servers
    for pid in [*processes, *snapshot_servers * memory]:
        os.kill(pid, signal.SIGKILL)


class Acts:
    """Watches a run as the screen does; does what comes next when its time has come."""

    def __init__(self, run: Run, *acts: tuple[Callable[[], bool], Callable[[], object]]) -> None:
        self._run, self._acts = run, list(acts)

    def tick(self) -> None:
        if self._acts and self._acts[0][0]():
            self._acts.pop(0)[1]()

    def stopping(self) -> None: ...


def events(run: Run, name: str) -> list[dict]:
    return [event for event in run.read_events() if event["event"] == name]


def reached(run: Run, step: int, attempt: int = 1) -> Callable[[], bool]:
    """Whether an attempt has done a step."""

    def arrived() -> bool:
        lines = run.read_metrics()
        return bool(lines) and lines[-1]["step"] >= step and len(events(run, "start")) >= attempt

    return arrived


def placements(run: Run) -> list[list[int]]:
    """The nodes of each attempt, in the order of their ranks, as the journal has them."""
    records = JsonlTail(run.path / "journal.jsonl").poll()
    started = [one for record in records for one in record.get("actions", ()) if "placement" in one]
    return [sorted(map(int, one["placement"]), key=lambda n: one["placement"][str(n)]) for one in started]


def test_a_spare_takes_the_place_of_a_lost_node_which_comes_back_as_a_spare_and_not_a_bit_is(
    tmp_path: Path, corpus: Path, undisturbed: Run
) -> None:
    """Of node 0, whose snapshot server has all others store, and whose host the ranks meet at; then the spare
    is lost. What both nodes have in memory is seen while it trains."""
    run = make_run(tmp_path / "run", corpus, "resilience.spares=1")
    servers, steps = list[str](), list[int]()

    def lose_first() -> None:
        servers.extend(server_names(run.path))
        steps.extend(step for step, _ in list_in_memory(run.path, ranks=2))
        lose(run, 0)

    acts = Acts(
        run,
        (reached(run, 20), lose_first),
        (lambda: reached(run, 35, attempt=2)() and bool(pids_of(run, 0)[0]), lambda: lose(run, 2)),
    )
    assert run_local(run, 2, observer=acts) == "finished"
    (first, second), resumes = events(run, "fault"), events(run, "resume")
    assert (first["cause"], first["node"]) == ("node", 0) and "rank 0 was lost" in first["problem"]
    assert (second["cause"], second["node"]) == ("node", 2)
    assert {server_name(run.path, node) for node in (0, 1)} <= {*servers}
    assert max(steps) >= 10, "copies are taken every 5 steps"
    assert [resume["source"] for resume in resumes] == ["memory", "memory"]
    assert resumes[0]["step"] >= 10, "from the copies that node 1 has"
    assert placements(run) == [[0, 1], [2, 1], [0, 1]], "rank 1 stays where its snapshots are"
    assert_same_run(run, undisturbed)


def test_a_node_that_a_person_wants_to_leave_gives_way_after_its_step(
    tmp_path: Path, corpus: Path, undisturbed: Run
) -> None:
    """A spare takes its place; no step is done twice, no bit is other, and no process is left behind."""
    run = make_run(tmp_path / "run", corpus, "resilience.spares=1", "checkpoint.linger_seconds=10")
    told: list[str] = []
    left: list[int] = []
    before = descendants()  # what other tests of this process keep, such as its tracker of shared memory

    def leave() -> None:
        left.extend(set(descendants()).difference(before))
        with pytest.raises(BadInputError, match=r"node 0 \(.*to spare: node 2 \("):
            evict(run, 7)
        told.append(evict(run, 1, reason="a fan is loud"))

    acts = Acts(run, (lambda: reached(run, 5)() and bool(events(run, "spares")), leave))
    assert run_local(run, 2, observer=acts) == "finished"
    assert "gives way to a spare" in told[0]
    (eviction,) = events(run, "eviction")
    assert (eviction["node"], eviction["rule"]) == (1, "asked for by a person")
    assert eviction["evidence"]["reason"] == "a fan is loud" and eviction["evidence"]["who"]
    assert placements(run) == [[0, 1], [0, 2]] and events(run, "fault") == []
    steps = [record["step"] for record in JsonlTail(run.metrics_path).poll()]
    assert steps == sorted(set(steps)), "none was done twice"
    assert_same_run(run, undisturbed)
    assert len(left) > 8
    # a server waits 30 s for its first rank, and 10 s if no rank has ended its session
    wait_until(lambda: not any(map(is_alive, left)), 120)
    wait_until(lambda: server_names(run.path) == [], 120)
    assert list_in_memory(run.path) == []


def test_a_spare_that_the_doctor_finds_unfit_gets_no_ranks(
    tmp_path: Path, corpus: Path, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another version than the cluster's nodes: it is told, and the lost node itself begins again, at once
    and from memory. Steps are slow until then: the run is not to end before the doctor has."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    write_baseline(tmp_path / "myriad" / "baseline.json", {cpu_key(): {"version of torch": "1.0"}})
    run = make_run(tmp_path / "run", corpus, "resilience.spares=1")
    for name, value in slow_steps(run.path / "faults", 10.0).items():
        monkeypatch.setenv(name, value)
    acts = Acts(
        run,
        (
            lambda: reached(run, 20)() and bool(events(run, "diagnosis")),
            lambda: lose(run, 1, memory=False),
        ),
    )
    assert run_local(run, 2, observer=acts) == "finished"
    told = events(run, "diagnosis")[0]
    assert (told["node"], told["verdict"]) == (2, "unfit") and "version of torch" in told["problem"]
    (resume,) = events(run, "resume")
    assert resume["source"] == "memory" and resume["step"] >= 10, "the last copies, or those before"
    assert placements(run) == [[0, 1], [0, 1]]
    assert_same_run(run, undisturbed)
