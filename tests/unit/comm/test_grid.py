"""If these fail, ranks shard their state with others than they sum gradients with, or send tokens to ranks
that do not hold their experts."""

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


def test_neighbouring_replicas_share_experts_and_others_hold_the_same() -> None:
    layout = Layout(dp=4, pp=2, tp=2, ep=2)
    assert layout.world == 16
    rank = RankGrid(layout, 5)
    assert (rank.peers("ep"), rank.peers("expert_dp")) == ((1, 5), (5, 13))
    assert rank.peers("expert_dp", "etp") == (4, 5, 12, 13)
    places = [RankGrid(layout, rank) for rank in range(16)]
    assert all(one.index("dp") == 2 * one.index("expert_dp") + one.index("ep") for one in places)


def test_ranks_that_share_sequences_hold_the_same_parameters_as_replicas() -> None:
    layout = Layout(dp=2, pp=2, cp=4, tp=2, ulysses=2, zero=1)
    assert (layout.world, layout.num_shards, layout.ring) == (32, 8, 2)
    rank = RankGrid(layout, 5)  # replica 0, stage 0, third of the ranks of its sequences
    assert rank.peers("cp") == (1, 3, 5, 7)
    assert (rank.peers("ulysses"), rank.peers("ring")) == ((5, 7), (1, 5))
    assert rank.peers("dp_shard") == rank.peers("dp_cp") == (1, 3, 5, 7, 17, 19, 21, 23)
    assert (rank.index("dp_cp"), rank.index("ring"), rank.index("ulysses")) == (2, 1, 0)
    assert RankGrid(layout, 0).rows("ulysses")[:2] == [[0, 2], [1, 3]]
    experts = RankGrid(Layout(dp=2, cp=2, ep=4), 1)
    assert (experts.peers("ep"), experts.peers("expert_dp")) == ((0, 1, 2, 3), (1,))


def test_whole_experts_lie_on_all_ranks_of_a_stage() -> None:
    layout = Layout(dp=2, pp=2, tp=4, ep=2, etp=1)
    assert layout.num_expert_replicas == 4
    rank = RankGrid(layout, 6)  # replica 0, stage 1, third of its tensor-parallel ranks
    assert (rank.peers("ep"), rank.peers("expert_dp")) == ((6, 7), (4, 6, 12, 14))
    across = Layout(dp=2, pp=2, tp=2, ep=4, etp=1)
    assert RankGrid(across, 0).rows("ep") == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_neighbours_share_the_width_of_experts_and_groups_of_them_the_experts() -> None:
    layout = Layout(dp=2, pp=2, tp=4, ep=2, etp=2)
    assert (layout.num_etp_groups, layout.num_expert_replicas) == (2, 2)
    rank = RankGrid(layout, 6)  # replica 0, stage 1, third of its tensor-parallel ranks
    assert (rank.peers("etp"), rank.peers("etp_group")) == ((6, 7), (4, 6))
    assert (rank.peers("ep"), rank.peers("expert_dp")) == ((4, 6), (6, 14))
    assert rank.peers("expert_dp", "etp") == (6, 7, 14, 15)
    across = Layout(dp=2, pp=2, tp=4, ep=4, etp=2)
    assert RankGrid(across, 0).rows("ep")[:2] == [[0, 2, 8, 10], [1, 3, 9, 11]]
    for one in (RankGrid(layout, rank) for rank in range(16)):
        for axis in ("etp", "etp_group", "ep", "expert_dp"):
            assert one.peers(axis)[one.index(axis)] == one.rank
    whole = RankGrid(Layout(dp=2, tp=4), 5)
    assert (whole.peers("etp"), whole.peers("etp_group")) == (whole.peers("tp"), (5,))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=8, pp=2, ep=2, zero=2, shard_group=4),
        Layout(dp=4, tp=2, pp=2, ep=2, zero=3, shard_group=2),
        Layout(dp=4, tp=4, ep=4, etp=2, zero=1, shard_group=2),
        Layout(dp=2, cp=4, ep=2, zero=3, shard_group=4),
    ],
    ids=str,
)
def test_the_same_experts_of_a_group_share_their_state(layout: Layout) -> None:
    whole = RankGrid(layout, 0).rows("expert_dp")
    for rank in range(layout.world):
        grid = RankGrid(layout, rank)
        group = {*grid.peers("dp_shard", "tp")}
        alike = next(row for row in whole if rank in row)
        assert {*grid.peers("expert_shard")} == {*alike} & group
        assert {*grid.peers("dp_replicate")} <= {*alike}
        assert len(alike) == layout.num_expert_shards * layout.num_shard_groups


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
