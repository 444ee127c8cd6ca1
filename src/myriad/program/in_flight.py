"""Micro-batches in flight in a rank's program: those between their forward and their backward.

    F0 F1 F2 B0 F3 B1 F4 ...       three at a time: a captured stage needs three slots
    F0 B0 F1 B1 ...                in turn: one slot

No torch here: the runtime sizes its captures with these numbers (`myriad.parallel.cuda_graphs`), and the
planner their memory."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from types import MappingProxyType

from myriad.program.actions import COMPUTE, MAKES_WEIGHT_GRADIENT, Action, Kind, Resource, kinds_where
from myriad.program.proved_sends import ProvedSends
from myriad.program.static_buffers import tied_reduction

__all__ = [
    "BACKWARDS",
    "FORWARDS",
    "InFlight",
    "RankProgram",
    "comes_in_turn",
    "most_offloaded",
    "next_is_backward",
]

FORWARDS = kinds_where(lambda does: does.computes and Resource.ACTIVATIONS in does.allocates)
"""Forwards, alone or in a pair."""

BACKWARDS = kinds_where(lambda does: does.computes and Resource.ACTIVATIONS in does.frees)
"""Backwards that use a forward's activations: whole, in a pair, and the input half of a split one."""


def comes_in_turn(actions: Iterable[Action]) -> bool:
    """Return whether each micro-batch is computed completely, from its first forward to its last backward,
    before the next one begins. Backwards must be whole, and all micro-batches must have the same sequence of
    actions."""
    computes = [action for action in actions if action.kind in COMPUTE]
    runs = [
        (micro_batch, [(action.kind, action.stage) for action in run])
        for micro_batch, run in groupby(computes, lambda action: action.micro_batch)
    ]
    once = len({micro_batch for micro_batch, _ in runs}) == len(runs)
    whole = all(action.kind in (Kind.FORWARD, Kind.BACKWARD) for action in computes)
    return once and whole and all(steps == runs[0][1] for _, steps in runs)


def next_is_backward(actions: Iterable[Action]) -> frozenset[tuple[int, int]]:
    """Return (stage, micro-batch) of the forwards that are directly followed by the same micro-batch's
    backward. Weight parts of other backwards may come in between."""
    computes = [action for action in actions if action.kind in FORWARDS | BACKWARDS]
    return frozenset(
        (first.stage, first.micro_batch)
        for first, then in pairwise(computes)
        if first.kind in FORWARDS
        and then.kind in BACKWARDS
        and (first.stage, first.micro_batch) == (then.stage, then.micro_batch)
    )


def most_offloaded(actions: Iterable[Action]) -> dict[int, int]:
    """Return the largest number of micro-batches of each stage whose activations are in host memory, or on
    their way, at once."""
    now: defaultdict[int, int] = defaultdict(int)
    most: dict[int, int] = {}
    for action in actions:
        if action.kind is Kind.START_OFFLOAD:
            now[action.stage] += 1
            most[action.stage] = max(most.get(action.stage, 0), now[action.stage])
        elif action.kind is Kind.AWAIT_FETCH:
            now[action.stage] -= 1
    return most


@dataclass(frozen=True)
class InFlight:
    """The numbers of micro-batches between their forward and the end of their backward, in a rank's
    program."""

    slots: Mapping[int, int]
    """Largest number in flight of each stage."""
    in_turn: bool
    """Whether one micro-batch at a time is in flight over all stages (`comes_in_turn`)."""
    ends_next: frozenset[int]
    """Stages whose forwards are all directly followed by the same micro-batch's backward."""
    splits: bool
    """Whether backwards are in two parts."""

    @staticmethod
    def of(actions: Iterable[Action]) -> "InFlight":
        """Count the micro-batches in flight of a rank's actions."""
        computes = [action for action in actions if action.kind in COMPUTE]
        now: defaultdict[int, int] = defaultdict(int)
        most: defaultdict[int, int] = defaultdict(int)
        for action in computes:
            if action.kind in FORWARDS:
                now[action.stage] += 1
                most[action.stage] = max(most[action.stage], now[action.stage])
            elif action.kind in MAKES_WEIGHT_GRADIENT:
                now[action.stage] -= 1
        turns = next_is_backward(computes)
        forwards = [action for action in computes if action.kind in FORWARDS]
        apart = {action.stage for action in forwards if (action.stage, action.micro_batch) not in turns}
        splits = any(action.kind is Kind.BACKWARD_INPUT for action in computes)
        return InFlight(dict(most), comes_in_turn(computes), frozenset(most.keys() - apart), splits)


@dataclass(frozen=True, eq=False)
class RankProgram:
    """One rank's list of actions, and the indices between which the tied chunk is reduced. Two stages hold
    gradients of that chunk."""

    actions: Sequence[Action]
    tied_starts: int
    tied_ends: int
    immediate_backwards: Collection[tuple[int, int]] = ()
    """(stage, micro-batch) of forwards whose backward is the rank's next compute action."""
    offloaded: Collection[tuple[int, int]] = ()
    """(stage, micro-batch) of forwards whose activations are copied to host memory."""
    proved_sends: ProvedSends = field(default_factory=dict)
    """Sends that are complete when a message has arrived, by that message."""

    @staticmethod
    def of(
        actions: Sequence[Action], tied_stages: Collection[int], proved: ProvedSends = MappingProxyType({})
    ) -> "RankProgram":
        """Build the plan. The tied chunk is reduced with the last reduction of the stages that hold it; both
        indices are -1 if there is no tied chunk. ``proved``: from `myriad.program.proved_sends`."""
        starts, ends = tied_reduction(actions, tied_stages)
        copied = (action for action in actions if action.kind is Kind.START_OFFLOAD)
        offloaded = frozenset((action.stage, action.micro_batch) for action in copied)
        return RankProgram(actions, starts, ends, next_is_backward(actions), offloaded, proved)
