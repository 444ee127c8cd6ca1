"""If these fail, tokens that travel to experts meet no other traffic of the network, or the wrong one."""

from collections import Counter
from itertools import combinations, permutations
from typing import Any

import numpy as np
import pytest

from myriad.comm.grid import RankGrid
from myriad.comm.layout import Layout
from myriad.model.config import ModelConfig
from myriad.network.routing import Routes
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.fabric.cluster_fabric import fabric_of
from myriad.planner.fabric.fabric_costs import FabricCosts, TransferSlowdown
from myriad.planner.fabric.fabric_placement import rank_mapping
from myriad.planner.fabric.job_exposure import FabricJob, HashDraw, JobExposure
from myriad.planner.fabric.job_flows import TransferPhase, transfer_phases
from myriad.planner.fabric.placement_cost import PlacementCost, SlotTraffic, shares_elsewhere, traffic_of
from myriad.planner.fabric.placement_search import place_nodes
from myriad.planner.simulation.simulation_cache import SimulationCache
from myriad.planner.simulation.simulator import simulate
from myriad.planner.workload import Workload
from myriad.program.config import OverlapConfig
from myriad.recipes.cluster import load_cluster

MODEL = ModelConfig(
    layers=6, hidden=1024, heads=8, sequence=1024, vocabulary=8192, activation="swiglu", experts=16,
    experts_per_token=2, expert_hidden=1024, dense_layers=1,
)  # fmt: skip
BATCH = 32
ONE_CABLE = (
    'fabric={kind="graph", cables=[{ends=["0-1", "a"]}, {ends=["2-3", "b"]}, {ends=["a", "b"]}]}',
    "accelerators_per_node=1",
    "nics_per_node=1",
)


def _costs(*changes: str, nodes: int = 4, overlap: OverlapConfig | None = None, **keys: Any) -> Costs:
    cluster = load_cluster(
        "megascale-256xa100", [f"nodes={nodes}", *(changes or ("accelerators_per_node=4",))]
    )
    return Costs(Workload(MODEL, Layout(**keys), BATCH, overlap=overlap or OverlapConfig()), cluster)


def _sent(phases: list[TransferPhase], kind: str) -> Counter[tuple[int, int]]:
    """Bytes of an iteration from rank to rank."""
    found: Counter[tuple[int, int]] = Counter()
    for phase in phases:
        if phase.kind == kind:
            exchange, times = phase.exchange, len(phase.start_seconds)
            for source, target, size in zip(
                exchange.source, exchange.target, exchange.num_bytes, strict=True
            ):
                found[int(source), int(target)] += float(size) * times
    return found


LAYOUTS = [
    {"dp": 16, "ep": 8},
    {"dp": 4, "pp": 2, "tp": 2, "ep": 4, "zero": 1},
    {"dp": 4, "tp": 4, "ep": 8, "etp": 1, "zero": 2},
    {"dp": 4, "cp": 2, "tp": 2, "ep": 8, "zero": 1},
    {"dp": 2, "pp": 2, "tp": 4, "ep": 4, "etp": 2, "zero": 1, "virtual_stages": 3},
]


@pytest.mark.parametrize("keys", LAYOUTS, ids=str)
def test_tokens_travel_among_the_ranks_that_share_experts(keys: dict[str, Any]) -> None:
    costs = _costs(**keys)
    layout, phases = costs.workload.layout, transfer_phases(costs)
    # A rank has the tokens of its replica, or of its part of them, twice (k = 2), there and back in 5 blocks.
    tokens = BATCH * MODEL.sequence / layout.dp / layout.cp / (layout.tp / layout.expert_tp)
    whole = 5 * 2 * tokens * 2 * MODEL.hidden * 2 / layout.ep
    expected = Counter[tuple[int, int]]()
    for row in RankGrid(layout, 0).rows("ep"):
        for pair in permutations(row, 2):
            expected[pair] += 1
    for kind in ("expert-forward", "expert-backward"):
        found = _sent(phases, kind)
        assert found.keys() == expected.keys()
        per_stage = Counter[int]()
        for (source, _), size in found.items():
            per_stage[RankGrid(layout, source).index("pp")] += size
        assert sum(found.values()) == pytest.approx(whole * len(expected) / layout.pp)
        assert max(found.values()) < whole if layout.pp > 1 else min(found.values()) == pytest.approx(whole)


