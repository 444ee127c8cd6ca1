"""If these fail, a copy is lost together with what it is a copy of."""

from hypothesis import given
from hypothesis import strategies as st

from myriad.checkpoint.snapshots.peer_servers import choose_holders, choose_node
from myriad.comm.grid import RankGrid
from myriad.comm.layout import AXES, Layout


def peers_of(layout: Layout, rank: int) -> frozenset[int]:
    grid = RankGrid(layout, rank)
    return frozenset(peer for axis in AXES for peer in grid.peers(axis)) - {rank}


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 4]), st.data())
def test_a_copy_lies_on_another_node_with_as_few_of_the_ranks_peers_as_there_is(tp, dp, pp, data):
    layout = Layout(tp=tp, dp=dp, pp=pp)
    size = data.draw(st.sampled_from([n for n in range(1, layout.world + 1) if layout.world % n == 0]))
    nodes = [range(first, first + size) for first in range(0, layout.world, size)]
    for node, ranks in enumerate(nodes):
        for rank in ranks:
            peers = peers_of(layout, rank)
            chosen = choose_node(node, nodes, peers)
            if len(nodes) == 1:
                assert chosen is None
                continue
            others = [len(peers & set(other)) for index, other in enumerate(nodes) if index != node]
            assert chosen != node and len(peers & set(nodes[chosen])) == min(others)


def test_where_groups_span_some_nodes_the_copy_is_outside_all_of_them():
    layout = Layout(tp=2, dp=2, pp=2)
    nodes = [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert choose_node(0, nodes, peers_of(layout, 0)) == 3
    assert choose_node(3, nodes, peers_of(layout, 6)) == 0


def test_snapshots_of_ranks_that_hold_the_same_are_on_as_many_nodes_as_are_asked_for():
    apart, paired = [0, 1, 2, 3], [0, 0, 1, 1]
    assert [choose_holders(rank, (0, 1, 2, 3), apart, 2) for rank in range(4)] == [[1], [2], [3], [0]]
    assert choose_holders(3, (0, 1, 2, 3), apart, 3) == [0, 1]
    assert [choose_holders(rank, (0, 1, 2, 3), paired, 3) for rank in range(4)] == [[2], [2], [0], [0]]
    assert choose_holders(0, (0, 1), paired, 2) == [], "both are on one node"
