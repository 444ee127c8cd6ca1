"""The steady part of an iteration with many micro-batches: found in two short programs, not assumed.

Two programs whose numbers of micro-batches leave the same rest divided by p are compared rank by rank. Where
the longer one is the shorter one with a piece put in, and that piece is twice there in a row (the second time
of later micro-batches), the rank repeats it for as long as there are micro-batches:

    shorter    F0 F1 F2 | B0 F3  B1 F4           | B2 B3 B4
    longer     F0 F1 F2 | B0 F3  B1 F4  B2 F5    | B3 B4 B5
                          `---- the piece: B F, of the next micro-batch each time

Interleaving goes in rounds, of which the first ones are longer where there is a rest: that many rounds must
be there, and some more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from myriad.comm.layout import Layout
from myriad.program.actions import Action, Program, Transfer

__all__ = ["SteadyPart", "num_computes", "short_counts", "steady_parts"]

_DEEP = {"interleaved": 3, "eager-1f1b": 6, "zero-bubble": 3, "eager-zero-bubble": 6, "zero-bubble-v": 4}
"""Micro-batches for each pipeline rank until an iteration is steady, where it is not 2."""
_FEWEST = 6
"""Micro-batches of the shorter one, with however few ranks."""


def short_counts(layout: Layout, whole: int, times: int = 1) -> tuple[int, int] | None:
    """Two numbers of micro-batches that tell of ``whole``; ``None`` where it is not much more itself.
    ``times``: so many times as many as mostly do."""
    rest = whole % layout.pp
    short = times * max(_FEWEST, _DEEP.get(layout.schedule_name, 2) * layout.pp) + rest
    if rest and layout.virtual_stages > 1:
        # As many rounds are longer than the others as the rest is: they and some others must be there.
        short += max(2, rest - 1) * layout.pp
    longer = short + max(2, layout.pp)
    return None if whole <= longer else (short, longer)


def num_computes(layout: Layout, num_chunks: int, whole: int) -> int:
    """Return how many forwards the programs have that a prediction goes through: what it costs."""
    counts = short_counts(layout, whole) or (whole,)
    return sum(counts) * layout.num_stages * num_chunks


@dataclass(frozen=True)
class SteadyPart:
    """Of a rank: from ``start`` on, ``length`` actions are for ``num_micro_batches`` more."""

    start: int
    length: int
    num_micro_batches: int


def steady_parts(shorter: Program, longer: Program) -> list[SteadyPart] | None:
    """Of each rank; in the longer program it is there twice. ``None`` where a rank repeats nothing, as with
    GPipe, which has two steady parts of different micro-batches."""
    more = longer.num_micro_batches - shorter.num_micro_batches
    found = [_steady_part(a, b, more) for a, b in zip(shorter.ranks, longer.ranks, strict=True)]
    parts = [part for part in found if part is not None]
    return parts if len(parts) == len(found) else None


def _steady_part(shorter: Sequence[Action], longer: Sequence[Action], more: int) -> SteadyPart | None:
    added = len(longer) - len(shorter)
    same = 0
    while same < len(shorter) and shorter[same] == longer[same]:
        same += 1
    start = len(shorter)
    while start > 0 and _later(shorter[start - 1], more) == longer[start - 1 + added]:
        start -= 1
    return SteadyPart(start, added, more) if same - start >= added else None


def _later(action: Action, later: int) -> Action:
    """Of so many micro-batches further on."""
    if action.micro_batch >= 0:
        return Action(action.kind, action.stage, action.micro_batch + later)
    if action.transfers:
        return Action(action.kind, transfers=tuple(_later_transfer(t, later) for t in action.transfers))
    return action


def _later_transfer(transfer: Transfer, later: int) -> Transfer:
    batch = transfer.micro_batch + later
    return Transfer(transfer.payload, transfer.stage, batch, transfer.peer, transfer.sends)
