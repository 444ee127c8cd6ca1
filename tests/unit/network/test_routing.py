"""A path that does not exist, or another one for the same seed, would make conflicts of no fabric at all."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.network.config import FabricShape
from myriad.network.fabric import Fabric, Flows, Paths
from myriad.network.fabric_builder import build
from myriad.network.routing import Routes, adaptive, ecmp, into_queue_pairs, spray


def make(nodes: int = 16, ports: int = 2, **shape: object) -> Fabric:
    given = FabricShape.model_validate({"nodes_per_switch": 4, **shape})
    return build(given, name="test", num_nodes=nodes, ports_per_node=ports, nic_bytes_per_second=25e9)


def flows_of(pairs: list[tuple[int, int]]) -> Flows:
    source, target = np.array(pairs, dtype=np.int32).reshape(-1, 2).T
    zeros = np.zeros(len(pairs))
    return Flows(source, target, np.ones(len(pairs)), zeros, np.arange(len(pairs), dtype=np.uint16))


def distances(fabric: Fabric) -> np.ndarray:
    """Links between all vertices, not through ports: squares of the adjacency, as no router does it."""
    far = np.full((fabric.num_vertices,) * 2, 99)
    np.fill_diagonal(far, 0)
    far[fabric.source, fabric.target] = 1
    for middle in range(fabric.num_ports, fabric.num_vertices):
        far = np.minimum(far, far[:, middle, None] + far[None, middle])
    return far


SHAPES = [
    {"kind": "clos2"},
    {"kind": "clos2", "nodes_per_switch": 16},
    {"kind": "rail", "ports_per_switch": 8},
    {"kind": "clos3", "nodes_per_pod": 8, "split": 2},
    {"kind": "dual-plane"},
    {
        "kind": "graph",
        "cables": [
            {"ends": ("0-7", "a")},
            {"ends": ("8-15", "b"), "count": 2},
            {"ends": ("a", "b"), "count": 3},
            {"ends": ("a", "c")},
            {"ends": ("c", "b")},
        ],
    },
]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(SHAPES),
    st.lists(st.tuples(st.integers(0, 31), st.integers(0, 31)), min_size=1, max_size=20),
    st.integers(0, 2**40),
    st.sampled_from(["ecmp", "adaptive", "spray"]),
)
def test_every_path_is_joined_up_shortest_and_goes_where_its_flow_does(
    shape: dict[str, object], pairs: list[tuple[int, int]], seed: int, rule: str
) -> None:
    fabric, flows = make(**shape), flows_of(pairs)
    routes = Routes(fabric)
    if rule == "spray":
        flows, paths = spray(routes, flows, 3, seed)
    else:
        paths = ecmp(routes, flows, seed) if rule == "ecmp" else adaptive(routes, flows)
    far = distances(fabric)
    assert len(paths) == len(flows)
    for flow in range(len(flows)):
        links, ends = paths.of(flow), (flows.source[flow], flows.target[flow])
        assert len(links) == far[ends]
        if len(links):
            assert (fabric.source[links[0]], fabric.target[links[-1]]) == ends
            assert np.array_equal(fabric.target[links[:-1]], fabric.source[links[1:]])
            assert np.all(fabric.target[links[:-1]] >= fabric.num_ports), "ports forward nothing"


def test_the_same_seed_gives_the_same_paths_and_another_does_not() -> None:
    fabric = make(64)
    flows = flows_of([(port, (port + 37) % 128) for port in range(128)])
    first, again, other = (ecmp(Routes(fabric), flows, seed).link for seed in (5, 5, 6))
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_switches_choose_independently_of_each_other() -> None:
    """If all hashed alike, flows that met at the first switch would meet at all others, and half of the
    cables above would stay dark: a tier where the first has sorted flows must still use all of its cables."""
    fabric = make(64, 1, kind="clos3", nodes_per_pod=16)
    flows = into_queue_pairs(flows_of([(0, 63)]), 512)
    paths = ecmp(Routes(fabric), flows)
    into_core = (fabric.tier[fabric.source] == 2) & (fabric.tier[fabric.target] == 3)
    assert into_core[np.unique(paths.link)].sum() == into_core.sum() / 4, "all of the pod's"
    alike = ecmp(Routes(fabric), flows, alike=True)
    assert into_core[np.unique(alike.link)].sum() == 4, "one from each of four aggregation switches"


def loads(fabric: Fabric, paths: Paths, tier: int) -> np.ndarray:
    """Flows on each link up from first-tier switches that has any."""
    count = np.bincount(paths.link, minlength=fabric.num_links)
    up = (fabric.tier[fabric.source] == tier) & (fabric.tier[fabric.target] == tier + 1)
    return count[up]


def test_the_hash_is_even() -> None:
    """2,000 queue pairs over 8 uplinks: as drawn from a die of 8 sides (chi-squared, 7 degrees, 0.999)."""
    fabric = make()
    count = loads(fabric, ecmp(Routes(fabric), into_queue_pairs(flows_of([(0, 31)]), 2000)), 1)
    own = count[count > 0]
    assert len(own) == 8 and ((own - 250) ** 2 / 250).sum() < 24.3


@pytest.mark.parametrize("rule", ["adaptive", "spray"])
def test_without_hashes_uplinks_carry_the_same(rule: str) -> None:
    fabric = make()
    flows = flows_of([(port, 8 + port) for port in range(8)])
    routes = Routes(fabric)
    paths = adaptive(routes, flows) if rule == "adaptive" else spray(routes, flows, 8)[1]
    count = loads(fabric, paths, 1)
    assert set(count[:8]) == {1 if rule == "adaptive" else 8}


def test_queue_pairs_carry_all_of_a_flow_and_differ_in_their_hash() -> None:
    flows = into_queue_pairs(flows_of([(0, 8), (1, 9)]), 4)
    assert flows.source.tolist() == [0] * 4 + [1] * 4 and flows.num_bytes.sum() == 2
    assert len(set(zip(flows.source.tolist(), flows.entropy.tolist(), strict=True))) == 8


def test_a_nic_with_two_planes_uses_both() -> None:
    fabric = make(kind="dual-plane")
    paths = ecmp(Routes(fabric), into_queue_pairs(flows_of([(0, 31)]), 64))
    assert len({int(paths.of(flow)[0]) for flow in range(64)}) == 2
