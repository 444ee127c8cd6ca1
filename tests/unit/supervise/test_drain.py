"""If these fail, an operator who drains a node stops the run, or gets a wrong answer."""

from pathlib import Path

import pytest
from test_decisions import World, kinds

from myriad.errors import BadInputError, RunFailedError
from myriad.job import load_job
from myriad.run import Run
from myriad.supervise.driver_requests import evict
from myriad.supervise.messages import EvictionAsked
from myriad.supervise.policy.drain import what_follows
from myriad.supervise.policy.policy_actions import Evict, RestartAtStep, StartAttempt


def asked(node: int, *, anyway: bool = False) -> EvictionAsked:
    return EvictionAsked(node, "ann@desk", "a loud fan", anyway)


def turned(world: World) -> list:
    return world.all_exit(code=3, cause="turned")


def test_a_node_with_ranks_gives_way_to_a_spare_after_the_step() -> None:
    world = World(nodes=2, spares=1)
    assert world.decider.why_not_evict(asked(1)) == ""
    (turn,) = world.handle(asked(1))
    assert isinstance(turn, RestartAtStep) and (turn.node, turn.rule) == (1, "asked for by a person")
    evicted, started = turned(world)
    assert isinstance(evicted, Evict) and evicted.node == 1
    assert evicted.evidence == {"who": "ann@desk", "reason": "a loud fan"}
    assert isinstance(started, StartAttempt) and list(started.placement) == [0, 2]
    assert world.decider.state.asked is None and world.decider.state.leaving == -1


def test_a_spare_leaves_and_no_rank_notices() -> None:
    world = World(nodes=2, spares=1)
    assert kinds(world.handle(asked(2))) == ["Evict"]
    assert sorted(world.decider.nodes) == [0, 1] and world.decider.state.phase == "running"


def test_without_a_spare_nothing_is_done_unless_it_is_meant() -> None:
    world = World(nodes=2)
    assert "--anyway" in world.decider.why_not_evict(asked(1))
    assert world.handle(asked(1)) == []
    assert kinds(world.handle(asked(1, anyway=True))) == ["RestartAtStep"]
    assert kinds(turned(world)) == ["Evict"]
    assert world.wait(20, lambda node, waited: ()) == [] and world.decider.state.phase == "gathering"
    (started,) = world.join(7)
    assert isinstance(started, StartAttempt) and list(started.placement) == [0, 7]


def test_a_fault_before_the_step_is_done_changes_nothing_of_it() -> None:
    world = World(nodes=2, spares=1)
    world.handle(asked(0))
    world.exit(3)
    assert kinds(world.all_exit()) == ["Evict", "StartAttempt"]
    assert list(world.decider.state.placement) == [2, 1]


def test_a_run_that_finishes_first_is_finished() -> None:
    world = World(nodes=2, spares=1)
    world.handle(asked(0))
    (ended,) = world.all_exit(code=0, cause="done")
    assert ended.outcome == "finished"
    assert world.decider.why_not_evict(asked(0)) == "the run is over"


def test_an_unknown_node_is_refused_with_those_that_exist() -> None:
    world = World(nodes=2, spares=1)
    why = world.decider.why_not_evict(asked(9))
    assert why == "no node of this run, which has node 0, node 1; to spare: node 2"


def test_one_leaves_at_a_time() -> None:
    world = World(nodes=2, spares=2)
    world.handle(asked(0))
    assert "node 0 is about to leave" in world.decider.why_not_evict(asked(1))


def test_a_drain_answers_with_what_will_follow() -> None:
    world = World(nodes=2, spares=1)
    state, nodes = world.decider.state, world.decider.nodes
    assert "gives way to a spare when the step" in what_follows(asked(0), state, nodes, nodes, 2)
    assert "had no ranks" in what_follows(asked(2), state, nodes, nodes, 2)
    assert "waits for another" in what_follows(asked(0, anyway=True), state, nodes, [0, 1], 2)


@pytest.mark.slow
def test_a_run_that_is_not_at_work_is_reported_in_a_line(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.create_or_resume(load_job("tiny", []))
    with pytest.raises(BadInputError, match="is not running"):
        evict(run, 0)
    (run.path / "secret").write_text("a" * 64)
    (run.path / "driver.json").write_text('{"host": "127.0.0.1", "port": 1, "pid": 1, "silent_seconds": 3.5}')
    with pytest.raises(BadInputError, match=r"no driver listens at 127\.0\.0\.1:1"):
        evict(run, 0)
    with run.lock(), pytest.raises(RunFailedError, match="not reachable"):
        evict(run, 0)
