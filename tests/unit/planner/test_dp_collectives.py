"""If these fail, `myriad plan` is wrong about which way gradients take, and what that costs."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.comm.config import CommConfig
from myriad.comm.hierarchy import Hierarchy, RankPlacement, make_levels
from myriad.comm.layout import Layout
from myriad.errors import BadInputError
from myriad.model.config import ModelConfig
from myriad.planner.cluster_config import Accelerator, Cluster, Link, Links
from myriad.planner.cost.collective_costs import (
    DpCollectives,
    all_gather_seconds,
    all_reduce_seconds,
    group_along,
)
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.search.layout_problem import LayoutCandidate, LayoutProblem
from myriad.planner.search.layout_search import score_layout
from myriad.planner.search.layout_space import layout_grids
from myriad.planner.simulation.simulator import simulate
from myriad.program.config import OverlapConfig

MIB = 2**20
AUTO = CommConfig()


def cluster_of(
    per_node: int,
    nodes: int,
    *,
    chip: str = "CPU core",
    node: float = 1e9,
    network: float = 1e8,
    spine: float | None = None,
    nodes_per_switch: int | None = None,
) -> Cluster:
    """Rates in bytes a second of one accelerator; latencies that no sum of this size sees."""
    link = Link(bytes_per_second=node, latency_seconds=1e-9, launch_seconds=0, achievable_ratio=1.0)
    links = {
        "network": link.model_copy(update={"bytes_per_second": network}),
        "spine": spine and link.model_copy(update={"bytes_per_second": spine}),
    }
    core = Accelerator(
        name=chip,
        peak_flops_per_second=1e11,
        memory_bytes=2**33,
        memory_bytes_per_second=1e10,
        num_units=1,
        tile=1,
    )
    return Cluster(
        name="some",
        nodes=nodes,
        accelerators_per_node=per_node,
        nodes_per_switch=nodes_per_switch,
        accelerator=core,
        links=Links(node=link, **links),
    )


def comm_of(hierarchy: Hierarchy, per_node: int, nodes_per_switch: int | None = None) -> CommConfig:
    return CommConfig(hierarchy=hierarchy, node_size=per_node, switch_size=nodes_per_switch)


shapes = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
"""Ranks of a node, nodes of a switch, switches."""


@settings(deadline=None)
@given(shapes, st.integers(1, 3), st.sampled_from(["flat", "node", "switch"]))
def test_bytes_of_each_level_are_those_that_the_runtime_sends(
    shape: tuple[int, int, int], pipeline: int, hierarchy: Hierarchy
) -> None:
    """``pipeline``: pipeline ranks beside each replica in its node."""
    inside, nodes, switches = shape
    per_node, size = inside * pipeline, inside * nodes * switches
    cluster = cluster_of(per_node, nodes * switches, nodes_per_switch=nodes)
    found = DpCollectives(cluster, comm_of(hierarchy, per_node, nodes), size, pipeline).sent
    sites, ranks = RankPlacement(per_node, nodes), range(0, size * pipeline, pipeline)
    if size == 1:
        assert found is None
        return
    radices = sites.radices(ranks, hierarchy)
    assert found is not None and radices is not None
    for rank in range(size):
        sent: Counter[int] = Counter()
        for level in make_levels(rank, radices):
            for place in level.others:
                sent[sites.distance(ranks[rank], ranks[level.members[place]])] += len(level.slices[level.own])
        assert found.slices == (sent[0], sent[1], sent[2])
        assert hierarchy == "flat" or sent[1] + sent[2] < max(2, nodes * switches), "a slice for each node"


@settings(deadline=None)
@given(
    st.integers(1, 8),
    st.integers(1, 6),
    st.floats(1e7, 1e11),
    st.floats(1e6, 1e11),
    st.floats(1.0, 1e10),
    st.sampled_from(["CPU core", "GPU"]),
)
def test_auto_is_never_slower_than_flat(
    per_node: int, nodes: int, node: float, network: float, num_bytes: float, chip: str
) -> None:
    cluster, size = cluster_of(per_node, nodes, chip=chip, node=node, network=network), per_node * nodes
    auto, flat = (DpCollectives(cluster, comm, size, 1) for comm in (AUTO, CommConfig(hierarchy="flat")))
    assert auto.all_gather_seconds(num_bytes) <= flat.all_gather_seconds(num_bytes) * (1 + 1e-9)
    assert auto.all_reduce_seconds(num_bytes) <= flat.all_reduce_seconds(num_bytes) * (1 + 1e-9)


@settings(deadline=None)
@given(st.integers(1, 8), st.sampled_from([(1, 8), (8, 1)]), st.sampled_from(["CPU core", "GPU"]))
def test_with_one_level_every_way_is_the_ring(size: int, shape: tuple[int, int], chip: str) -> None:
    per_node, nodes = shape
    cluster = cluster_of(per_node, nodes, chip=chip)
    ring = group_along(cluster, float(size), 1.0)
    for hierarchy in ("auto", "flat", "node"):
        found = DpCollectives(cluster, CommConfig(hierarchy=hierarchy), size, 1)
        assert found.all_gather_seconds(MIB) == pytest.approx(float(all_gather_seconds(ring, MIB)))
        assert found.all_reduce_seconds(MIB) == pytest.approx(float(all_reduce_seconds(ring, MIB)))


@pytest.mark.parametrize(("megabits", "measured"), [(1000, 2.9), (200, 3.7), (50, 4.2)])
def test_by_node_gains_what_was_measured(megabits: float, measured: float) -> None:
    """docs/benchmarks/links.md, sums by node: two hosts of four ranks behind one link, which carries 0.956 of
    its rate. What eight ranks on two cores were left inside the hosts is from the first row."""
    cluster = cluster_of(4, 2, node=0.35e9, network=0.956 * megabits * 1e6 / 8 / 4)
    flat, node = (
        float(DpCollectives(cluster, CommConfig(hierarchy=kind), 8, 1).all_reduce_seconds(4 * MIB))
        for kind in ("flat", "node")
    )
    assert flat / node == pytest.approx(measured, rel=0.1)
    assert DpCollectives(cluster, AUTO, 8, 1).hierarchy == "node"


def test_nccl_goes_by_node_where_links_are_declared_or_asked_for() -> None:
    cluster = cluster_of(4, 4, chip="GPU")
    assert DpCollectives(cluster, AUTO, 16, 1).hierarchy == "flat"
    declared = CommConfig(node_bandwidth="100 Gbit/s", network_bandwidth="10 Gbit/s")
    assert DpCollectives(cluster, declared, 16, 1).hierarchy == "node"
    by_node = DpCollectives(cluster, CommConfig(hierarchy="node"), 16, 1)
    inside, outside = group_along(cluster, 4.0, 1.0), group_along(cluster, 4.0, 4.0)
    levels = all_gather_seconds(inside, 16 * MIB) + all_gather_seconds(outside, 4 * MIB)
    assert by_node.all_gather_seconds(16 * MIB) == pytest.approx(float(levels))


def test_a_narrow_spine_is_crossed_once_for_each_switch() -> None:
    cluster = cluster_of(2, 8, network=1e8, spine=1e7, nodes_per_switch=4)
    comm = {kind: comm_of(kind, 2, 4) for kind in ("flat", "node", "switch")}
    sums = {kind: DpCollectives(cluster, comm[kind], 16, 1) for kind in comm}
    assert {kind: found.sent.slices[2] for kind, found in sums.items() if found.sent} == {
        "flat": 8,
        "node": 4,
        "switch": 1,
    }
    assert DpCollectives(cluster, comm_of("auto", 2, 4), 16, 1).hierarchy == "switch"


def test_replicas_that_do_not_fit_the_nodes_are_refused_and_not_searched() -> None:
    cluster = cluster_of(4, 3)
    with pytest.raises(BadInputError, match=r"comm\.hierarchy = \"node\".*flat or auto"):
        DpCollectives(cluster, CommConfig(hierarchy="node"), 4, 3)
    model = ModelConfig(layers=6, hidden=64, heads=4, sequence=64, vocabulary=512)
    free, asked = (
        LayoutProblem(model, 12, cluster, comm=comm) for comm in (AUTO, CommConfig(hierarchy="node"))
    )
    assert {(p.tp, p.pp) for p in layout_grids(free)} - {(p.tp, p.pp) for p in layout_grids(asked)} == {
        (1, 3)
    }


@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize("hierarchy", ["flat", "node"])
def test_the_closed_form_takes_the_same_way(hierarchy: Hierarchy, zero: int) -> None:
    model = ModelConfig(layers=6, hidden=256, heads=4, sequence=64, vocabulary=512)
    comm = CommConfig(hierarchy=hierarchy)
    problem = LayoutProblem(model, 8, cluster_of(4, 2, network=1e7), comm=comm, value_bytes=4)
    overlap = OverlapConfig(data=False, optimizer=False)
    candidate = score_layout(problem, LayoutCandidate(Layout(dp=8, zero=zero), overlap, 0.0, 0.0, 0.0))
    simulated = simulate(Costs(candidate.workload(problem), problem.cluster), spans=False).seconds
    assert candidate.seconds == pytest.approx(simulated, rel=1e-3)
