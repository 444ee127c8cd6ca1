"""If these fail, keys and values of shared sequences meet no traffic of the network, or the wrong one."""

from collections import Counter
from itertools import permutations
from typing import Any

import pytest

from myriad.comm.grid import RankGrid
from myriad.comm.layout import Layout
from myriad.kernels.ring_plan import ring_plan
from myriad.model.config import ModelConfig
from myriad.network.routing import Routes
from myriad.planner.cost.collective_costs import ExchangeSlowdown
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.fabric.cluster_fabric import fabric_of
from myriad.planner.fabric.fabric_costs import FabricCosts, TransferSlowdown
from myriad.planner.fabric.fabric_placement import rank_mapping
from myriad.planner.fabric.job_exposure import FabricJob, JobExposure
from myriad.planner.fabric.job_flows import transfer_phases
from myriad.planner.fabric.placement_cost import fills_nodes, traffic_of
from myriad.planner.fabric.placement_search import place_nodes
from myriad.planner.simulation.simulator import simulate
from myriad.planner.workload import Workload
from myriad.recipes.cluster import load_cluster

MODEL = ModelConfig(
    layers=6, hidden=1024, heads=8, kv_heads=4, sequence=8192, vocabulary=8192, window=300,
    window_pattern=(True, False, False),
)  # fmt: skip
BATCH = 8
_KEYS = 2 * 4 * 128 * 2
"""Bytes of the keys and values of a position, on all tensor-parallel ranks."""


def _costs(*changes: str, model: ModelConfig = MODEL, nodes: int = 4, **keys: Any) -> Costs:
    cluster = load_cluster("megascale-256xa100", [f"nodes={nodes}", "accelerators_per_node=4", *changes])
    return Costs(Workload(model, Layout(**keys), BATCH), cluster)


def _sent(costs: Costs, kind: str) -> Counter[tuple[int, int]]:
    """Bytes of an iteration from rank to rank."""
    found: Counter[tuple[int, int]] = Counter()
    for phase in transfer_phases(costs):
        if phase.kind == kind:
            pairs = zip(phase.exchange.source, phase.exchange.target, phase.exchange.num_bytes, strict=True)
            for source, target, size in pairs:
                found[int(source), int(target)] += float(size) * len(phase.start_seconds)
    return found


def _expected(layout: Layout, *, backward: bool) -> Counter[tuple[int, int]]:
    """The same, message by message as the ranks of a ring exchange them in attention."""
    found: Counter[tuple[int, int]] = Counter()
    turns = [False, True] if backward and layout.recompute == "full" else [backward]
    sequences = BATCH / layout.dp
    keys = _KEYS / layout.tp * max(1.0, layout.ulysses * layout.tp / 4)
    share = MODEL.sequence / layout.ring
    for ranks in RankGrid(layout, 0).rows("ring"):
        for returns in turns:
            for block in range(MODEL.layers):
                if block * layout.pp // MODEL.layers != RankGrid(layout, ranks[0]).index("pp"):
                    continue
                for place, rank in enumerate(ranks):
                    plan = ring_plan(MODEL.sequence, MODEL.layer_window(block), place, layout.ring)
                    after = ranks[(place + 1) % layout.ring]
                    if plan.sent is None:
                        for hop in plan.leaving:
                            halves = sum(hop.keys) + 2 * sum(hop.sums) * returns
                            found[rank, after] += sequences * share / 2 * keys * halves
                        continue
                    for step, message in enumerate(plan.sent):
                        to = ranks[(place + step) % layout.ring]
                        found[rank, to] += sequences * message.length * keys / layout.ulysses
                        found[to, rank] += sequences * message.length * keys / layout.ulysses * 2 * returns
    return +found


LAYOUTS = [
    {"cp": 8, "tp": 2},
    {"dp": 2, "cp": 4, "pp": 2, "zero": 1},
    {"cp": 4, "pp": 2, "tp": 2, "recompute": "full"},
]


@pytest.mark.parametrize("keys", LAYOUTS, ids=str)
def test_keys_travel_around_the_ring_and_short_windows_only_to_those_that_see_them(
    keys: dict[str, Any],
) -> None:
    costs = _costs(**keys)
    for kind in ("context-forward", "context-backward"):
        expected = _expected(costs.workload.layout, backward=kind == "context-backward")
        found = _sent(costs, kind)
        assert found == pytest.approx(expected) and len(found) > 0


