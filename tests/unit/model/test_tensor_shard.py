"""If these break: a checkpoint has holes, or a run that continues in another layout gets other values than
were saved."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.model.definition import Shard
from myriad.model.tensor_shard import TensorShard, boxes_of_flat, shards_of_flat


@dataclass(frozen=True)
class Split:
    """How a layout's ranks share one tensor: cut by tensor parallelism, then flat by data parallelism."""

    shard: Shard | None
    tp: int
    cuts: tuple[float, ...]
    """Where the flat memory of a tensor-parallel part is cut, as shares of it."""

    def parts(self, full: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, int, int]]:
        """``(tensor-parallel rank, its part, start, stop)`` of everybody's slice."""
        for rank in range(self.tp):
            local = full if self.shard is None else self.shard.take(full, rank, self.tp)
            ends = [0, *sorted(round(cut * local.numel()) for cut in self.cuts), local.numel()]
            for start, stop in pairwise(ends):
                yield rank, local, start, stop

    def shards(
        self, rank: int, local: torch.Tensor, start: int, flat: torch.Tensor, *, owned_only: bool = False
    ) -> list[TensorShard]:
        of = self.shard, rank, self.tp
        return list(shards_of_flat("w", local.shape, start, flat, *of, owned_only=owned_only))


TP_SIZES = (1, 2, 3, 4)


@st.composite
def shards(draw: st.DrawFn, shape: tuple[int, ...]) -> Shard:
    """A cut of this shape for `sizes_of` ranks: of a dimension, or of equal or unequal parts of it, or of
    parts with few heads."""
    dim = draw(st.integers(0, len(shape) - 1))
    units = shape[dim] // 12
    parts = draw(st.sampled_from([(), (units,), (1,) * units, (units - 1, 1), (1, units - 1)]))
    sizes = tuple(12 * part for part in parts if part)
    heads = tuple(draw(st.sampled_from([1, 2, 12])) for _ in sizes) if dim == 0 else ()
    return Shard(dim, sizes, heads)


def sizes_of(shard: Shard | None) -> list[int]:
    """The tensor-parallel degrees at which ranks hold whole heads."""
    heads = shard.heads if shard else ()
    return [tp for tp in TP_SIZES if all(n % tp == 0 or tp % n == 0 for n in heads)]


@st.composite
def tensors_and_splits(draw: st.DrawFn) -> tuple[torch.Tensor, list[Split]]:
    """A tensor every dimension of which 1, 2, 3 and 4 ranks can share, and two ways to split it."""
    if draw(st.booleans()):
        shape = tuple(draw(st.lists(st.sampled_from([12, 24, 36]), min_size=1, max_size=2)))
    else:
        shape = (12, 12, 12)
    splits = []
    for _ in range(2):
        shard = draw(st.none() | shards(shape))
        cuts = tuple(draw(st.lists(st.floats(0, 1), max_size=3)))
        splits.append(Split(shard, draw(st.sampled_from(sizes_of(shard))), cuts))
    full = torch.arange(float(torch.Size(shape).numel())).view(shape)
    return full, [Split(s.shard, s.tp if s.shard else 1, s.cuts) for s in splits]


def region(whole: torch.Tensor, part: TensorShard) -> torch.Tensor:
    return whole[tuple(slice(o, o + n) for o, n in zip(part.offsets, part.values.shape, strict=True))]


def saved(full: torch.Tensor, split: Split) -> torch.Tensor:
    """The whole tensor put together from everybody's rectangles, each element of which comes once."""
    whole, count = torch.full_like(full, -1.0), torch.zeros_like(full)
    for rank, local, start, stop in split.parts(full):
        flat = local.reshape(-1)[start:stop].clone()
        for part in split.shards(rank, local, start, flat, owned_only=True):
            assert part.full_shape == tuple(full.shape)
            assert part.values.numel() > 0
            region(whole, part).copy_(part.values)
            region(count, part).add_(1)
    assert (count == 1).all(), "an element is saved by nobody or twice"
    return whole


@settings(max_examples=150, deadline=None)
@given(tensors_and_splits())
def test_what_one_layout_saves_another_one_loads(case: tuple[torch.Tensor, list[Split]]) -> None:
    full, (before, after) = case
    whole = saved(full, before)
    assert torch.equal(whole, full)
    for rank, local, start, stop in after.parts(full):
        flat = torch.full((stop - start,), -1.0)
        for part in after.shards(rank, local, start, flat):
            part.values.copy_(region(whole, part))
        assert torch.equal(flat, local.reshape(-1)[start:stop]), f"tensor-parallel rank {rank}"


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.integers(1, 20), st.integers(1, 2)),
    st.lists(st.floats(0, 1), max_size=3),
    st.tuples(st.integers(1, 8), st.integers(1, 8)),
)
def test_rows_that_ranks_cannot_share_evenly_are_stored_without_padding(
    shape: tuple[int, int], cuts: list[float], sizes: tuple[int, int]
) -> None:
    full = torch.arange(1.0, 1 + shape[0] * shape[1]).view(shape)
    before, after = (Split(Shard(0, shape[:1]), tp, tuple(cuts)) for tp in sizes)
    whole = saved(full, before)
    assert torch.equal(whole, full)
    for rank, local, start, stop in after.parts(full):
        flat = torch.zeros(stop - start)
        for part in after.shards(rank, local, start, flat):
            part.values.copy_(region(whole, part))
        assert torch.equal(flat, local.reshape(-1)[start:stop])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 6), max_size=4), st.data())
def test_a_flat_slice_of_any_shape_is_a_few_contiguous_rectangles(
    shape: list[int], data: st.DataObject
) -> None:
    size = torch.Size(shape).numel()
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    numbers = torch.arange(size).view(shape)
    expected = start
    shards = list(boxes_of_flat(shape, start, stop))
    for offsets, sizes, first in shards:
        assert first == expected, "rectangles are in flat order and leave no gap"
        part = region(numbers, TensorShard("w", tuple(shape), offsets, torch.empty(sizes)))
        assert part.reshape(-1).tolist() == list(range(first, first + part.numel()))
        expected += part.numel()
    assert expected == stop or start == stop
    assert len(shards) <= max(1, 2 * len(shape) - 1)


def test_tensor_shards_are_live_memory() -> None:
    """A load writes into them and the optimizer reads: a copy would lose every loaded value."""
    flat = torch.zeros(7)
    for part in shards_of_flat("w", (4, 4), 3, flat, Shard(0, (4, 4)), rank=1, size=2):
        part.values.fill_(1.0)
    assert flat.sum() == 7


def test_ranks_that_share_a_head_hold_the_same_rows_and_the_first_one_owns_them() -> None:
    """4 query, 2 key and 2 value heads of 1 row on 4 ranks."""
    shard, rows = Shard(0, (4, 2, 2), (4, 2, 2)), torch.arange(8.0)
    assert [shard.take(rows, rank, 4).tolist() for rank in range(4)] == [
        [0, 4, 6], [1, 4, 6], [2, 5, 7], [3, 5, 7],
    ]  # fmt: skip
    owned = [[span.start for span in shard.spans(8, rank, 4) if not span.is_copy] for rank in range(4)]
    assert owned == [[0, 4, 6], [1], [2, 5, 7], [3]]
