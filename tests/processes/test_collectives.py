"""Each collective against what one process computes, over sizes, ragged splits and groups."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import leave_world, run_ranks

from myriad.comm.collectives import (
    Pending,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_reduce_scatter,
)
from myriad.comm.groups import open_world
from myriad.comm.layout import Layout

WORLD = 4
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
MEMBERS = ((0, 1, 2, 3), (0, 2), (1, 3))


def numbers(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    rounding = 0.05 if found.dtype == torch.bfloat16 else 1e-5
    return torch.allclose(found.double(), expected.double(), rtol=rounding, atol=rounding)


def equal_pieces(group: Any, ranks: tuple[int, ...], count: int, dtype: torch.dtype) -> list[bool]:
    """All five at once, waited for in another order than they were started."""
    rank, size = dist.get_rank(), len(ranks)
    place, whole = ranks.index(rank), count * size
    own, mine = slice(place * count, (place + 1) * count), numbers(rank, whole, dtype)
    parts = [numbers(other, whole, dtype) for other in ranks]
    summed, gathered, inside = mine.clone(), torch.empty(whole, dtype=dtype), mine.clone()
    scattered, turned = torch.empty(count, dtype=dtype), torch.empty(whole, dtype=dtype)
    pending: list[Pending] = [
        start_all_reduce(summed, group),
        start_all_gather(gathered, mine[own], group),
        start_all_gather(inside, inside[own], group),
        start_reduce_scatter(scattered, mine, group),
        start_all_to_all(turned, mine, group),
    ]
    for started in reversed(pending):
        started.wait()
        started.wait()
    total = torch.stack(parts).double().sum(0)
    return [
        close(summed, total),
        torch.equal(gathered, torch.cat([p[i * count : (i + 1) * count] for i, p in enumerate(parts)])),
        torch.equal(inside, gathered),
        close(scattered, total[own]),
        torch.equal(turned, torch.cat([p[own] for p in parts])),
    ]


def ragged_pieces(group: Any, ranks: tuple[int, ...], table: list[list[int]]) -> bool:
    """``table[i][j]``: what rank ``i`` of the group sends to rank ``j``."""
    place = ranks.index(dist.get_rank())
    rows = [numbers(rank, sum(row), torch.float32).split(row) for rank, row in zip(ranks, table, strict=True)]
    out_splits = [row[place] for row in table]
    out = torch.empty(sum(out_splits))
    start_all_to_all(out, torch.cat(rows[place]), group, out_splits, table[place]).wait()
    return torch.equal(out, torch.cat([pieces[place] for pieces in rows]))


def try_all(examples: list[tuple[int, int, int, list[list[int]]]]) -> list[bool]:
    groups = open_world(Layout(dp=WORLD), torch.device("cpu"))
    found = []
    for which, count, dtype, table in examples:
        ranks = MEMBERS[which]
        if dist.get_rank() in ranks:
            group = groups.of(ranks, "test")
            found += equal_pieces(group, ranks, count, DTYPES[dtype])
            found.append(ragged_pieces(group, ranks, [row[: len(ranks)] for row in table[: len(ranks)]]))
    leave_world()
    return found


examples = st.tuples(
    st.integers(0, len(MEMBERS) - 1),
    st.integers(1, 300),
    st.integers(0, len(DTYPES) - 1),
    st.lists(st.lists(st.integers(0, 40), min_size=WORLD, max_size=WORLD), min_size=WORLD, max_size=WORLD),
)


@settings(max_examples=4, deadline=None)
@given(st.lists(examples, min_size=15, max_size=15))
def test_collectives_give_what_one_process_computes(many):
    """Many draws a world: starting ranks takes longer than what they do."""
    for found in run_ranks(WORLD, try_all, many):
        assert all(found), found


@pytest.mark.parametrize("start", [start_all_gather, start_reduce_scatter, start_all_to_all])
def test_alone_each_is_the_identity(start):
    x, out = torch.arange(5.0), torch.empty(5)
    start(out, x, None).wait()
    assert torch.equal(out, x)
    start_all_reduce(x, None).wait()
    assert torch.equal(out, x)