def test_a_row_exchanges_positions_for_heads() -> None:
    """Four query heads and two key/value heads a rank of two: as many after, of twice the positions."""
    costs = _costs(cp=4, ulysses=4, dp=2, tp=2)
    layout = costs.workload.layout
    tokens = BATCH / layout.dp * MODEL.sequence / layout.cp
    heads = 4 + 2 * max(2, layout.ulysses) + 4  # key/value heads are copied for four ranks
    size = tokens * heads * 128 * 2 * MODEL.layers / layout.ulysses
    expected = {pair: size for row in RankGrid(layout, 0).rows("cp") for pair in permutations(row, 2)}
    for kind in ("context-forward", "context-backward"):
        assert _sent(costs, kind) == pytest.approx(expected)


def test_a_ring_waits_for_the_cable_that_several_share() -> None:
    """Two rings of four nodes each: the cable between two switches carries both, the ports one."""
    cable = 'fabric={kind="graph", cables=[{ends=["0-3", "a"]}, {ends=["4-7", "b"]}, {ends=["a", "b"]}]}'
    changes = (cable, "accelerators_per_node=1", "nics_per_node=1")
    model = MODEL.model_copy(update={"window": None})
    costs = _costs(*changes, nodes=8, model=model, dp=2, cp=4)
    routes = Routes(fabric_of(costs.cluster))

    def slowdown(nodes: list[int]) -> TransferSlowdown:
        return (
            JobExposure(routes, [FabricJob(costs, rank_mapping(costs, routes, nodes))]).draw(0).slowdowns[0]
        )

    assert slowdown([0, 1, 2, 3, 4, 5, 6, 7]).context == (1.0,)
    assert slowdown([0, 1, 4, 5, 2, 3, 6, 7]).context == pytest.approx((2.0,))


def test_slower_keys_lengthen_the_attention_that_no_longer_hides_them() -> None:
    costs = _costs(cp=8, dp=2, zero=1)
    slow = FabricCosts(costs.workload, costs.cluster, TransferSlowdown((1.0,), (1.0,), {}, context=(50.0,)))
    expected = Costs(costs.workload, costs.cluster, ExchangeSlowdown(context=50.0))
    assert simulate(slow).seconds == simulate(expected).seconds > simulate(costs).seconds
    inside = _costs(cp=4, dp=4, zero=1)
    slow = FabricCosts(inside.workload, inside.cluster, slow.slowdown)
    assert simulate(slow).seconds == simulate(inside).seconds  # all in one node


def test_ranks_that_share_sequences_are_columns_that_hold_the_same_parameters() -> None:
    costs = _costs(dp=2, pp=1, cp=4, tp=2, zero=1)
    traffic = traffic_of(costs)
    assert fills_nodes(costs.workload.layout, 4)
    assert (traffic.replicas, traffic.parts, traffic.width, traffic.holders) == (2, 1, 2, 2)
    assert traffic.column_seconds == (sum(float(one.parts.context) for one in costs.stages),)
    wide = traffic_of(_costs(nodes=8, cp=2, tp=8, pp=2))
    assert (wide.replicas, wide.parts, wide.width, wide.holders) == (1, 2, 4, 2)
    assert wide.messages[0].num_bytes == 2 * 4096 * 1024 * 2 / 8
    assert not fills_nodes(Layout(cp=3, tp=2, dp=2), 4)


def test_nodes_that_share_sequences_are_put_under_one_switch() -> None:
    spine = ("nodes_per_switch=2", "links.spine={bytes_per_second=2e9, latency_seconds=1e-5}")
    model = MODEL.model_copy(update={"window": None, "hidden": 512, "heads": 4})
    costs = _costs(*spine, model=model, dp=2, cp=8)
    mixed = [0, 2, 1, 3]
    found = place_nodes(costs.cluster, traffic_of(costs), None, mixed)
    assert [mixed[slot] // 2 for slot in found.order] in ([0, 0, 1, 1], [1, 1, 0, 0])
    assert found.seconds < found.plain_seconds
