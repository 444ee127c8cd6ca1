"""If these fail, ranks are put on nodes where they are slower than they could be."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import problem_of

from myriad.planner.cluster import Cluster
from myriad.planner.costs import Costs
from myriad.planner.placement import Traffic, place, placed_seconds, traffic_of
from myriad.planner.questions import answer
from myriad.recipes.cluster import load_cluster

TRAFFIC = Traffic(
    replicas=2,
    parts=3,
    compute_seconds=(0.1, 0.09, 0.12),
    num_micro_batches=8,
    message_bytes=1e8,
    ring_bytes=4e9,
)


def _cluster(nodes: int, *changes: str) -> Cluster:
    return load_cluster("megascale-256xa100", [f"nodes={nodes}", *changes])


def _best_by_brute_force(cluster: Cluster, traffic: Traffic, slower: dict[int, float]) -> float:
    count = traffic.replicas * traffic.parts
    return min(
        placed_seconds(cluster, traffic, order, slower) for order in itertools.permutations(range(count))
    )


@st.composite
def _cases(draw: st.DrawFn) -> tuple[Cluster, Traffic, dict[int, float]]:
    replicas, parts = draw(st.sampled_from([(1, 4), (2, 2), (3, 2), (2, 3), (6, 1), (4, 1)]))
    count = replicas * parts
    per_switch = draw(st.sampled_from([1, 2, 3, count]))
    spine = draw(st.sampled_from([25, 12, 5]))
    odd = draw(st.lists(st.integers(0, count - 1), max_size=2, unique=True))
    changes = [
        f"nodes_per_switch={per_switch}",
        f"links.spine={{bytes_per_second={spine}e9, latency_seconds=1e-5}}",
        f"unequal=[{{nodes={odd}, bytes_per_second=8e9}}]",
    ]
    slow = dict.fromkeys(draw(st.lists(st.integers(0, count - 1), max_size=1)), 1.2)
    seconds = tuple(draw(st.floats(0.05, 0.2)) for _ in range(parts))
    share = draw(st.sampled_from([0.1, 1.0]))
    traffic = replace(TRAFFIC, replicas=replicas, parts=parts, compute_seconds=seconds, exposed_ratio=share)
    return _cluster(count, *changes), traffic, slow


@given(_cases())
@settings(max_examples=40, deadline=None)
def test_no_other_order_is_predicted_faster(case: tuple[Cluster, Traffic, dict[int, float]]) -> None:
    cluster, traffic, slow = case
    placed = place(cluster, traffic, slow)
    assert sorted(placed.order) == list(range(len(placed.order)))
    assert placed.seconds == pytest.approx(placed_seconds(cluster, traffic, placed.order, slow))
    assert placed.seconds <= _best_by_brute_force(cluster, traffic, slow) * (1 + 1e-6)


def test_nodes_that_are_alike_keep_their_order() -> None:
    placed = place(_cluster(6), TRAFFIC)
    assert placed.is_plain and placed.seconds == placed.plain_seconds


def test_rings_share_a_switch_where_the_way_up_is_narrow() -> None:
    """Two replicas of three parts, two nodes under a switch: each ring gets a switch of its own."""
    narrow = _cluster(6, "nodes_per_switch=2", "links.spine={bytes_per_second=5e9, latency_seconds=1e-5}")
    placed = place(narrow, replace(TRAFFIC, message_bytes=1e6))
    first, second = placed.order[:3], placed.order[3:]
    assert [node // 2 for node in first] == [node // 2 for node in second]
    assert placed.seconds < 0.9 * placed.plain_seconds


def test_a_slow_node_gets_the_least_work() -> None:
    placed = place(_cluster(6), TRAFFIC, {0: 1.3})
    assert placed.order.index(0) % 3 == 1


def test_traffic_of_a_plan_fills_the_cluster() -> None:
    problem = problem_of()
    plans = answer(problem).plans
    for plan in plans[:20]:
        traffic = traffic_of(Costs(plan.candidate.work(problem), problem.cluster))
        assert traffic.replicas * traffic.parts <= problem.cluster.nodes
        assert len(traffic.compute_seconds) == traffic.parts