IN_GROUPS = [
    {"dp": 8, "tp": 2, "ep": 2, "zero": 1, "shard_group": 4},
    {"dp": 8, "pp": 2, "ep": 4, "zero": 2, "shard_group": 4},
    {"dp": 4, "tp": 4, "ep": 2, "etp": 1, "zero": 2, "shard_group": 2},
]


@pytest.mark.parametrize("keys", LAYOUTS[1:] + IN_GROUPS, ids=str)
def test_experts_have_rings_of_their_own(keys: dict[str, Any]) -> None:
    costs = _costs(**keys)
    layout, phases = costs.workload.layout, transfer_phases(costs)
    axis = "expert_shard" if layout.zero else "expert_dp"
    rows = {rank: number for number, row in enumerate(RankGrid(layout, 0).rows(axis)) for rank in row}
    found = _sent(phases, "expert-reduce")
    assert all(rows[source] == rows[target] for source, target in found)
    experts = 5 * 16 * 3 * MODEL.hidden * 1024  # gate, up and down of each
    copies, each = layout.num_expert_shards, costs.workload.profile.gradient_bytes
    expected = experts * each * (copies - 1) * layout.num_shard_groups
    assert sum(found.values()) == pytest.approx(expected)
    whole = sum(one.parameters for one in costs.stages) * layout.tp
    others = _sent(phases, "reduce")
    assert sum(others.values()) < whole * costs.workload.profile.gradient_bytes * (layout.num_holders - 1)
    assert bool(found) is (copies > 1)
    in_group = layout.num_shards * layout.tp * sum(one.own_parameters for one in costs.stages)
    across = 2 * (layout.num_shard_groups - 1) * each * in_group
    assert sum(_sent(phases, "reduce-across").values()) == pytest.approx(across)


