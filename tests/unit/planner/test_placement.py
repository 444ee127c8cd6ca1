"""If these fail, ranks are put on nodes where they are slower than they could be."""

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import chain
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import problem_of

from myriad.planner.cluster_config import Cluster, NodeLinks
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.fabric.placement_cost import (
    PlacementCost,
    SlotMessage,
    SlotTraffic,
    fills_nodes,
    traffic_of,
)
from myriad.planner.fabric.placement_search import place_nodes, placed_seconds, search_orders, try_every_order
from myriad.planner.search.plan_ranking import SimulatedPlan
from myriad.planner.search.planning import find_plans
from myriad.recipes.cluster import load_cluster

TRAFFIC = SlotTraffic(
    replicas=2,
    parts=3,
    compute_seconds=(0.1, 0.09, 0.12),
    ring_bytes=(4e9, 4e9, 4e9),
    messages=(SlotMessage(0, 1, 1e8), SlotMessage(1, 2, 1e8)),
    num_micro_batches=8,
    hides_messages=False,
)
Case = tuple[Cluster, SlotTraffic, dict[int, float]]


def _cluster(
    nodes: int, rates: dict[int, float] | None = None, per_switch: int = 0, up: float = 0
) -> Cluster:
    changes = [f"nodes={nodes}"]
    if up:
        changes.append(f"nodes_per_switch={per_switch}")
        changes.append(f"links.spine={{bytes_per_second={up}, latency_seconds=1e-5}}")
    groups = tuple(NodeLinks(nodes=(node,), bytes_per_second=rate) for node, rate in (rates or {}).items())
    return load_cluster("megascale-256xa100", changes).model_copy(update={"unequal": groups})


@st.composite
def _cases(draw: st.DrawFn, shapes: tuple[tuple[int, int, int], ...]) -> Case:
    """Any link speeds, switches, slow nodes; (replicas, parts, width)."""
    replicas, parts, width = draw(st.sampled_from(shapes))
    count = replicas * parts * width
    each = [draw(st.floats(low, high)) for low, high in ((0.05, 0.2), (1e9, 8e9)) for _ in range(parts)]
    sizes = st.sampled_from([1e6, 1e8, 1e9])
    pairs = [(part, part + 1) for part in range(parts - 1)]
    pairs += [(0, parts - 1)] if parts > 2 and draw(st.booleans()) else []
    traffic = SlotTraffic(
        replicas=replicas,
        parts=parts,
        compute_seconds=tuple(each[:parts]),
        ring_bytes=tuple(each[parts:]),
        messages=tuple(SlotMessage(a, b, draw(sizes)) for a, b in pairs),
        num_micro_batches=draw(st.sampled_from([1, 8])),
        exposed_ratio=draw(st.sampled_from([0.1, 1.0])),
        hides_messages=draw(st.booleans()),
        width=width,
        holders=draw(st.sampled_from([1, width])),
        column_seconds=(0.02,) * parts if width > 1 else (),
    )
    nodes = st.integers(0, count - 1)
    rates = draw(st.dictionaries(nodes, st.floats(5e9, 25e9), max_size=min(count, 24)))
    per_switch = draw(st.sampled_from([1, 2, 3, 4, count]))
    cluster = _cluster(count, rates, per_switch, draw(st.sampled_from([0, 25e9, 12e9, 5e9])))
    return cluster, traffic, dict.fromkeys(draw(st.lists(nodes, max_size=1)), 1.2)


FEW = ((1, 4, 1), (2, 2, 1), (3, 2, 1), (2, 3, 1), (6, 1, 1), (1, 7, 1), (2, 4, 1), (2, 2, 2), (1, 4, 2))
MANY = ((4, 8, 1), (9, 1, 1), (3, 5, 2), (1, 24, 1), (25, 4, 1))


