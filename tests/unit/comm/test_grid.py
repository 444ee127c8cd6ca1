"""If these fail, ranks shard their state with others than they sum gradients with."""

import pytest

from myriad.comm.grid import RankGrid
from myriad.comm.layout import Layout

GROUPED = Layout(dp=4, tp=2, zero=3, shard_group=2)


def test_groups_are_neighbours_and_meet_rank_by_rank() -> None:
    rank = RankGrid(GROUPED, 3)
    assert rank.peers("dp_shard") == (1, 3)
    assert rank.peers("dp_replicate") == (3, 7)
    assert rank.peers("dp") == (1, 3, 5, 7)
    assert rank.peers("dp_shard", "tp") == (0, 1, 2, 3)
    assert RankGrid(GROUPED, 0).rows("dp_replicate") == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    ("layout", "shards", "groups"),
    [
        (Layout(dp=4), 1, 4),
        (Layout(dp=4, zero=1), 4, 1),
        (GROUPED, 2, 2),
        (Layout(dp=4, zero=2, shard_group=4), 4, 1),
    ],
)
def test_a_replica_has_one_place_in_its_group(layout: Layout, shards: int, groups: int) -> None:
    assert (layout.num_shards, layout.num_shard_groups) == (shards, groups)
    places = [RankGrid(layout, rank) for rank in range(layout.world)]
    found = [(one.index("dp_replicate"), one.index("dp_shard")) for one in places]
    assert all(
        one.index("dp") == group * shards + shard for one, (group, shard) in zip(places, found, strict=True)
    )
