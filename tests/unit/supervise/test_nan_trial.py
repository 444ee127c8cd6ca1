"""If these fail, a chance NaN ends a run, a node that makes them stays, or a batch that is none is tried for
ever."""

import pytest
from test_decisions import World, kinds, seen

from myriad.supervise.exit_causes import cause_of, first_not_finite
from myriad.supervise.messages import Beat
from myriad.supervise.policy.policy_actions import (
    Diagnose,
    EndRun,
    Evict,
    PolicyAction,
    ReportFault,
    StartAttempt,
)

SAID = "myriad: error: step {step}: loss is nan; first bad tensor is the gradient of a.b, on rank {rank}"


def not_finite(world: World, rank: int, step: int = 8) -> list[PolicyAction]:
    """Every rank ends, and says the same."""
    done = len(world.actions)
    error = SAID.format(step=step, rank=rank)
    for one in range(4):
        world.exit(one, 1, "nan", step, error)
    return world.actions[done:]


def goes_on(world: World, step: int = 9) -> list[PolicyAction]:
    found = []
    for node in list(world.decider.state.placement):
        found += world.handle(Beat(node, world.epoch, 7, tuple(world.ranks(node, step=step))))
    return found


def started(actions: list[PolicyAction]) -> StartAttempt:
    (one,) = (action for action in actions if isinstance(action, StartAttempt))
    return one


def over(world: World) -> EndRun:
    (one,) = (action for action in world.actions if isinstance(action, EndRun))
    return one


def test_the_error_of_every_rank_names_the_rank_with_the_first_bad_tensor() -> None:
    error = SAID.format(step=3, rank=12)
    assert cause_of(1, error, memory_killed=False) == "nan" and first_not_finite(error)[0] == 12
    assert cause_of(1, "ValueError: loss is odd", memory_killed=False) == "user"
    world = World(nodes=2)
    blame = next(one for one in not_finite(world, rank=3) if isinstance(one, ReportFault))
    assert (blame.cause, blame.rank, blame.node, blame.step) == ("nan", 3, 1, 8)


def test_gone_on_replay_in_place_it_was_chance() -> None:
    world = World(nodes=2)
    before = world.decider.state.placement
    assert started(not_finite(world, 3)).placement == before
    assert goes_on(world, step=8) == [], "the step is not yet done"
    (diagnosis,) = goes_on(world)
    assert isinstance(diagnosis, Diagnose)
    assert (diagnosis.verdict, diagnosis.rank, diagnosis.node, diagnosis.step) == ("transient", 3, 1, 8)
    assert goes_on(world) == [] and world.decider.state.trial is None


def test_gone_at_the_last_step_it_is_reported_when_all_ranks_have_ended_well() -> None:
    world = World()
    not_finite(world, 3, step=20)
    for rank in range(4):
        world.exit(rank, 0, "done", 20)
    assert [one.verdict for one in world.actions if isinstance(one, Diagnose)] == ["transient"]
    assert over(world).outcome == "finished"


def test_on_one_node_a_second_non_finite_step_ends_the_run_with_the_reason() -> None:
    world = World()
    not_finite(world, 3)
    actions = not_finite(world, 3)
    assert kinds(actions)[-2:] == ["Diagnose", "EndRun"]
    assert over(world).reason.startswith("the gradient of a.b is not finite in step 8, on rank 3 (log: a")
    assert "it came again on replay, and there is no other node to try it on" in over(world).reason


def test_again_in_place_its_work_goes_to_a_spare_and_gone_there_the_node_is_evicted() -> None:
    world = World(nodes=2, spares=1)
    not_finite(world, 3)
    assert started(not_finite(world, 3)).placement == {0: (0, 1), 2: (2, 3)}
    diagnosis, evict = goes_on(world)
    assert isinstance(diagnosis, Diagnose) and (diagnosis.verdict, diagnosis.node) == ("hardware", 1)
    assert isinstance(evict, Evict) and evict.node == 1


def test_without_a_spare_all_ranks_move_on_by_a_node() -> None:
    world = World(nodes=2)
    not_finite(world, 3)
    assert started(not_finite(world, 3)).placement == {1: (0, 1), 0: (2, 3)}
    (diagnosis,) = goes_on(world)
    assert (diagnosis.verdict, diagnosis.node) == ("hardware", 1)


def test_what_stays_with_the_node_when_ranks_have_moved_is_the_node() -> None:
    world = World(nodes=2)
    for rank in (3, 3, 1):
        not_finite(world, rank)
    assert [one.verdict for one in world.actions if isinstance(one, Diagnose)] == ["hardware"]
    assert over(world).outcome == "failed" and over(world).reason.endswith("it is node 1")


def test_what_stays_with_the_rank_wherever_it_is_is_the_batch() -> None:
    world = World(nodes=2, spares=1)
    for _ in range(3):
        not_finite(world, 3)
    assert [one.verdict for one in world.actions if isinstance(one, Diagnose)] == ["deterministic"]
    assert "on another node: it is the data or the model" in over(world).reason
    assert "Evict" not in kinds(world.actions)


def test_ranks_that_die_before_they_could_be_moved_prove_nothing() -> None:
    world = World(nodes=2, spares=1)
    not_finite(world, 3)
    world.exit(0)
    world.all_exit()
    assert "Diagnose" not in kinds(world.actions)
    assert started(not_finite(world, 3)).placement == {0: (0, 1), 2: (2, 3)}


def test_a_batch_that_is_to_be_skipped_is_in_every_attempt_that_follows() -> None:
    world = World(on_nan="skip")
    not_finite(world, 3)
    assert started(not_finite(world, 3)).skipped_steps == (8,)
    goes_on(world, 30)
    not_finite(world, 2, step=30)
    assert started(not_finite(world, 2, step=30)).skipped_steps == (8, 30)
    world.exit(0)
    assert started(world.all_exit()).skipped_steps == (8, 30)


@pytest.mark.parametrize("plan", [{"on_nan": "stop"}, {"restarts": 0}])
def test_a_run_that_is_to_stop_at_once_does(plan: dict) -> None:
    world = World(**plan)
    not_finite(world, 3)
    assert over(world).outcome == "failed" and "on rank 3" in over(world).reason


def test_transient_faults_that_recur_at_one_step_end_the_run() -> None:
    world = World(nodes=2, spares=1)
    for _ in range(40):
        if world.decider.state.phase == "over":
            break
        not_finite(world, seen(3).rank)
    assert over(world).outcome == "failed"