def _counted(case: Case, order: list[int]) -> float:
    """The head of `fabric` once more, one slot at a time."""
    cluster, traffic, slower = case
    rates = dict.fromkeys(range(cluster.nodes), 0.9 * 25e9)
    rates |= {node: 0.9 * group.bytes_per_second for group in cluster.unequal for node in group.nodes}
    below = cluster.nodes_per_switch if cluster.links.spine else None
    node_at = np.array(order).reshape(traffic.replicas, traffic.parts, traffic.width)

    def switch(node: int) -> int:
        return node // below if below else 0

    apart = traffic.width // traffic.holders
    rings = [[*node_at[:, p, w::apart].reshape(-1)] for p in range(traffic.parts) for w in range(apart)]
    groups = [[*node_at[r, p]] for r in range(traffic.replicas) for p in range(traffic.parts)]
    hops = {
        (r, m.source, m.target): [*zip(node_at[r, m.source], node_at[r, m.target], strict=True)]
        for r in range(traffic.replicas)
        for m in traffic.messages
    }
    flows: Counter[int] = Counter()
    for members in [*rings, *(groups if traffic.width > 1 else []), *chain(*hops.values())]:
        flows.update({switch(n) for n in members} if len({switch(n) for n in members}) > 1 else ())

    def slowest(members: list[int]) -> float:
        own = min(rates[node] for node in members)
        if len({switch(node) for node in members}) > 1:
            assert cluster.links.spine is not None and below is not None
            up = 0.9 * cluster.links.spine.bytes_per_second * below
            own = min(own, *(up / flows[switch(node)] for node in members))
        return own

    pipelines = []
    for r in range(traffic.replicas):
        parts = []
        for p in range(traffic.parts):
            seconds = traffic.compute_seconds[p] * max(slower.get(n, 1.0) for n in node_at[r, p])
            if traffic.column_seconds:
                seconds += traffic.column_seconds[p] * (0.9 * 25e9 / slowest([*node_at[r, p]]) - 1)
            parts.append(seconds)
        sent = [
            m.num_bytes / min(slowest([*pair]) for pair in hops[r, m.source, m.target])
            for m in traffic.messages
        ]
        if traffic.hides_messages:
            steady = max(parts + sent)
        else:
            ends = [(m.source, m.target) for m in traffic.messages]
            steady = max(
                parts[p] + sum(s for s, pair in zip(sent, ends, strict=True) if p in pair)
                for p in range(traffic.parts)
            )
        pipelines.append(sum(parts) + sum(sent) + (traffic.num_micro_batches - 1) * steady)
    share = traffic.exposed_ratio * (1 - 1 / (traffic.replicas * traffic.holders))
    moved = [traffic.ring_bytes[p] * share for p in range(traffic.parts) for _ in range(apart)]
    return max(pipelines) + max(size / slowest(ring) for size, ring in zip(moved, rings, strict=True))


