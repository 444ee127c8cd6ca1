"""If these fail, a run that is to go back before a spike does not, meets it again, or blames a node."""

from test_decisions import World

from myriad.supervise.exit_causes import cause_of, spike_text
from myriad.supervise.policy.policy_actions import EndRun, Evict, PolicyAction, ReportFault, StartAttempt

RECURRED = "the spike recurred when the step was recomputed"
ERROR = (
    f"myriad: error: step {{step}}: {RECURRED}: gradient norm 100, the median of 128 steps is 1, the limit 2"
)


def spike(world: World, step: int) -> list[PolicyAction]:
    """Every rank ends, and says the same."""
    done = len(world.actions)
    for one in range(4):
        world.exit(one, 1, "spike", step, ERROR.format(step=step))
    return world.actions[done:]


def started(actions: list[PolicyAction]) -> StartAttempt:
    (one,) = (action for action in actions if isinstance(action, StartAttempt))
    return one


def test_the_error_of_every_rank_is_recognised_as_a_spike() -> None:
    error = ERROR.format(step=3)
    assert cause_of(1, error, memory_killed=False) == "spike"
    assert spike_text(error).startswith(f"{RECURRED}: gradient norm 100")


def test_the_run_continues_from_100_steps_before_and_skips_what_led_to_it() -> None:
    world = World(nodes=2, spares=1, spike_steps=(100, 100))
    before = world.decider.state.placement
    actions = spike(world, 500)
    start = started(actions)
    assert start.newest_step == 399 and start.skipped_steps == tuple(range(400, 601))
    (blame,) = (one for one in actions if isinstance(one, ReportFault))
    assert (blame.cause, blame.rank, blame.node, blame.step) == ("spike", -1, -1, 500)
    assert start.placement == before and not any(isinstance(one, Evict) for one in actions)


def test_one_that_comes_later_adds_to_what_is_skipped() -> None:
    world = World(spike_steps=(10, 5))
    spike(world, 50)
    start = started(spike(world, 60))
    assert start.newest_step == 49 and start.skipped_steps == tuple(range(40, 66))


def test_early_in_a_run_it_starts_again() -> None:
    start = started(spike(World(spike_steps=(100, 100)), 40))
    assert start.newest_step == 0 and start.skipped_steps[0] == 1


def test_the_same_again_and_again_without_progress_ends_the_run_with_the_reason() -> None:
    world = World(spike_steps=(10, 5))
    for _ in range(6):
        spike(world, 50)
    (end,) = (one for one in world.actions if isinstance(one, EndRun))
    assert end.outcome == "failed" and RECURRED in end.reason
