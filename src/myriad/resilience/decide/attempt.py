"""Another attempt: which nodes have which ranks, in which layout, and what of the last one is over. Pure.

The nodes of the last attempt keep their places as far as they are there: their snapshots are in memory.
"""

from myriad.comm.attempt_layout import AttemptLayout
from myriad.resilience.decide.actions import StartAttempt
from myriad.resilience.decide.roster import Roster
from myriad.resilience.decide.state import Plan, State
from myriad.resilience.decide.wrong_numbers import WrongNumbers

__all__ = ["next_attempt"]


def next_attempt(
    plan: Plan, state: State, numbers: WrongNumbers, roster: Roster, layout: AttemptLayout
) -> StartAttempt:
    """In a layout that the nodes that are there hold; the state is that of the new attempt."""
    chosen, each = numbers.order(*roster.places(roster.preferred, layout)), plan.world // plan.nodes
    placement = {
        number: tuple(range(place * each, (place + 1) * each))
        for place, number in enumerate(chosen[: plan.nodes_of(layout)])
    }
    rule = "ranks ended as they were asked to" if state.turning else "all nodes are there"
    evidence: dict[str, object] = {}
    if plan.fewer is not None and layout.dp != state.layout.dp:
        rule, evidence = plan.fewer.why(state.layout, layout, list(placement))
    elif list(placement) == list(state.placement):  # else others may be slow there, or nobody
        turned = state.next_layout
        layout = state.layout if turned is None or turned.dp != layout.dp else turned
    _begin(state, layout, placement)
    return StartAttempt(
        rule=rule,
        evidence=evidence,
        epoch=state.epoch,
        placement=dict(placement),
        again=state.epoch > plan.first_epoch,
        newest_step=state.newest_step,
        skipped_steps=state.skipped_steps,
        layout=state.layout,
    )


def _begin(state: State, layout: AttemptLayout, placement: dict[int, tuple[int, ...]]) -> None:
    state.layout, state.next_layout = layout, None
    state.moved = state.moved if layout.partition is not None else None
    if layout.dp is None:
        state.full_places = tuple(placement)
    state.placement, state.turning = placement, False
    state.leaving, state.leaving_as, state.asked = -1, "", None
    state.epoch, state.phase, state.exits, state.incident = state.epoch + 1, "running", {}, None
