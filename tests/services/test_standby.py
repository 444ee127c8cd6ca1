"""The machine of the driver is lost. If this fails, a run ends, or loses more than it must, with it."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from machines import Machine, wait_for
from same_run import assert_same_run, slow_steps, train_undisturbed
from watched_runs import events, make_run

from myriad.launchers.run_start import open_lease
from myriad.run import Run
from myriad.telemetry.loggers import read_forwarded

KEYS = [
    "layout.dp=2", "layout.zero=3", "layout.micro_batch=2", "train.steps=45", "checkpoint.memory_seconds=0",
    "checkpoint.copies_every=5", "resilience.nodes=2", "resilience.on_slow=report",
    "resilience.timeout_scale=0.5",
]  # fmt: skip

LOGGERS = ['telemetry.loggers=["tensorboard"]'] if find_spec("tensorboard") else []


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[dict[str, Machine]]:
    """Those of a driver, of two that stand by, of two nodes and a spare."""
    found = {name: Machine(name, tmp_path) for name in ("driver", "b", "c", "node-0", "node-1", "spare")}
    yield found
    for machine in found.values():
        machine.lose()


def reached(run: Run, step: int) -> bool:
    lines = run.read_metrics()
    return bool(lines) and lines[-1]["step"] >= step


def num_standing(run: Run) -> int:
    return sum(log.read_text().count("standing by") for log in run.logs_path.glob("driver-*.log"))


def test_two_drivers_machines_are_lost_the_second_with_a_node_and_not_a_bit_is(
    tmp_path: Path,
    corpus: Path,
    server,
    machines: dict[str, Machine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the first no rank knows anything. With the second goes the node that ranks meet at."""
    undisturbed = train_undisturbed(make_run(tmp_path / "undisturbed", corpus, *KEYS))
    for name, value in slow_steps(tmp_path / "faults", 30.0).items():
        monkeypatch.setenv(name, value)
    keys = ["resilience.engine=join", f"resilience.journal={server.url}"]
    run = make_run(tmp_path / "run", corpus, *KEYS, *keys, *LOGGERS)
    all_of_them = tuple(machines.values())
    machines["driver"].myriad("train", run.path)
    machines["node-0"].myriad("join", run.path, "--node", 0)
    machines["node-1"].myriad("join", run.path, "--node", 1)
    wait_for("steps", lambda: reached(run, 5), *all_of_them)
    standby = {name: machines[name].myriad("train", run.path, "--standby") for name in ("b", "c")}
    machines["spare"].myriad("join", run.path, "--node", 2)
    lease = open_lease(run.path, run.job().resilience)
    wait_for("two that stand by", lambda: lease.inspect()[1] and num_standing(run) == 2, *all_of_them)

    machines["driver"].lose()
    wait_for("the second driver", lambda: events(run, "takeover"), *all_of_them)
    at = run.read_metrics()[-1]["step"]
    wait_for("steps under it", lambda: reached(run, at + 5), *all_of_them)
    assert len(events(run, "start")) == 1 and events(run, "fault", "restart") == [], "no rank has noticed"

    second = next(
        name for name in standby if f":{standby[name].pid}:" in events(run, "takeover")[0]["driver"]
    )
    machines[second].lose()
    machines["node-0"].lose()
    wait_for("the third driver", lambda: len(events(run, "takeover")) == 2, *all_of_them)
    third = standby["c" if second == "b" else "b"]
    wait_for("the end", lambda: third.poll() is not None, *all_of_them)
    assert third.returncode == 0, machines["b"].log.read_text() + machines["c"].log.read_text()

    (fault,) = events(run, "fault")
    assert (fault["cause"], fault["node"]) == ("node", 0), "not the rank that has missed its peer"
    (resume,) = events(run, "resume")
    assert resume["source"] == "memory"
    if LOGGERS:
        told = read_forwarded(run.path, "tensorboard").metrics
        assert told == run.metrics_path.stat().st_size, "curves go on under each driver"
        assert events(run, "logger") == []
    assert_same_run(run, undisturbed)
    for name in ("node-1", "spare"):
        (joined,) = machines[name].started
        wait_for("their leaving", lambda joined=joined: joined.poll() is not None, *all_of_them)