@given(_cases(FEW + MANY), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_many_orders_at_once_cost_what_each_does_when_counted(case: Case, draw: Random) -> None:
    cluster, traffic, slower = case
    order = list(range(traffic.num_slots))
    draw.shuffle(order)
    both = np.array([order, order[::-1]])
    found = PlacementCost(cluster, traffic, slower).score(both).seconds
    assert found == pytest.approx([_counted(case, order), _counted(case, order[::-1])])


@pytest.mark.slow
@given(_cases(FEW + MANY))
@settings(max_examples=20, deadline=None)
def test_an_order_is_never_worse_than_the_given_one(case: Case) -> None:
    cluster, traffic, slower = case
    best_placement = place_nodes(cluster, traffic, slower)
    assert sorted(best_placement.order) == list(range(traffic.num_slots))
    assert best_placement.seconds == pytest.approx(
        placed_seconds(cluster, traffic, best_placement.order, slower)
    )
    assert best_placement.seconds <= best_placement.plain_seconds
    assert best_placement.plain_seconds == placed_seconds(cluster, traffic, range(traffic.num_slots), slower)


@pytest.mark.slow
@given(_cases(FEW))
@settings(max_examples=20, deadline=None)
def test_of_few_nodes_no_other_order_is_better_and_the_search_comes_close(case: Case) -> None:
    """What is used with more nodes is put to the same cases."""
    cluster, traffic, slower = case
    fabric = PlacementCost(cluster, traffic, slower)
    best, found = fabric.score(np.array([try_every_order(fabric), search_orders(fabric)])).seconds
    assert place_nodes(cluster, traffic, slower).seconds <= best * (1 + 1e-9)
    assert found <= best * 1.1


def test_nodes_that_are_alike_keep_their_order() -> None:
    best_placement = place_nodes(_cluster(6), TRAFFIC)
    assert best_placement.is_plain and best_placement.seconds == best_placement.plain_seconds


def test_rings_share_a_switch_where_the_way_up_is_narrow() -> None:
    """Two replicas of three parts, two nodes under a switch: each ring gets a switch of its own."""
    light = tuple(replace(message, num_bytes=1e6) for message in TRAFFIC.messages)
    best_placement = place_nodes(_cluster(6, {}, 2, 5e9), replace(TRAFFIC, messages=light))
    first, second = best_placement.order[:3], best_placement.order[3:]
    assert [node // 2 for node in first] == [node // 2 for node in second]
    assert best_placement.seconds < 0.9 * best_placement.plain_seconds


def test_nodes_of_slow_links_share_a_ring_that_carries_the_least() -> None:
    traffic = replace(TRAFFIC, ring_bytes=(4e9, 4e9, 1e8), messages=())
    best_placement = place_nodes(_cluster(6, {0: 8e9, 4: 6e9}), traffic)
    assert {best_placement.order[2], best_placement.order[5]} == {0, 4}


def test_a_slow_node_gets_the_least_work() -> None:
    best_placement = place_nodes(_cluster(6), TRAFFIC, {0: 1.3})
    assert best_placement.order.index(0) % 3 == 1


def test_a_large_cluster_is_laid_out_switch_by_switch_round_its_slow_nodes() -> None:
    """1,536 nodes, 48 of half the rate at random: they meet in the one ring that carries the least, as if
    there were one switch, although a way up is half as wide as what is below it."""
    nodes = np.random.default_rng(1).permutation(1536)[:48]
    rates = {int(node): 12.5e9 for node in nodes}
    traffic = replace(
        TRAFFIC,
        replicas=192,
        parts=8,
        compute_seconds=(0.1,) * 8,
        ring_bytes=(8e9,) * 3 + (1e9,) + (8e9,) * 4,
        messages=tuple(SlotMessage(part, part + 1, 1e7) for part in range(7)),
        hides_messages=True,
    )
    equal = place_nodes(_cluster(1536), traffic)
    best_placement = place_nodes(_cluster(1536, rates, 64, 12.5e9), traffic)
    parts = {best_placement.order.index(node) % 8 for node in rates}
    assert parts == {3} and best_placement.seconds < 1.02 * equal.seconds
    assert best_placement.seconds < 0.9 * best_placement.plain_seconds


@cache
def _plans() -> tuple[SimulatedPlan, ...]:
    return find_plans(problem_of()).plans


def test_traffic_of_a_plan_fills_the_cluster() -> None:
    problem = problem_of()
    for plan in _plans()[:20]:
        costs = Costs(plan.candidate.workload(problem), problem.cluster)
        assert fills_nodes(plan.candidate.layout, 4)
        traffic = traffic_of(costs)
        assert traffic.num_slots == problem.cluster.nodes
        assert len(traffic.compute_seconds) == len(traffic.ring_bytes) == traffic.parts


@pytest.mark.parametrize(
    ("schedule", "virtual_stages", "pairs"),
    [("1f1b", 1, [(0, 1)]), ("interleaved", 2, [(0, 1)]), ("zero-bubble-v", 2, [(0, 1)])],
)
def test_messages_go_between_the_stages_that_lie_on_other_nodes(
    schedule: str, virtual_stages: int, pairs: list[tuple[int, int]]
) -> None:
    """Of four pipeline ranks, two in each node: interleaved stages come back from the last to the first."""
    problem = problem_of()
    plan = _plans()[0].candidate
    values = {"dp": 2, "tp": 2, "pp": 4, "schedule": schedule, "virtual_stages": virtual_stages}
    layout = plan.layout.model_copy(update={**values, "micro_batch": 1})
    traffic = traffic_of(Costs(replace(plan, layout=layout).workload(problem), problem.cluster))
    assert [(m.source, m.target) for m in traffic.messages] == pairs
    alone = traffic.messages[0].num_bytes / (2.0 * 1024 * 1024 * 2 / 2)
    assert alone == {"1f1b": 1, "interleaved": 3, "zero-bubble-v": 2}[schedule]
