"""If these fail, a run on several machines does not survive that one of them is cut off: it waits for ever,
goes on in two places, or comes to other numbers. Hosts join it as a person or a manager of machines does."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from same_run import assert_same_run, slow_steps, train_undisturbed
from tiny_corpora import make_corpus

from hosts import Hosts
from myriad.faults.rank_faults import ARMED
from myriad.job import load_job
from myriad.run import Run
from myriad.system.jsonl import JsonlTail

KEYS = (
    "model.layers=2",
    "model.hidden=32",
    "model.sequence=32",
    "train.threads=1",
    "optimizer.decay=constant",
    "layout.dp=2",
    "layout.zero=3",  # no rank has what another keeps
    "layout.micro_batch=2",
    "comm.hierarchy=flat",
    "checkpoint.copies_every=3",
    "checkpoint.memory_seconds=0",
    "checkpoint.linger_seconds=30",
    "resilience.nodes=2",
)
JOINED = ("resilience.engine=join", "resilience.listen=10.77.0.1")
DRIVER, FIRST, SECOND, SPARE = range(4)
"""Hosts."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"), count=300)


def make_run(path: Path, corpus: Path, *more: str) -> Run:
    run = Run(path)
    run.create_or_resume(load_job("tiny", [f"data.corpus={corpus}", *KEYS, *more]))
    return run


def start(made: Hosts, host: int, *arguments: object) -> "subprocess.Popen[Any]":
    """`myriad` on a host, which is to find out by itself which network leads to the others."""
    command = ["env", "-u", "GLOO_SOCKET_IFNAME", sys.executable, "-m", "myriad.cli.main"]
    return made.start(host, [*command, *map(str, arguments)])


def wait_until(condition: Callable[[], Any], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.05)


def events(run: Run, name: str) -> list[dict[str, Any]]:
    return [event for event in run.read_events() if event["event"] == name]


def steps_done(run: Run) -> int:
    lines = run.read_metrics()
    return lines[-1]["step"] if lines else 0


def ranks_on(made: Hosts, host: int) -> list[str]:
    """Names of the ranks that live there."""
    found = subprocess.run(
        ["ip", "netns", "pids", made.namespace(host)], capture_output=True, text=True
    ).stdout.split()
    names = []
    for pid in found:
        try:
            names.append(Path(f"/proc/{pid}/comm").read_text().strip())
        except OSError:
            continue
    return [name for name in names if name.startswith("myriad-rank-")]


def placements(run: Run) -> list[dict[str, list[int]]]:
    records = JsonlTail(run.path / "journal.jsonl").poll()
    return [one["placement"] for record in records for one in record.get("actions", ()) if "placement" in one]


def test_a_host_whose_cable_was_out_for_a_moment_continues_and_one_that_is_cut_off_gives_way_to_a_spare(
    hosts: Callable[..., Hosts], tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two cables are out for a moment, as if nothing had happened. Then the first host is cut off, and can do
    nothing any more: its snapshot server is the one that has all others store, and the ranks meet there.
    `test_faults_on_hosts` cuts off the other one. Steps are slow: the run lasts until all this has
    happened."""
    for name, value in slow_steps(tmp_path / "faults", 40.0).items():
        monkeypatch.setenv(name, value)
    made, run = hosts(4), make_run(tmp_path / "run", corpus, "train.steps=100000", *JOINED)
    train = start(made, DRIVER, "train", run.path, "--oversubscribe", "--json")
    joined = [
        start(made, FIRST, "join", run.path, "--node", 0),
        start(made, SECOND, "join", run.path, "--node", 1),
    ]
    wait_until(
        lambda: len(list(run.path.glob("nodes/node-*.json"))) == 2
    )  # the spare would take a free number
    joined.append(start(made, SPARE, "join", run.path))
    wait_until(lambda: steps_done(run) >= 4 and events(run, "spares"))
    made.set_link(FIRST, up=False)
    time.sleep(1.0)
    made.set_link(FIRST, up=True)
    done = steps_done(run)
    wait_until(lambda: steps_done(run) >= done + 4)
    take_down(made, SECOND, seconds=1.0)
    done = steps_done(run)
    wait_until(lambda: steps_done(run) >= done + 4 and len(health(run)) == 2)
    assert events(run, "fault") == [] and len(events(run, "start")) == 1
    assert health(run) == {(0, "link", "eth0"), (1, "link", "eth0")}

    made.set_link(FIRST, up=False)
    wait_until(lambda: events(run, "eviction"))
    (evicted,), (fault,) = events(run, "eviction"), events(run, "fault")
    assert evicted["node"] == 0 and evicted["evidence"]["silent_seconds"] >= 3.5
    assert (fault["cause"], fault["node"]) == ("node", 0)
    wait_until(lambda: ranks_on(made, FIRST) == [])
    wait_until(
        lambda: events(run, "resume") and run.read_metrics()[-1]["time"] > events(run, "start")[1]["time"]
    )
    train.send_signal(signal.SIGINT)
    assert train.wait(120) == 130
    assert [process.wait(30) for process in joined[1:]] == [0, 0]
    (resume,) = events(run, "resume")
    assert resume["source"] == "memory"
    before, after = ({int(node): ranks for node, ranks in one.items()} for one in placements(run))
    assert before == {0: [0], 1: [1]} and after == {2: [0], 1: [1]}
    last = steps_done(run)
    stored = [event["step"] for event in events(run, "checkpoint")]
    assert stored == [last], "what was cut off has stored nothing"
    monkeypatch.delenv(ARMED)
    undisturbed = make_run(tmp_path / "undisturbed", corpus, f"train.steps={last}")
    assert_same_run(run, train_undisturbed(undisturbed))


def health(run: Run) -> set[tuple[int, str, str]]:
    """Node, kind and interface of each report."""
    return {(one["node"], one["what"], one["evidence"]["interface"]) for one in events(run, "health")}


def take_down(made: Hosts, host: int, seconds: float) -> None:
    """In the host itself: routes are gone meanwhile, too."""
    for state, wait in (("down", seconds), ("up", 0.0)):
        subprocess.run(["ip", "-n", made.namespace(host), "link", "set", "eth0", state], check=True)
        time.sleep(wait)
