"""A slice that is summed twice or misses a rank: wrong gradients on some cluster shapes only."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myriad.comm.config import CommConfig
from myriad.comm.hierarchy import RankPlacement, choose_hierarchy, count_levels, declared_rates, make_levels
from myriad.errors import BadInputError
from myriad.job import load_job

radices = st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda digits: math.prod(digits) <= 48)


@given(radices)
def test_every_slice_gets_every_rank_once_and_comes_back_to_all(digits):
    size = math.prod(digits)
    levels = [make_levels(rank, digits) for rank in range(size)]
    sums = [[[rank] for _ in range(size)] for rank in range(size)]
    for depth in range(len(levels[0])):
        before = [[list(part) for part in mine] for mine in sums]
        for rank in range(size):
            level = levels[rank][depth]
            for slice_ in level.slices[level.own]:
                sums[rank][slice_] = [x for member in level.members for x in before[member][slice_]]
    for rank in range(size):
        assert sums[rank][rank] == list(range(size)), "also in rank order: every run adds alike"

    has = [{rank} for rank in range(size)]
    for depth in reversed(range(len(levels[0]))):
        before = [set(mine) for mine in has]
        for rank in range(size):
            level = levels[rank][depth]
            for place in level.others:
                assert set(level.slices[place]) <= before[level.members[place]]
                assert not before[rank] & set(level.slices[place]), "sent twice"
                has[rank] |= set(level.slices[place])
    assert all(mine == set(range(size)) for mine in has)


@given(radices)
def test_what_each_rank_expects_is_what_the_other_sends(digits):
    size = math.prod(digits)
    for rank in range(size):
        for level in make_levels(rank, digits):
            for place in level.others:
                theirs = next(
                    other for other in make_levels(level.members[place], digits) if rank in other.members
                )
                assert theirs.members == level.members
                assert theirs.slices == level.slices


def test_groups_are_cut_where_nodes_and_switches_end():
    sites = RankPlacement(node_size=4, switch_size=2)
    assert sites.radices(range(16), "node") == (4, 4)
    assert sites.radices(range(16), "switch") == (2, 2, 4)
    assert sites.radices((0, 2, 4, 6), "node") == (2, 2)
    assert sites.radices((0, 4, 8, 12), "switch") == (2, 2, 1)
    assert sites.radices((0, 3, 6, 9), "node") is None
    assert sites.radices((0, 3, 6, 9), "flat") == (4,)
    assert sites.radices((0, 4, 8), "switch") is None
    assert [sites.distance(0, other) for other in (3, 4, 8)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({"node_bandwidth": "100 Gbit/s", "network_bandwidth": "10 Gbit/s"}, "node"),
        ({"node_bandwidth": "1 Gbit/s", "network_bandwidth": "100 Gbit/s"}, "flat"),
        (
            {
                "node_bandwidth": "100 Gbit/s",
                "network_bandwidth": "100 Gbit/s",
                "switch_bandwidth": "20 Gbit/s",
                "switch_size": 2,
            },
            "switch",
        ),
    ],
)
def test_the_slow_link_decides(rates, expected):
    comm = CommConfig(**rates)
    sites = RankPlacement(node_size=4, switch_size=comm.switch_size)
    assert choose_hierarchy(sites, range(16), declared_rates(comm, sites)) == expected


def test_replicas_that_do_not_fit_the_nodes_are_refused_before_anything_starts():
    layout = ["layout.dp=4", "layout.pp=3", "train.global_batch=8", "comm.node_size=4"]
    load_job("tiny", layout)
    with pytest.raises(BadInputError, match=r"comm\.hierarchy = \"node\".*0, 3, 6, 9.*flat or auto"):
        load_job("tiny", [*layout, "comm.hierarchy=node"])


@pytest.mark.parametrize(
    ("comm", "size", "stride", "expected"),
    [
        ({}, 16, 1, 0),
        ({"hierarchy": "flat"}, 16, 1, 0),
        ({"hierarchy": "node"}, 16, 1, 2),
        ({"hierarchy": "node"}, 8, 1, 0),  # all in one node of the usual 8
        ({"hierarchy": "node", "node_size": 4}, 8, 1, 2),
        ({"hierarchy": "node", "node_size": 4}, 8, 4, 0),  # each on a node of its own
        ({"hierarchy": "node", "island_size": 4}, 16, 1, 3),
        ({"hierarchy": "switch", "node_size": 2, "switch_size": 2}, 8, 1, 3),
        ({"hierarchy": "node", "sync_every": 4}, 16, 1, 0),  # replicas that train alone exchange nothing
        ({"node_bandwidth": 8e11, "network_bandwidth": 1e11}, 16, 1, 2),
        ({"node_bandwidth": 8e11}, 16, 1, 0),
    ],
)
def test_levels_with_a_communicator_of_their_own(
    comm: dict[str, Any], size: int, stride: int, expected: int
) -> None:
    assert count_levels(CommConfig(**comm), size, stride) == expected
