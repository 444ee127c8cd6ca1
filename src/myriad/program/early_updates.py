"""A pass: each stage is updated inside the last backward, as soon as its gradients are reduced.

    behind the norm   B s1 START_REDUCE s1 B s0 START_REDUCE s0 AWAIT s1 s0 CLIP UPDATE s0 s1
    in the backward   B s1 START_REDUCE s1 B s0 START_REDUCE s0 AWAIT s1 UPDATE s1 AWAIT s0 UPDATE s0 CLIP

CLIP only finds the norm then: whoever asks for this sees to it that nothing has to be scaled by it. A rank
that still has gradients to send sends them first, for another one computes with them; and it lets a reduction
travel behind some computes before it waits for it. Parameters that two of its stages share move with the
first of these, when both have given their gradients, and neither stage's are gathered before.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from myriad.program.actions import COMPUTE, Action, Kind, Program
from myriad.program.passes import split_at_computes

__all__ = ["update_early"]

_BEHIND = 2
"""Computes behind which a reduction travels: the links have the next one to carry when it is waited for."""
_POSTS = frozenset({Kind.REDUCE, Kind.START_REDUCE})
_ENDS = frozenset({Kind.REDUCE, Kind.AWAIT_REDUCE})
_WAITS = COMPUTE | {Kind.WAIT, Kind.GATHER, Kind.AWAIT_GATHER}


def update_early(program: Program, *, travels: bool) -> Program:
    """A training program that ends with CLIP and UPDATEs. ``travels``: reductions do, and are given something
    to hide behind."""
    assert program.lowering is not None and program.lowering.training
    ranks = (tuple(_moved(program, rank, _BEHIND if travels else 0)) for rank in range(program.num_ranks))
    lowering = replace(program.lowering, updates_early=True)
    return replace(program, ranks=tuple(ranks), lowering=lowering)


@dataclass(frozen=True, order=True)
class _Place:
    """Where a stage's gradients are waited for, or the stage is updated."""

    gap: int
    turn: int
    """Of the stage, among those that are reduced."""
    updates: bool = False
    after_both: bool = False
    """Behind the update of another stage at the same place."""


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
    """Of each stage: of its last AWAIT_REDUCE, which is taken out of the gaps, and of its update."""
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
    """Of each stage: UPDATE, and the gather that follows it."""
    found: dict[int, list[Action]] = {}
    for action in actions:
        found.setdefault(action.stage, []).append(action)
    return found


def _last(gaps: Sequence[Sequence[Action]], kinds: Collection[Kind]) -> dict[int, tuple[int, int]]:
    """Gap, and place in it, of each stage's last action of these kinds."""
    return {
        action.stage: (index, at)
        for index, gap in enumerate(gaps)
        for at, action in enumerate(gap)
        if action.kind in kinds
    }


def _sends(action: Action) -> bool:
    return action.kind in (Kind.SEND, Kind.EXCHANGE) and any(one.sends for one in action.transfers)


def _start_of_waiting(gap: Sequence[Action]) -> int:
    """Place of the first of the actions at a gap's end in which the rank waits, or computes."""
    at = len(gap)
    while at and (
        gap[at - 1].kind in _WAITS or (gap[at - 1].kind is Kind.EXCHANGE and not _sends(gap[at - 1]))
    ):
        at -= 1
    return at
