"""The steady part of an iteration with many micro-batches, derived from two short programs.

Two programs are compared rank by rank; their numbers of micro-batches have the same remainder modulo p. The
longer list must be the shorter one with a piece inserted. If the piece then occurs twice in a row (the second
time for later micro-batches), the rank repeats it for as long as there are micro-batches:

    shorter    F0 F1 F2 | B0 F3  B1 F4           | B2 B3 B4
    longer     F0 F1 F2 | B0 F3  B1 F4  B2 F5    | B3 B4 B5
                          `---- the piece: B F, of the next micro-batch each time

Interleaving works in rounds. With a remainder the first rounds are longer: a program must contain these
rounds and some others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from myriad.comm.layout import Layout
from myriad.program.actions import Action, PipelineTransfer, Program

__all__ = ["SteadyState", "num_simulated_forwards", "short_run_lengths", "steady_states"]

_DEEP = {
    "interleaved": 3,
    "eager-1f1b": 6,
    "zero-bubble": 3,
    "eager-zero-bubble": 6,
    "zero-bubble-v": 4,
    "dualpipe-v": 4,
}
"""Micro-batches for each pipeline rank after which an iteration is steady, where that is not 2."""
_FEWEST = 6
"""Smallest number of micro-batches of the shorter program."""


def short_run_lengths(layout: Layout, whole: int, times: int = 1) -> tuple[int, int] | None:
    """Return the two numbers of micro-batches from which ``whole`` is extrapolated; ``None`` where ``whole``
    is not larger than the second. ``times``: factor on the usual lengths."""
    rest = whole % layout.pp
    short = times * max(_FEWEST, _DEEP.get(layout.schedule_name, 2) * layout.pp) + rest
    if rest and layout.virtual_stages > 1:
        # With a remainder, that many rounds are longer than the others. The program must contain them and
        # some others.
        short += max(2, rest - 1) * layout.pp
    longer = short + max(2, layout.pp)
    return None if whole <= longer else (short, longer)


def num_simulated_forwards(layout: Layout, num_chunks: int, whole: int) -> int:
    """Return the number of forwards that a prediction simulates: its cost."""
    counts = short_run_lengths(layout, whole) or (whole,)
    return sum(counts) * layout.num_stages * num_chunks


@dataclass(frozen=True)
class SteadyState:
    """The repeated part of a rank's program: from ``start`` on, ``length`` actions process
    ``num_micro_batches`` micro-batches."""

    start: int
    length: int
    num_micro_batches: int


def steady_states(shorter: Program, longer: Program) -> list[SteadyState] | None:
    """Return the steady part of each rank, which the longer program contains twice. ``None`` where a rank
    repeats nothing, as with GPipe, which has two steady parts of different micro-batches."""
    more = longer.num_micro_batches - shorter.num_micro_batches
    found = [_steady_part(a, b, more) for a, b in zip(shorter.ranks, longer.ranks, strict=True)]
    parts = [part for part in found if part is not None]
    return parts if len(parts) == len(found) else None


def _steady_part(shorter: Sequence[Action], longer: Sequence[Action], more: int) -> SteadyState | None:
    added = len(longer) - len(shorter)
    same = 0
    while same < len(shorter) and shorter[same] == longer[same]:
        same += 1
    start = len(shorter)
    while start > 0 and _later(shorter[start - 1], more) == longer[start - 1 + added]:
        start -= 1
    return SteadyState(start, added, more) if same - start >= added else None


def _later(action: Action, later: int) -> Action:
    """Return the action of a micro-batch that is so many later."""
    if action.micro_batch >= 0:
        return Action(action.kind, action.stage, action.micro_batch + later)
    if action.transfers:
        return Action(action.kind, transfers=tuple(_later_transfer(t, later) for t in action.transfers))
    return action


def _later_transfer(transfer: PipelineTransfer, later: int) -> PipelineTransfer:
    batch = transfer.micro_batch + later
    return PipelineTransfer(transfer.payload, transfer.stage, batch, transfer.peer, transfer.sends)
