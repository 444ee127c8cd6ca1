"""If these fail, a node that the doctor found unfit gets ranks, or a healthy run waits for the doctor."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from test_decisions import World, kinds, seen

from myriad.doctor.baseline import write_baseline
from myriad.doctor.hardware import cpu_key
from myriad.supervise.agent.device_monitor import Examination
from myriad.supervise.messages import Beat, EvictionAsked, NodeJoined
from myriad.supervise.observations import Examined, RankStatus
from myriad.supervise.policy.policy_actions import (
    EndRun,
    Evict,
    Examine,
    ReportExamination,
    RestartAtStep,
    StartAttempt,
)


def join(world: World, node: int, machine: str = "", by: str = "") -> list:
    by = by or f"rack{node}:1"
    return world.handle(NodeJoined(node, 0, "here", 7, 2, 10**9, (), (), False, by, machine))


def nodes(count: int, *, needed: int = 2, doctor: str = "spares", machines: bool = True) -> World:
    world = World(nodes=needed, spares=-needed, doctor=doctor)  # none has joined yet
    for node in range(count):
        join(world, node, f"rack{node}" if machines else "")
    return world


def train(world: World) -> None:
    for node, ranks in world.decider.state.placement.items():
        world.handle(Beat(node, world.epoch, 7, tuple(seen(rank) for rank in ranks)))


def ranks_of(world: World) -> Callable[[int, float], list[RankStatus]]:
    """All train."""
    return lambda node, waited: world.ranks(node)


def asked(world: World) -> list[tuple[int, str]]:
    """Whom the doctor is to see, and how, from now on."""
    found = world.wait(2, ranks_of(world))
    return [(action.node, action.how) for action in found if isinstance(action, Examine)]


def says(world: World, node: int, verdict: str = "unfit") -> list:
    bad = ("memory patterns: 3 words came back different",) if verdict == "unfit" else ()
    return world.handle(Examined(node, f"rack{node}", "full", verdict, "in short", bad, 4.0))


def test_a_spare_is_seen_once_ranks_train_and_not_while_they_start() -> None:
    world = nodes(3)
    starting = world.wait(2, lambda node, waited: ())
    assert not any(isinstance(action, Examine) for action in starting)
    train(world)
    assert asked(world) == [(2, "full")] and asked(world) == []
    assert says(world, 2, "fit") == [], "nobody needs to know"
    assert asked(world) == []


def test_where_machines_are_shared_only_what_disturbs_no_job_is_tested() -> None:
    world = nodes(3, machines=False)
    train(world)
    assert asked(world) == [(2, "short")]


def test_an_unfit_spare_gets_no_ranks_and_is_seen_again_later() -> None:
    world = nodes(3)
    train(world)
    asked(world)
    (told,) = says(world, 2)
    assert isinstance(told, ReportExamination) and (told.verdict, told.node) == ("unfit", 2)
    assert "3 words came back different" in told.problem
    assert "--anyway" in world.decider.why_not_evict(evict(1))
    world.exit(2, 1, "device", error="an error of the device")
    (again,) = world.all_exit()
    assert isinstance(again, StartAttempt) and list(again.placement) == [0, 1], "none was evicted for it"
    train(world)
    assert asked(world) == [(1, "short")], "the suspect, not yet the spare"
    world.wait(600, ranks_of(world))
    assert (2, "full") in [(a.node, a.how) for a in world.actions if isinstance(a, Examine)][2:]
    says(world, 2, "fit")
    assert world.decider.why_not_evict(evict(1)) == ""


def evict(node: int) -> EvictionAsked:
    return EvictionAsked(node, "ann@desk", "", False)


def test_a_spare_that_is_needed_before_it_was_seen_is_taken_at_once() -> None:
    world = nodes(3)
    train(world)
    asked(world)
    world.exit(2, 1, "device", error="an error of the device")
    assert kinds(world.all_exit()) == ["Evict", "StartAttempt"]
    assert list(world.decider.state.placement) == [0, 2]


def test_a_suspect_that_is_unfit_gives_way_to_a_spare_that_comes() -> None:
    world = nodes(2)
    world.exit(2, 1, "device", error="an error of the device")
    assert kinds(world.all_exit()) == ["StartAttempt"], "it waits for no doctor"
    starting = world.wait(2, lambda node, waited: ())
    assert starting == [], "nor does the start"
    train(world)
    assert asked(world) == [(1, "short")]
    join(world, 5, "rack5")
    told, turn = says(world, 1)
    assert isinstance(told, ReportExamination) and isinstance(turn, RestartAtStep) and turn.node == 1
    evicted, again = world.all_exit(code=3, cause="turned")
    assert isinstance(evicted, Evict) and (evicted.accused, evicted.machine) == ("doctor", "rack1")
    assert list(again.placement) == [0, 5]


def test_a_suspect_that_is_fit_is_reported_and_stays() -> None:
    world = nodes(2)
    world.exit(2, 1, "device", error="an error of the device")
    world.all_exit()
    train(world)
    asked(world)
    (told,) = says(world, 1, "fit")
    assert isinstance(told, ReportExamination) and told.verdict == "fit"
    assert world.decider.state.phase == "running"


def test_on_one_node_no_node_is_suspected_and_nothing_is_slower() -> None:
    world = nodes(1, needed=1)
    world.exit(2, 1, "device", error="an error of the device")
    world.all_exit()
    train(world)
    assert asked(world) == []


def test_off_is_off() -> None:
    world = nodes(3, doctor="off")
    train(world)
    assert asked(world) == []


def test_before_a_start_all_are_seen_and_who_is_unfit_takes_no_part() -> None:
    world = nodes(3, doctor="start")
    assert kinds(world.actions) == [] and asked(world) == [(0, "full"), (1, "full"), (2, "full")]
    says(world, 0)
    says(world, 1, "fit")
    assert world.decider.state.phase == "gathering", "one is still being seen"
    (started,) = says(world, 2, "fit")
    assert isinstance(started, StartAttempt) and list(started.placement) == [1, 2]


def test_a_doctor_that_fails_itself_excludes_no_node() -> None:
    world = nodes(2, doctor="start")
    asked(world)
    says(world, 0, "fit")
    told, started = says(world, 1, "unknown")
    assert isinstance(told, ReportExamination) and isinstance(started, StartAttempt)


def test_a_start_on_unfit_nodes_alone_ends_with_their_complaints() -> None:
    world = nodes(2, doctor="start")
    asked(world)
    says(world, 0, "fit")
    says(world, 1)
    ended = world.wait(30, lambda node, waited: ())[-1]
    assert isinstance(ended, EndRun) and ended.outcome == "failed"
    assert "node 1: memory patterns: 3 words" in ended.reason


def test_another_machine_with_the_number_of_one_that_was_unfit_is_seen_again() -> None:
    world = nodes(3)
    train(world)
    asked(world)
    says(world, 2)
    join(world, 2, "rack9", by="rack9:1")
    assert asked(world) == [(2, "full")]


def test_the_short_examination_compares_with_the_baseline_and_a_failed_one_names_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real one, in its process."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    baseline = tmp_path / "myriad" / "baseline.json"
    write_baseline(baseline, {cpu_key(): {"version of Python": "2.7"}})
    found = asyncio.run(Examination(3, tmp_path).made("short"))
    assert (found.node, found.verdict, found.how) == (3, "unfit", "short")
    assert len(found.complaints) == 1 and found.complaints[0].startswith("version of Python: ")
    baseline.write_text("{")
    found = asyncio.run(Examination(3, tmp_path).made("short"))
    assert found.verdict == "unknown" and "the doctor failed" in found.words
