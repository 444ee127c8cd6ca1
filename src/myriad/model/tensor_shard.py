"""Decomposition of a flat slice of a tensor into boxes of the whole tensor. A shard is stored in this
form so that any layout can read it.

Data parallelism cuts flat memory, tensor parallelism cuts dimensions. Elements ``start:stop`` of a matrix are
a partial row, whole rows and a partial row. Each is a box, also in the whole tensor before the
tensor-parallel cut:

    flat 3:10 of [4, 4]      . . . x        boxes (0, 3) 1x1,  (1, 0) 1x4,  (2, 0) 1x2
                             x x x x
                             x x . .
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from myriad.model.definition import Shard, ShardSpan

__all__ = ["TensorShard", "boxes_of_flat", "shards_of_flat"]


@dataclass(frozen=True)
class TensorShard:
    """A part of a named tensor: ``values`` (a view of live memory) start at ``offsets`` of the whole tensor
    of ``full_shape``."""

    name: str
    full_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: torch.Tensor
    padded_rows: int = 0
    """Rows of the whole tensor in checkpoints of earlier versions, which stored padding after the last
    row."""

    def is_part_of(self, stored_shape: Sequence[int] | None) -> bool:
        """Return whether a stored tensor of this shape is the whole tensor."""
        padded = (self.padded_rows, *self.full_shape[1:])
        return stored_shape == self.full_shape or (self.padded_rows > 0 and stored_shape == padded)


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
    *,
    owned_only: bool = False,
) -> Iterator[TensorShard]:
    """Yield shards of the whole tensor for elements ``start : start + len(flat)`` of the shard of
    tensor-parallel rank ``rank``. ``owned_only``: leave out elements that an earlier rank holds too."""
    full_shape = list(local_shape)
    if cut is not None:
        full_shape[cut.dim] = cut.full_size(full_shape[cut.dim], size)
    for offsets, sizes, first in boxes_of_flat(local_shape, start, start + flat.numel()):
        values = flat[first - start : first - start + prod(sizes)].view(sizes)
        if cut is None:
            yield TensorShard(name, tuple(full_shape), offsets, values)
        else:
            spans = cut.spans_of_shard(local_shape[cut.dim], rank, size)
            own = [span for span in spans if not (owned_only and span.is_copy)]
            for part in _uncut(name, tuple(full_shape), offsets, values, cut.dim, own):
                yield replace(part, padded_rows=cut.padded) if cut.padded else part


def _uncut(
    name: str,
    full_shape: tuple[int, ...],
    offsets: tuple[int, ...],
    values: torch.Tensor,
    dim: int,
    spans: Iterable[ShardSpan],
) -> Iterator[TensorShard]:
    low, high = offsets[dim], offsets[dim] + values.shape[dim]
    for span in spans:
        a, b = max(low, span.local), min(high, span.local + span.width)
        if a < b:
            where = list(offsets)
            where[dim] = span.start + (a - span.local)
            yield TensorShard(name, full_shape, tuple(where), values.narrow(dim, a - low, b - a))
