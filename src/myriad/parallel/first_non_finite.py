"""The first non-finite value of an iteration: on which rank it arose, and in which tensor.

It is searched in sums that were taken before ranks combined their gradients:

    parameter                       on any rank: everything computed from it is non-finite too
    output, loss of a micro-batch   of the earliest stage: later stages only pass it on
    gradient, before it is reduced  of the latest stage: backward runs downwards; reduction spreads it
    gradient, reduced               the sum itself overflowed

A sum of finite terms is finite unless it exceeds the range of float32. The sums are read only when the loss
or the norm is non-finite, so such an overflow alone never fails a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from myriad.comm.groups import Groups
from myriad.comm.typed_collectives import gather_values
from myriad.optim.parameter_norms import non_finite_rows
from myriad.parallel.chunk import Chunk
from myriad.parallel.parameter_table import Row
from myriad.parallel.rank_model import RankModel

__all__ = ["describe_first_non_finite"]

_Outputs = Mapping[tuple[int, int], torch.Tensor]
"""(stage, micro-batch) to the sum of its forward's output."""
_Rows = Sequence[tuple[Chunk, Row]]


@dataclass(frozen=True, order=True)
class _Finding:
    """The first non-finite value that a rank found among its own tensors."""

    order: tuple[int, int, int]
    """Sort key: the finding with the smallest order among all ranks occurred first."""
    name: str


def describe_first_non_finite(
    model: RankModel, rows: _Rows, outputs: _Outputs, squares: torch.Tensor, groups: Groups
) -> str:
    """Return the tensor and the rank of the first non-finite value of all ranks. A collective call of all.

    ``rows``: the table of parameters. ``outputs``: the sum of each forward's output. ``squares``: squared
    norms of the reduced gradients, one element for each of ``rows``.
    """
    last_stage = groups.grid.layout.num_stages - 1
    found = _bad_parameter(rows) or _bad_output(outputs, last_stage) or _bad_gradient(model, rows, squares)
    everyone = gather_values(found, _Finding | None, groups.world)
    firsts = [(one.order, rank, one.name) for rank, one in enumerate(everyone) if one is not None]
    _, rank, name = min(firsts, default=((), 0, "loss"))
    return f"first bad tensor is the {name}, on rank {rank}"


def _bad_parameter(rows: _Rows) -> _Finding | None:
    for chunk, row in rows:
        part = chunk.stored[max(row.start - chunk.start, 0) : max(row.stop - chunk.start, 0)]
        if not bool(torch.isfinite(part).all()):
            return _Finding((0, 0, 0), f"parameter {row.entry.name}")
    return None


def _bad_output(outputs: _Outputs, last_stage: int) -> _Finding | None:
    bad = [key for key, total in outputs.items() if not bool(torch.isfinite(total))]
    if not bad:
        return None
    stage, micro_batch = min(bad)
    of = f"micro-batch {micro_batch}"
    return _Finding((1, stage, micro_batch), f"loss of {of}" if stage == last_stage else f"output of {of}")


def _bad_gradient(model: RankModel, rows: _Rows, squares: torch.Tensor) -> _Finding | None:
    own = [chunk for chunk in model.chunks if chunk.own_gradients.was_non_finite]
    bad = [rows[number] for number in non_finite_rows(squares)]
    if not own and not bad:
        return None
    chunks = own or [chunk for chunk, _ in bad]
    names = [row.entry.name for chunk, row in bad if chunk in chunks] + [chunks[0].entries[0].name]
    stage = max(stage for stage, held in model.stages.items() if any(one in chunks for one in held.chunks))
    return _Finding((2 if own else 3, -stage, 0), f"gradient of {names[0]}")
