"""Rates that some link cannot carry, or that leave a flow less than its share, make every time wrong."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.network.config import FabricShape
from myriad.network.fabric import Fabric, Flows, Paths
from myriad.network.fabric_builder import build
from myriad.network.max_min import coupled, finish_seconds, latency_seconds, max_min
from myriad.network.routing import Routes, ecmp

NIC = 25e9


def paths_of(rows: list[list[int]]) -> Paths:
    first = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return Paths(first, np.array([link for row in rows for link in row], dtype=np.int32))


def star(nodes: int = 16) -> Fabric:
    shape = FabricShape(kind="clos2")
    return build(shape, name="star", num_nodes=nodes, ports_per_node=1, nic_bytes_per_second=NIC)


def flows_of(pairs: list[tuple[int, int]], sizes: list[float], starts: list[float] | None = None) -> Flows:
    source, target = np.array(pairs, dtype=np.int32).T
    begin = np.array(starts or [0.0] * len(pairs))
    return Flows(source, target, np.array(sizes, dtype=float), begin, np.zeros(len(pairs), dtype=np.uint16))


some_rates = st.lists(st.floats(0.1, 100), min_size=1, max_size=8)
some_paths = st.lists(st.sets(st.integers(0, 7), min_size=1, max_size=4), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(some_rates, some_paths, st.one_of(st.none(), st.lists(st.floats(0.01, 50), min_size=12, max_size=12)))
def test_no_link_carries_too_much_and_every_flow_has_a_reason_for_no_more(
    capacity: list[float], ways: list[set[int]], most: list[float] | None
) -> None:
    rows = [sorted({link % len(capacity) for link in way}) for way in ways]
    limit = None if most is None else np.array(most[: len(rows)])
    rates, paths = np.array(capacity), paths_of(rows)
    found = max_min(rates, paths, limit)
    carried = np.array(
        [sum(found[f] for f, row in enumerate(rows) if link in row) for link in range(len(rates))]
    )
    assert np.all(carried <= rates * (1 + 1e-9)) and np.all(found > 0)
    for flow, row in enumerate(rows):
        full = [link for link in row if carried[link] >= rates[link] * (1 - 1e-9)]
        greatest = [
            link
            for link in full
            if all(found[other] <= found[flow] * (1 + 1e-9) for other, way in enumerate(rows) if link in way)
        ]
        at_limit = limit is not None and found[flow] == pytest.approx(limit[flow])
        assert greatest or at_limit, "neither a bottleneck nor its own limit holds it"


@pytest.mark.parametrize("senders", [1, 2, 7, 15])
def test_an_incast_shares_the_last_link_and_a_ring_shares_nothing(senders: int) -> None:
    fabric = star()
    routes = Routes(fabric)
    incast = flows_of([(1 + n, 0) for n in range(senders)], [1e9] * senders)
    assert max_min(fabric.bytes_per_second, ecmp(routes, incast)) == pytest.approx([NIC / senders] * senders)
    assert finish_seconds(fabric, incast, ecmp(routes, incast)) == pytest.approx(1e9 * senders / NIC + 2e-6)
    ring = flows_of([(n, (n + 1) % 16) for n in range(16)], [1e9] * 16)
    assert max_min(fabric.bytes_per_second, ecmp(routes, ring)) == pytest.approx([NIC] * 16)


def test_what_a_small_flow_leaves_the_others_take() -> None:
    """Three on one link, of 1, 2 and 4 bytes at 3 bytes a second: done at 1, 5/3 and 7/3 s."""
    paths = paths_of([[0], [0], [0]])
    fabric = Fabric("one", 1, 2, np.zeros(2, np.int8), np.array([0, 1], np.int32), np.array([1, 0], np.int32),
                    np.full(2, 3.0), np.full(2, 0.0))  # fmt: skip
    flows = flows_of([(0, 1)] * 3, [1, 2, 4])
    assert finish_seconds(fabric, flows, paths) == pytest.approx([1, 5 / 3, 7 / 3])
    later = flows_of([(0, 1)] * 3, [3, 3, 3], [0, 0.5, 10])
    assert finish_seconds(fabric, later, paths) == pytest.approx([1.5, 2.0, 11.0])


def test_flows_that_go_at_one_pace_leave_the_rest_to_others() -> None:
    """A ring over a slow and a fast link goes as the slow one; what shares the fast one has the rest."""
    paths = paths_of([[0], [1], [1]])
    assert max_min(np.array([1.0, 10.0]), paths).tolist() == [1, 5, 5]
    both = coupled(paths, np.array([0, 0, 1]))
    assert [both.of(0).tolist(), both.of(1).tolist()] == [[0, 1], [1]]
    assert max_min(np.array([1.0, 10.0]), both).tolist() == [1, 9]
    twice = coupled(paths_of([[1], [1], [0]]), np.array([0, 0, 1]))
    assert max_min(np.array([1.0, 10.0]), twice).tolist() == [5, 1], "two members share a link"


def test_a_flow_over_no_link_waits_for_none() -> None:
    assert max_min(np.array([1.0]), paths_of([[], [0]])).tolist() == [np.inf, 1.0]
    assert max_min(np.array([4.0]), paths_of([[], [0]]), np.array([2.0, 3.0])).tolist() == [2.0, 3.0]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**20), st.sampled_from([0.01, 0.1]))
def test_a_tolerance_changes_times_by_little(seed: int, tolerance: float) -> None:
    shape = FabricShape(kind="clos2", nodes_per_switch=4)
    fabric = build(shape, name="two", num_nodes=16, ports_per_node=2, nic_bytes_per_second=NIC)
    draw = np.random.default_rng(seed)
    pairs = [
        (int(a), int(b)) for a, b in zip(draw.permutation(32), draw.permutation(32), strict=True) if a != b
    ]
    flows = flows_of(pairs, [1e6 * float(size) for size in draw.integers(1, 9, len(pairs))])
    paths = ecmp(Routes(fabric), flows, seed)
    exact = finish_seconds(fabric, flows, paths)
    near = finish_seconds(fabric, flows, paths, tolerance=tolerance)
    alone = flows.num_bytes / NIC + latency_seconds(fabric, paths)
    assert np.all(exact >= alone * (1 - 1e-9)), "faster than alone"
    assert near.max() == pytest.approx(exact.max(), rel=tolerance)
