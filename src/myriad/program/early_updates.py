"""Pass that updates each stage inside the last backward, as soon as its gradients are reduced.

    behind the norm   B s1 START_REDUCE s1 B s0 START_REDUCE s0 AWAIT s1 s0 CLIP UPDATE s0 s1
    in the backward   B s1 START_REDUCE s1 B s0 START_REDUCE s0 AWAIT s1 UPDATE s1 AWAIT s0 UPDATE s0 CLIP

CLIP then only computes the norm: the caller must ensure that the norm scales nothing. A rank with gradients
left to send sends them first, because another rank computes with them. A reduction overlaps with some compute
actions before the rank waits for it. Parameters that two stages of a rank share are updated with the first of
these stages, when both have added their gradients; neither stage is gathered before.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from myriad.program.actions import COMPUTE, SEMANTICS, Action, Collective, Kind, Program, kinds_where
from myriad.program.passes import split_at_computes

__all__ = ["update_early"]

_BEHIND = 2
"""Compute actions between issuing a reduction and waiting for it. By then the links carry the next
reduction."""
_POSTS = kinds_where(lambda does: does.starts is Collective.REDUCE)
_ENDS = kinds_where(lambda does: does.ends is Collective.REDUCE)
_WAITS = COMPUTE | {Kind.WAIT} | kinds_where(lambda does: does.ends is Collective.GATHER)


def update_early(program: Program, *, travels: bool) -> Program:
    """Move the updates of a training program that ends with CLIP and UPDATEs. ``travels``: gradients are
    reduced between ranks, so reductions need compute actions to overlap with."""
    assert program.lowering is not None and program.lowering.training
    ranks = (tuple(_moved(program, rank, _BEHIND if travels else 0)) for rank in range(program.num_ranks))
    lowering = replace(program.lowering, updates_early=True)
    return replace(program, ranks=tuple(ranks), lowering=lowering)


@dataclass(frozen=True, order=True)
class _Place:
    """The position at which a stage's gradients are waited for, or at which the stage is updated."""

    gap: int
    turn: int
    """The stage's index in the order of reductions."""
    updates: bool = False
    after_both: bool = False
    """Whether the place is after another stage's update at the same position."""


def _moved(program: Program, rank: int, behind: int) -> Iterator[Action]:
    actions = program.ranks[rank]
    clip = next(at for at, action in enumerate(actions) if action.kind is Kind.CLIP)
    gaps, updates = split_at_computes(actions[:clip]), _updates(actions[clip + 1 :])
    waits, places = _places(gaps, behind)
    last = program.num_stages - 1
    assert program.lowering is not None
    if program.lowering.tied and last != 0 and {0, last} <= places.keys():
        places[0] = replace(max(places[0], places[last]), after_both=True)
        updates[0] += updates[last][1:]
        del updates[last][1:]
    moved = {place: [Action(Kind.AWAIT_REDUCE, stage)] for stage, place in waits.items()}
    moved |= {place: updates[stage] for stage, place in places.items()}
    for index, gap in enumerate(gaps):
        middle = _start_of_waiting(gap)
        yield from gap[:middle]
        yield from (one for place in sorted(moved) if place.gap == index for one in moved[place])
        yield from gap[middle:]
    yield actions[clip]


def _places(gaps: list[list[Action]], behind: int) -> tuple[dict[int, _Place], dict[int, _Place]]:
    """Return two maps by stage: the place of its last AWAIT_REDUCE, which is removed from the gaps, and the
    place of its update."""
    posted, ended, released = _last(gaps, _POSTS), _last(gaps, _ENDS), _last(gaps, {Kind.RELEASE})
    sent = max((index for index, gap in enumerate(gaps) if any(map(_sends, gap))), default=0)
    waits, updates = {}, {}
    for turn, stage in enumerate(sorted(posted, key=posted.__getitem__)):
        here = min(ended[stage][0], max(posted[stage][0] + behind, sent))
        latest = max(here, sent, released.get(stage, (0, 0))[0])
        updates[stage] = _Place(latest, turn, updates=True)
        gap, at = ended[stage]
        if gaps[gap][at].kind is Kind.AWAIT_REDUCE:
            waits[stage] = _Place(here, turn)
    for gap, at in sorted((ended[stage] for stage in waits), reverse=True):
        del gaps[gap][at]
    return waits, updates


def _updates(actions: Sequence[Action]) -> dict[int, list[Action]]:
    """Return each stage's UPDATE and the gather that follows it."""
    found: dict[int, list[Action]] = {}
    for action in actions:
        found.setdefault(action.stage, []).append(action)
    return found


def _last(gaps: Sequence[Sequence[Action]], kinds: Collection[Kind]) -> dict[int, tuple[int, int]]:
    """Return the gap, and the index in it, of each stage's last action of these kinds."""
    return {
        action.stage: (index, at)
        for index, gap in enumerate(gaps)
        for at, action in enumerate(gap)
        if action.kind in kinds
    }


def _sends(action: Action) -> bool:
    return SEMANTICS[action.kind].posts and any(one.sends for one in action.transfers)


def _start_of_waiting(gap: Sequence[Action]) -> int:
    """Return the index of the first action at the end of a gap in which the rank waits or computes."""
    at = len(gap)
    while at and (
        gap[at - 1].kind in _WAITS or (gap[at - 1].kind is Kind.EXCHANGE and not _sends(gap[at - 1]))
    ):
        at -= 1
    return at
