"""Decomposition of a flat slice of a tensor into boxes of the whole tensor. A shard is stored in this
form so that any layout can read it.

Data parallelism cuts flat memory, tensor parallelism cuts dimensions. Elements ``start:stop`` of a matrix are
a partial row, whole rows and a partial row. Each is a box, also in the whole tensor before the
tensor-parallel cut:

    flat 3:10 of [4, 4]      . . . x        boxes (0, 3) 1x1,  (1, 0) 1x4,  (2, 0) 1x2
                             x x x x
                             x x . .
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

from myriad.model.definition import Shard

__all__ = ["TensorShard", "boxes_of_flat", "shards_of_flat"]


@dataclass(frozen=True)
class TensorShard:
    """A part of a named tensor: ``values`` (a view of live memory) start at ``offsets`` of the whole tensor
    of ``full_shape``."""

    name: str
    full_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: torch.Tensor


def boxes_of_flat(
    shape: Sequence[int], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Yield ``(offsets, sizes, first flat element)`` of contiguous boxes that make up elements
    ``start:stop``."""
    if start >= stop:
        return
    if len(shape) == 0:
        yield (), (), 0
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # inside one row
        yield from _in_row(shape, start // row, start, stop)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]), first * row
    if last * row < stop:
        yield from _in_row(shape, last, last * row, stop)


def _in_row(
    shape: Sequence[int], index: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    base = index * prod(shape[1:])
    for offsets, sizes, first in boxes_of_flat(shape[1:], start - base, stop - base):
        yield (index, *offsets), (1, *sizes), base + first


def shards_of_flat(
    name: str,
    local_shape: Sequence[int],
    start: int,
    flat: torch.Tensor,
    cut: Shard | None,
    rank: int,
    size: int,
) -> Iterator[TensorShard]:
    """Yield shards of the whole tensor for elements ``start : start + len(flat)`` of the shard of
    tensor-parallel rank ``rank``."""
    full_shape = list(local_shape)
    if cut is not None:
        full_shape[cut.dim] *= size
    for offsets, sizes, first in boxes_of_flat(local_shape, start, start + flat.numel()):
        values = flat[first - start : first - start + prod(sizes)].view(sizes)
        if cut is None:
            yield TensorShard(name, tuple(full_shape), offsets, values)
        else:
            yield from _uncut(name, tuple(full_shape), offsets, values, cut, rank, size)


def _uncut(
    name: str,
    full_shape: tuple[int, ...],
    offsets: tuple[int, ...],
    values: torch.Tensor,
    cut: Shard,
    rank: int,
    size: int,
) -> Iterator[TensorShard]:
    dim = cut.dim
    low, high = offsets[dim], offsets[dim] + values.shape[dim]
    local_start = full_start = 0
    for part in cut.parts or (full_shape[dim],):
        width = part // size
        a, b = max(low, local_start), min(high, local_start + width)
        if a < b:
            where = list(offsets)
            where[dim] = full_start + rank * width + (a - local_start)
            yield TensorShard(name, full_shape, tuple(where), values.narrow(dim, a - low, b - a))
        local_start, full_start = local_start + width, full_start + part
