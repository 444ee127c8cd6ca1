"""Who made the first number of an iteration that is not finite: looked for only when the norm or the loss is
not, from sums that were taken before ranks mixed their numbers.

    parameter                       of any rank: nothing that follows from it says more
    output, loss of a micro-batch   of the earliest stage: later ones only pass it on
    gradient, before it is reduced  of the latest stage: backward goes down; afterwards all replicas have it
    gradient, reduced               the sum itself is too large

A sum is finite if all its terms are, but for finite terms that add up to more than float32 has: it is read
only when something is wrong, so nothing fails for that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from myriad.optim.clip import non_finite_rows
from myriad.parallel.chunk import Chunk, Entry
from myriad.parallel.pieces import Pieces

__all__ = ["Finding", "Outputs", "first_finding"]

Outputs = Mapping[tuple[int, int], torch.Tensor]
"""(stage, micro-batch) to the sum of what its forward gave."""
Entries = Sequence[tuple[Chunk, Entry]]


@dataclass(frozen=True, order=True)
class Finding:
    """What a rank found at itself."""

    order: tuple[int, int, int]
    """The smallest of all ranks' came first."""
    name: str


def first_finding(
    pieces: Pieces, entries: Entries, outputs: Outputs, squares: torch.Tensor, last_stage: int
) -> Finding | None:
    """On this rank. ``squares``: of the reduced gradients, a row for each of ``entries``."""
    return (
        _bad_parameter(entries) or _bad_output(outputs, last_stage) or _bad_gradient(pieces, entries, squares)
    )


def _bad_parameter(entries: Entries) -> Finding | None:
    for row, (chunk, entry) in enumerate(entries):
        a, b = chunk.spans[row - chunk.first_row]
        part = chunk.master[max(a - chunk.start, 0) : max(b - chunk.start, 0)]
        if not bool(torch.isfinite(part).all()):
            return Finding((0, 0, 0), f"parameter {entry.name}")
    return None


def _bad_output(outputs: Outputs, last_stage: int) -> Finding | None:
    bad = [key for key, total in outputs.items() if not bool(torch.isfinite(total))]
    if not bad:
        return None
    stage, micro_batch = min(bad)
    of = f"micro-batch {micro_batch}"
    return Finding((1, stage, micro_batch), f"loss of {of}" if stage == last_stage else f"output of {of}")


def _bad_gradient(pieces: Pieces, entries: Entries, squares: torch.Tensor) -> Finding | None:
    own = [chunk for chunk in pieces.chunks if chunk.was_non_finite]
    rows = [entries[row] for row in non_finite_rows(squares)]
    if not own and not rows:
        return None
    chunks = own or [chunk for chunk, _ in rows]
    names = [entry.name for chunk, entry in rows if chunk in chunks] + [chunks[0].entries[0].name]
    stage = max(stage for stage, held in pieces.stages.items() if any(one in chunks for one in held.chunks))
    return Finding((2 if own else 3, -stage, 0), f"gradient of {names[0]}")
