"""Search for the first non-finite value of an iteration. It runs only if the norm or the loss is non-finite,
and reads sums that were taken before ranks combined their gradients.

    parameter                       on any rank: everything computed from it is non-finite too
    output, loss of a micro-batch   of the earliest stage: later stages only pass it on
    gradient, before it is reduced  of the latest stage: backward runs downwards; reduction spreads it
    gradient, reduced               the sum itself overflowed

A sum of finite terms is finite unless it exceeds the range of float32. The sums are read only when a value is
non-finite, so such an overflow alone never fails a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from myriad.optim.clip import non_finite_rows
from myriad.parallel.chunk import Chunk, Entry
from myriad.parallel.rank_model import RankModel

__all__ = ["Finding", "Outputs", "first_finding"]

Outputs = Mapping[tuple[int, int], torch.Tensor]
"""(stage, micro-batch) to the sum of its forward's output."""
Entries = Sequence[tuple[Chunk, Entry]]


@dataclass(frozen=True, order=True)
class Finding:
    """The first non-finite value that a rank found among its own tensors."""

    order: tuple[int, int, int]
    """Sort key: the finding with the smallest order among all ranks occurred first."""
    name: str


def first_finding(
    model: RankModel, entries: Entries, outputs: Outputs, squares: torch.Tensor, last_stage: int
) -> Finding | None:
    """Return this rank's first non-finite tensor. ``squares``: squared norms of the reduced gradients, one
    row for each of ``entries``."""
    return (
        _bad_parameter(entries) or _bad_output(outputs, last_stage) or _bad_gradient(model, entries, squares)
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


def _bad_gradient(model: RankModel, entries: Entries, squares: torch.Tensor) -> Finding | None:
    own = [chunk for chunk in model.chunks if chunk.was_non_finite]
    rows = [entries[row] for row in non_finite_rows(squares)]
    if not own and not rows:
        return None
    chunks = own or [chunk for chunk, _ in rows]
    names = [entry.name for chunk, entry in rows if chunk in chunks] + [chunks[0].entries[0].name]
    stage = max(stage for stage, held in model.stages.items() if any(one in chunks for one in held.chunks))
    return Finding((2 if own else 3, -stage, 0), f"gradient of {names[0]}")