def test_a_token_crosses_once_to_each_node_of_its_experts() -> None:
    costs = _costs(dp=16, ep=16, expert_dispatch="node")
    found = _sent(transfer_phases(costs), "expert-forward")
    chosen = list(combinations(range(16), 2))  # 4 experts on each of 4 nodes
    nodes = sum(len({one // 4 for one in pair}) for pair in chosen) / len(chosen)
    ranks = sum(len({*pair}) for pair in chosen) / len(chosen)
    row, tokens = 2 * MODEL.hidden * 2 + 8 * 2, 5 * BATCH * MODEL.sequence
    between = sum(size for (source, target), size in found.items() if source // 4 != target // 4)
    inside = sum(size for (source, target), size in found.items() if source // 4 == target // 4)
    assert between == pytest.approx(tokens * nodes * row * 3 / 4)
    assert inside == pytest.approx(tokens * ranks * row * 3 / 4)
    assert all(source % 4 == target % 4 for source, target in found if source // 4 != target // 4)


def test_whole_experts_need_no_gathers_of_the_sequence() -> None:
    every = [_costs(dp=2, tp=4, ep=2, **more) for more in ({}, {"etp": 2}, {"etp": 1})]
    cut, part, whole = (sum(_sent(transfer_phases(one), "tensor-forward").values()) for one in every)
    one = BATCH * MODEL.sequence * MODEL.hidden * 2 * 3  # three of four ranks, of all replicas
    assert cut - whole == pytest.approx(5 * 2 * one)
    assert part - whole == pytest.approx(5 * 2 * one / 3)  # one of two ranks, which have half of a sequence


def _draw(nodes: list[int], *, meets: bool = True, **keys: Any) -> HashDraw:
    costs = _costs(*ONE_CABLE, **keys)
    routes = Routes(fabric_of(costs.cluster))
    return JobExposure(routes, [FabricJob(costs, rank_mapping(costs, routes, nodes))]).draw(0, meets=meets)


def test_exchanges_wait_for_the_cable_that_they_share() -> None:
    """A port carries three messages of four ranks, the cable four each way; in pairs, none or both."""
    (found,) = _draw([0, 1, 2, 3], dp=4, ep=4).slowdowns
    assert found.exchanges == pytest.approx((4 / 3,)) and found.rings_alone == (1.0, 1.0)
    assert _draw([0, 1, 2, 3], dp=4, ep=2).slowdowns[0].exchanges == (1.0,)
    (crossed,) = _draw([0, 2, 1, 3], dp=4, ep=2).slowdowns
    assert crossed.exchanges == pytest.approx((2.0,))


def test_rings_and_exchanges_share_ports_while_both_are_in_flight() -> None:
    """The ring of each rank and its tokens for a neighbour leave by one port: each has half of it."""
    keys = {"dp": 4, "ep": 2, "zero": 1}
    (found,), (apart,) = (_draw([0, 1, 2, 3], meets=meets, **keys).slowdowns for meets in (True, False))
    assert apart.beside_rings == apart.exchanges == (1.0,) == apart.data
    assert apart.expert_data == pytest.approx((2.0,)) == found.rings_alone[1:]  # both cross the one cable
    assert found.beside_rings == pytest.approx((2.0,)) and found.exchanges == (1.0,)
    costs = _costs(*ONE_CABLE, **keys)
    (stage,) = costs.stages[:1]
    job = FabricJob(costs, rank_mapping(costs, Routes(fabric_of(costs.cluster)), range(4)))
    num_bytes = max(_sent(job.phases, "expert-forward").values()) + max(
        _sent(job.phases, "expert-backward").values()
    )
    seconds = num_bytes / (costs.cluster.link("network").bytes_per_second)
    computing = sum(one.forward + one.backward for one in costs.stages) * costs.workload.num_micro_batches
    share = job.traffic.hidden_rings[0] * seconds / computing
    assert 0 < share < 1 and stage.gather > 0
    assert found.data == pytest.approx((1 / (1 - share + share / 2),))
    assert found.expert_data == pytest.approx((1 / ((1 - share) / 2 + share / 2),))


def test_slower_exchanges_lengthen_the_compute_that_they_are_in() -> None:
    costs = _costs(dp=16, ep=16, zero=1)
    slowdown = TransferSlowdown((1.0,), (1.0,), {}, (1.0,), (3.0,), (3.0,))
    found = FabricCosts(costs.workload, costs.cluster, slowdown)
    assert simulate(found).seconds == simulate(costs.with_slower_exchanges(3.0)).seconds
    assert simulate(found).seconds > simulate(costs).seconds


@pytest.mark.parametrize(
    "keys", [{"dp": 16, "ep": 16, "zero": 1}, {"dp": 8, "pp": 2, "ep": 8, "zero": 2}], ids=str
)
def test_what_meets_a_ring_costs_its_share_in_both_simulators(keys: dict[str, Any]) -> None:
    costs, pp = _costs(**keys), keys.get("pp", 1)
    same = (1.0,) * pp
    plain, met = (
        FabricCosts(costs.workload, costs.cluster, TransferSlowdown(same, same, {}, same, same, beside))
        for beside in (same, (4.0,) * pp)
    )
    assert simulate(plain).seconds == simulate(costs).seconds
    quick = SimulationCache()._simulated(met, costs.workload.num_micro_batches)
    assert quick == pytest.approx(simulate(met).seconds, rel=1e-12)
    # At most all gathers and reductions of a rank are behind compute, which is then that much slower.
    slow = costs.with_slower_exchanges(4.0)
    ratio = max(b.forward / a.forward - 1 for a, b in zip(costs.stages, slow.stages, strict=True))
    back = max(b.backward / a.backward - 1 for a, b in zip(costs.stages, slow.stages, strict=True))
    travelling = sum(one.gather + one.reduce for one in costs.stages)
    lost = simulate(met).seconds - simulate(costs).seconds
    assert 0 < lost <= max(ratio, back) * travelling * 1.5
    waits = OverlapConfig(data=False, optimizer=False)
    alone = _costs(overlap=waits, **keys)
    behind_nothing = FabricCosts(alone.workload, alone.cluster, met.slowdown)
    assert simulate(behind_nothing).seconds == pytest.approx(simulate(alone).seconds)


def test_a_step_loses_what_the_hashes_of_its_exchanges_cost() -> None:
    split = ("fabric={nodes_per_switch=2}", "nics_per_node=4", "accelerators_per_node=4")
    costs = _costs(*split, nodes=8, dp=32, ep=32, zero=1)
    routes = Routes(fabric_of(costs.cluster))
    job = FabricJob(costs, rank_mapping(costs, routes, range(8)))
    judge = SimulationCache().seconds

    def mean(**how: Any) -> float:
        return float(np.mean(JobExposure(routes, [job], **how).seconds(judge, range(4))))

    assert mean() > mean(queue_pairs=16) >= mean(routing="adaptive") >= judge(costs)


# Placement.

SPINE = (
    "nodes_per_switch=2",
    "links.spine={bytes_per_second=5e9, latency_seconds=1e-5}",
    "accelerators_per_node=4",
)


def test_nodes_that_share_experts_are_put_under_one_switch() -> None:
    costs = _costs(*SPINE, dp=16, ep=8, zero=1)
    traffic = traffic_of(costs)
    assert (traffic.replicas, traffic.parts, traffic.sharers) == (4, 1, 2)
    tokens = BATCH / 16 / 2 * MODEL.sequence  # of a micro-batch: one sequence
    assert tokens == MODEL.sequence
    assert traffic.exchange_bytes == pytest.approx((5 * 4 * tokens * 2 * MODEL.hidden * 2 / 2,))
    mixed = [0, 2, 1, 3]
    found = place_nodes(costs.cluster, traffic, None, mixed)
    assert [mixed[slot] for slot in found.order] in ([0, 1, 2, 3], [2, 3, 0, 1])
    assert found.seconds < found.plain_seconds


def test_the_time_of_an_order_has_the_exchanges_of_its_groups() -> None:
    """Four replicas in two groups; node 3 has half the rate, which counts for the group that it is in."""
    traffic = SlotTraffic(
        replicas=4, parts=1, compute_seconds=(0.1,), ring_bytes=(0.0,), messages=(), num_micro_batches=4,
        sharers=2, exchange_seconds=(0.03,), exchange_bytes=(1e8,),
    )  # fmt: skip
    cluster = load_cluster(
        "megascale-256xa100", ["nodes=4", "unequal=[{nodes=[3], bytes_per_second=12.5e9}]"]
    )
    usual = cluster.link("network").bytes_per_second
    fabric = PlacementCost(cluster, traffic, {})
    times = fabric._times(np.array([[0, 1, 2, 3]]))[0][0]
    slower = 0.1 + 0.03 * (usual / 12.5e9 - 1)
    assert times == pytest.approx([0.4, 0.4, 4 * slower, 4 * slower])


@pytest.mark.parametrize("sharers", [2, 3, 6])
def test_shares_elsewhere_are_those_of_a_count(sharers: int) -> None:
    switch = np.random.default_rng(1).integers(0, 3, (4, 6, 2, 1))
    found = shares_elsewhere(switch, sharers)
    for k, r, p, w in np.ndindex(switch.shape):
        first = r // sharers * sharers
        others = [one for one in range(first, first + sharers) if one != r]
        away = sum(switch[k, one, p, w] != switch[k, r, p, w] for one in others)
        assert found[k, r, p, w] == pytest.approx(away / len(others))
