"""If these fail, a state comes back with bytes of another place, or storage is read too often."""

from collections import Counter
from itertools import pairwise
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.checkpoint.checkpoint_files import load, save
from myriad.checkpoint.load.read_plan import (
    BLOCK_BYTES,
    FileLocation,
    LoadPart,
    MemoryLocation,
    NeededShards,
    overlap,
    plan_blocks,
)
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.errors import RunFailedError
from myriad.model.definition import Shard
from myriad.model.tensor_shard import TensorShard, shards_of_flat

SHAPES = st.lists(st.integers(1, 3), min_size=0, max_size=3)


@st.composite
def models(draw):
    """Whole tensors, each with the way tensor parallelism cuts it (dimensions are multiples of 4)."""
    tensors, cuts = {}, {}
    for number in range(draw(st.integers(1, 4))):
        shape = [4 * n for n in draw(SHAPES)]
        dims = [None, *range(len(shape))]
        dim = draw(st.sampled_from(dims))
        parts = ()
        if dim is not None and shape[dim] >= 8 and draw(st.booleans()):
            parts = (4, shape[dim] - 4)
        tensors[f"model.{number}"] = (
            torch.arange(prod(shape), dtype=torch.float32).view(shape) + 1000 * number
        )
        cuts[f"model.{number}"] = None if dim is None else Shard(dim, parts)
    return tensors, cuts


@st.composite
def layouts(draw):
    """Sizes of the axes and whether data parallelism cuts the state (ZeRO)."""
    tp, dp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return {"tp": tp, "dp": dp, "pp": pp, "sharded": draw(st.booleans())}


def local_of(whole, cut, rank, size):
    return whole if cut is None else cut.take(whole, rank, size)


