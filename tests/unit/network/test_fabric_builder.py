"""A fabric with other switches or cables than the cluster has would make every figure about it wrong."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.errors import BadInputError
from myriad.network.config import Cable, FabricShape
from myriad.network.fabric import Fabric
from myriad.network.fabric_builder import build
from myriad.planner.fabric.cluster_fabric import fabric_of, shape_of
from myriad.recipes.cluster import load_cluster
from myriad.system import machine

NIC = 25e9


def make(nodes: int, ports: int = 8, **shape: object) -> Fabric:
    given = FabricShape.model_validate(shape)
    return build(given, name="test", num_nodes=nodes, ports_per_node=ports, nic_bytes_per_second=NIC)


def between(fabric: Fabric, low: int, high: int) -> np.ndarray:
    """Links from tier `low` up to tier `high`."""
    return np.flatnonzero((fabric.tier[fabric.source] == low) & (fabric.tier[fabric.target] == high))


@pytest.mark.parametrize(
    ("units", "leaves", "spines", "cores"),
    [(1, 8, 4, 0), (2, 16, 8, 0), (3, 24, 16, 0), (4, 32, 16, 0), (16, 128, 128, 64), (32, 256, 256, 128)],
)
def test_a_superpod_has_the_switches_and_cables_that_its_maker_lists(
    units: int, leaves: int, spines: int, cores: int
) -> None:
    """NVIDIA DGX SuperPOD reference architectures, DGX H100 (table 4) and B200 (larger sizes): 32 nodes a
    unit, rails, switches of 64 ports. Its 64 units are built otherwise; these say all that is published."""
    fabric = make(32 * units, kind="clos3", ports_per_switch=64, rails=True, nodes_per_switch=32)
    assert np.bincount(fabric.tier, minlength=4)[1:].tolist() == [leaves, spines, cores]
    assert len(between(fabric, 1, 2)) == leaves * 32
    assert len(between(fabric, 2, 3)) == (spines * 32 if cores else 0)


def test_megascale_has_uplinks_of_twice_a_nics_rate() -> None:
    fabric = fabric_of(load_cluster("megascale-12288xa100"))
    down, up = between(fabric, 0, 1), between(fabric, 1, 2)
    assert set(fabric.bytes_per_second[up]) == {2 * NIC} and set(fabric.bytes_per_second[down]) == {NIC}
    leaves = np.bincount(fabric.target[down])[fabric.num_ports :]
    assert set(leaves[leaves > 0]) == {64}, "64 x 200G down"
    assert set(np.bincount(fabric.source[up])[fabric.num_ports :][:192]) == {32}, "32 x 400G up"
    under = fabric.target[down].reshape(fabric.num_nodes, 8)
    assert len(np.unique(under[:64])) == 8 and len(np.unique(under[0])) == 8, "8 NICs to 8 switches"


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["clos2", "clos3", "rail", "dual-plane"]),
    st.integers(1, 40),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 3),
    st.sampled_from([8, 16, 32]),
    st.sampled_from([1.0, 2.0]),
)
def test_switches_use_at_most_their_ports_and_have_the_oversubscription_ratio(
    kind: str, nodes: int, ports: int, split: int, switch_ports: int, ratio: float
) -> None:
    shape = {"kind": kind, "split": split, "ports_per_switch": switch_ports, "oversubscription": ratio}
    try:
        fabric = make(nodes, ports, **shape)
    except BadInputError as refused:
        assert refused.key == "fabric.ports_per_switch"
        return
    used = np.where(fabric.tier[fabric.target] == 0, 1 / split, 1.0)
    per_switch = np.bincount(fabric.source, weights=used)[fabric.num_ports :]
    assert per_switch.max() <= switch_ports + 1e-9
    rates = fabric.bytes_per_second
    nics = rates[between(fabric, 0, 1)].sum()
    assert nics == pytest.approx(nodes * ports * NIC), "every NIC has all of its rate, over all planes"
    up = between(fabric, 1, 2)
    if len(up):
        each = np.bincount(fabric.source[up], weights=rates[up])
        down = between(fabric, 0, 1)
        below = np.bincount(fabric.target[down], weights=rates[down], minlength=len(each))
        uplink = rates[up].max()
        assert np.all(each[each > 0] >= below[each > 0] / ratio - uplink / 2 - 1), "rounded to whole uplinks"


def test_what_goes_into_the_core_is_a_seventh_of_a_pod() -> None:
    fabric = fabric_of(load_cluster("llama3-24576xh100"))
    pod, core = 3072 * 50e9, fabric.bytes_per_second[between(fabric, 2, 3)].sum() / 8
    assert pod / core == pytest.approx(7, rel=0.02)
    assert fabric.bytes_per_second[between(fabric, 1, 2)].sum() / 8 == pytest.approx(pod)


def test_planes_share_no_switch() -> None:
    fabric = make(16, 2, kind="dual-plane", nodes_per_switch=4)
    first, links = fabric.leaving
    ways = [fabric.target[links[first[p] : first[p + 1]]] for p in range(fabric.num_ports)]
    planes = [{int(pair[plane]) for pair in ways} for plane in (0, 1)]
    assert {len(pair) for pair in ways} == {2} and not planes[0] & planes[1]
    inside = np.isin(fabric.source, [*planes[0]]) & (fabric.target >= fabric.num_ports)
    outside = np.isin(fabric.source, [*planes[1]]) & (fabric.target >= fabric.num_ports)
    assert not set(fabric.target[inside]) & set(fabric.target[outside])


def test_a_graph_fabric_has_the_links_of_its_cables() -> None:
    cables = [
        Cable(ends=("0-1", "left")),
        Cable(ends=("2.0", "right")),
        Cable(ends=("2.1", "right"), bytes_per_second=5e9),
        Cable(ends=("left", "right"), count=2),
    ]
    fabric = make(3, 2, kind="graph", cables=cables)
    assert fabric.tier.tolist() == [0] * 6 + [1, 1] and fabric.num_links == 2 * 8
    assert sorted(fabric.target[between(fabric, 0, 1)].tolist()) == [6, 6, 6, 6, 7, 7]
    assert fabric.bytes_per_second[fabric.source == 5].tolist() == [5e9]


def test_a_switch_above_others_is_a_tier_above_them() -> None:
    cables = [Cable(ends=("top", "middle")), Cable(ends=("middle", "leaf")), Cable(ends=("0-1", "leaf"))]
    assert make(2, 1, kind="graph", cables=cables).tier.tolist() == [0, 0, 3, 2, 1]


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        ({"kind": "graph"}, "cables"),
        ({"kind": "graph", "cables": [Cable(ends=("0-9", "leaf"))]}, "nodes 0 to 3"),
        ({"kind": "graph", "cables": [Cable(ends=("0.7", "leaf"))]}, "ports 0 to 1"),
        ({"kind": "graph", "cables": [Cable(ends=("0", "1"))]}, "a switch at one end"),
        ({"kind": "graph", "cables": [Cable(ends=("0-2", "leaf"))]}, "there is no path from node 0"),
        (
            {"kind": "graph", "cables": [Cable(ends=("0-2", "a")), Cable(ends=("3", "b"))]},
            "no path from node 0 to port 0 of node 3",
        ),
        ({"ports_per_switch": 2, "nodes_per_switch": 2}, "4 NIC ports"),
        ({"kind": "clos3", "nodes_per_switch": 1}, "nodes_per_pod"),
        ({"kind": "clos3", "nodes_per_switch": 2, "nodes_per_pod": 3}, "a multiple of 2"),
        ({"ports_per_switch": 2, "nodes_per_switch": 1, "rails": True}, "8 first-tier switches"),
    ],
)
def test_what_cannot_be_built_is_reported_in_one_line(shape: dict[str, object], told: str) -> None:
    with pytest.raises(BadInputError, match=told) as refused:
        make(4, 2, **shape)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "change",
    [
        "fabric.port_bytes_per_second=0",
        'fabric.cables=[{ends = ["0-31", "leaf"], bytes_per_second = 0}]',
        "links.network.bytes_per_second=0",
    ],
)
def test_a_link_of_no_capacity_is_refused_by_its_key(change: str) -> None:
    with pytest.raises(BadInputError, match=r"bytes_per_second = 0: must be at least 1"):
        load_cluster("megascale-256xa100", [change])


def test_more_than_there_is_memory_for_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 1e6)
    with pytest.raises(BadInputError, match="800000 NIC ports"):
        make(100_000)


def test_a_cluster_without_a_fabric_gets_one_from_its_links() -> None:
    cluster = load_cluster("vtrain-512xa100", ["nodes_per_switch=16", "links.spine={bytes_per_second=6.25e9, "
                           "latency_seconds=1e-5}"])  # fmt: skip
    fabric = fabric_of(cluster)
    down, up = between(fabric, 0, 1), between(fabric, 1, 2)
    assert np.bincount(fabric.tier).tolist() == [256, 4, 32]
    assert fabric.bytes_per_second[down].sum() == pytest.approx(2 * fabric.bytes_per_second[up].sum())


def test_nodes_with_other_links_have_them_in_the_fabric() -> None:
    changes = ["unequal=[{nodes=[1, 3], bytes_per_second=10e9}]"]
    fabric = fabric_of(load_cluster("megascale-256xa100", changes))
    slow = np.unique(fabric.source[fabric.bytes_per_second == 10e9])
    assert slow[slow < fabric.num_ports].tolist() == [*range(8, 16), *range(24, 32)]


def test_a_node_alone_has_no_fabric() -> None:
    with pytest.raises(BadInputError, match="inside a node"):
        fabric_of(load_cluster("one-node-8xh100"))


def test_a_clusters_nodes_under_a_switch_hold_where_its_fabric_leaves_them_open() -> None:
    cluster = load_cluster("vtrain-512xa100", ["nodes_per_switch=8", "fabric.kind=rail"])
    assert shape_of(cluster).nodes_per_switch == 8
    assert np.bincount(fabric_of(cluster).tier)[1] == 8 * 4