def rectangles_of(tensors, cuts, layout, pp, dp, tp):
    """What one rank holds, or would like to: a flat slice of its tensors' parts, as the engine lays it."""
    own = [name for index, name in enumerate(tensors) if index % layout["pp"] == pp]
    for name in own:
        cut = cuts[name]
        local = local_of(tensors[name], cut, tp, layout["tp"]).contiguous()
        size, flat = local.numel(), local.reshape(-1).clone()
        start, stop = (
            (size * dp // layout["dp"], size * (dp + 1) // layout["dp"]) if layout["sharded"] else (0, size)
        )
        yield from shards_of_flat(name, local.shape, start, flat[start:stop], cut, tp, layout["tp"])


def ranks_of(layout):
    return [(p, d, t) for p in range(layout["pp"]) for d in range(layout["dp"]) for t in range(layout["tp"])]


@settings(max_examples=60, deadline=None)
@given(models(), layouts(), layouts())
def test_any_layout_reads_what_any_other_wrote_to_the_bit(tmp_path_factory, model, before, after):
    tensors, cuts = model
    folder = CheckpointFolder(tmp_path_factory.mktemp("reshard"))
    written, seen = [], set()
    for rank in ranks_of(before):
        for part in rectangles_of(tensors, cuts, before, *rank):
            if (part.name, part.offsets, part.values.shape) not in seen:  # replicas write once
                seen.add((part.name, part.offsets, part.values.shape))
                written.append(part)
    save(folder, 3, written, {"step": 3})
    for rank in ranks_of(after):
        wanted = list(rectangles_of(tensors, cuts, after, *rank))
        expected = [part.values.clone() for part in wanted]
        for part in wanted:
            part.values.fill_(-1)
        assert load(folder.at_step(3).where, wanted) == {"step": 3}
        for part, values in zip(wanted, expected, strict=True):
            assert torch.equal(part.values, values), part


def test_rows_of_padding_that_earlier_versions_stored_are_left_out(tmp_path):
    folder, stored = CheckpointFolder(tmp_path), torch.arange(16.0).view(8, 2)
    save(folder, 1, [TensorShard("model.w", (8, 2), (0, 0), stored)], {})
    flat = torch.zeros(8)
    cut = Shard(0, (5,), padded=8)
    parts = list(shards_of_flat("model.w", (4, 2), 0, flat, cut, rank=1, size=2))
    load(folder.at_step(1).where, parts)
    assert flat.tolist() == [8, 9, 0, 0, 0, 0, 0, 0]
    other = list(shards_of_flat("model.w", (5, 2), 0, torch.zeros(10), Shard(0, (5,), padded=6), 0, 1))
    with pytest.raises(RunFailedError, match="another model"):
        load(folder.at_step(1).where, other)


def test_a_tensor_of_which_a_part_is_missing_is_never_loaded_as_whole(tmp_path):
    folder = CheckpointFolder(tmp_path)
    save(folder, 1, [TensorShard("model.w", (4, 2), (0, 0), torch.ones(3, 2))], {})
    with pytest.raises(RunFailedError, match=r"model\.w is not whole"):
        load(folder.at_step(1).where, [TensorShard("model.w", (4, 2), (0, 0), torch.zeros(4, 2))])


@given(st.data())
def test_what_two_rectangles_share_is_what_their_elements_share(data):
    dims = data.draw(st.integers(0, 3))
    boxes = [
        [(data.draw(st.integers(0, 4)), data.draw(st.integers(1, 4))) for _ in range(dims)] for _ in range(2)
    ]
    first, second = ((tuple(o for o, _ in box), tuple(n for _, n in box)) for box in boxes)
    marks = np.zeros((9,) * dims, int)
    for offsets, shape in (first, second):
        marks[tuple(slice(o, o + n) for o, n in zip(offsets, shape, strict=True))] += 1
    found = overlap(*first, *second)
    assert (marks == 2).sum() == (prod(found[1]) if found else 0)
    if found:
        assert (marks[tuple(slice(o, o + n) for o, n in zip(*found, strict=True))] == 2).all()


NODES = ((0, 1), (2, 3), (4, 5, 6))
RANKS = range(7)


@st.composite
def plans(draw):
    """Parts in files and in memory, and who needs them."""
    parts = []
    for number in range(draw(st.integers(1, 12))):
        locations = [FileLocation(f"file-{draw(st.integers(0, 2))}", 100 * number)]
        for node in draw(st.sets(st.integers(0, 2), max_size=2)):
            locations.insert(0, MemoryLocation(node, 1, draw(st.integers(0, 6)), False, number))
        size = draw(st.sampled_from([8, 100, BLOCK_BYTES]))
        parts.append(LoadPart(f"t{number}", (size,), "uint8", (0,), (size,), size, "", tuple(locations)))
    numbers = st.sets(st.sampled_from(range(len(parts))))
    return parts, [sorted(draw(numbers)) for _ in RANKS]


@given(plans(), st.data())
def test_each_part_is_read_once_by_a_rank_that_can_and_reaches_all_who_need_it(plan, data):
    parts, needed_by = plan
    everywhere = [(number, location) for number, part in enumerate(parts) for location in part.locations]
    struck_out = frozenset(data.draw(st.sets(st.sampled_from(everywhere))))
    blocks, lost = plan_blocks(parts, needed_by, NODES, struck_out)
    wanted = {number for numbers in needed_by for number in numbers}
    read = Counter(number for block in blocks for number in block.numbers)
    assert set(read) | set(lost) == wanted and not set(read) & set(lost)
    assert all(count == 1 for count in read.values())
    for number in lost:
        assert all((number, location) in struck_out for location in parts[number].locations)
    for block in blocks:
        if block.reader is None:
            assert all(isinstance(location, MemoryLocation) for location in block.locations)
            assert all(set(block.receivers) <= set(NODES[location.node]) for location in block.locations)
            continue
        for number, location in zip(block.numbers, block.locations, strict=True):
            assert (number, location) not in struck_out and location in parts[number].locations
            assert block.receivers == tuple(rank for rank in RANKS if number in needed_by[rank])
            if isinstance(location, MemoryLocation):
                assert block.reader in NODES[location.node], "only ranks of the node reach its memory"
            else:
                assert block.reader in block.receivers
        assert all(b == a + 1 for a, b in pairwise(block.numbers))
        assert len(block.numbers) == 1 or sum(parts[n].num_bytes for n in block.numbers) <= BLOCK_BYTES


def test_needs_are_found_whatever_the_cut():
    needs = NeededShards([("w", (0, 0), (2, 4)), ("w", (2, 0), (2, 2)), ("b", (0,), (3,))])
    part = LoadPart("w", (4, 4), "float32", (1, 0), (2, 4), 32, "", ())
    assert list(needs.hits(part)) == [(0, (1, 0), (1, 4)), (1, (2, 0), (1, 2))]
    assert needs.of([part]) == [0] and needs.uncovered([part]) == ["b", "w"]
