"""If these fail, `--fabric` predicts delays that no switch causes, or of none where flows share a cable."""

from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import MODEL

from myriad.comm.layout import Layout
from myriad.network.routing import Routes
from myriad.planner.cluster_config import Cluster
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.fabric.cluster_fabric import fabric_of
from myriad.planner.fabric.fabric_costs import TransferSlowdown
from myriad.planner.fabric.fabric_placement import JobsOnFabric, num_slots, optimised_order, rank_mapping
from myriad.planner.fabric.job_exposure import FabricJob, JobExposure, fabric_costs
from myriad.planner.simulation.simulation_cache import SimulationCache
from myriad.planner.simulation.simulator import simulate
from myriad.planner.workload import Workload
from myriad.program.config import OverlapConfig
from myriad.recipes.cluster import load_cluster

RING = Layout(dp=4, zero=2)
ONE_CABLE = (
    'fabric={kind="graph", cables=[{ends=["0-1", "a"]}, {ends=["2-3", "b"]}, {ends=["a", "b"]}]}',
    "accelerators_per_node=1",
    "nics_per_node=1",
)
SPLIT = ("fabric={nodes_per_switch=2}", "nics_per_node=4", "accelerators_per_node=4")


def _cluster(nodes: int, *changes: str) -> Cluster:
    return load_cluster("megascale-256xa100", [f"nodes={nodes}", *changes])


@lru_cache(maxsize=32)
def _job(layout: Layout, nodes: int, *changes: str, overlapped: bool = True) -> tuple[Costs, Routes]:
    cluster = _cluster(nodes, *changes)
    overlap = OverlapConfig(data=overlapped, pipeline=overlapped)
    return Costs(Workload(MODEL, layout, 32, overlap=overlap), cluster), Routes(fabric_of(cluster))


def _stretch(layout: Layout, nodes: list[int], *changes: str) -> TransferSlowdown:
    costs, routes = _job(layout, len(nodes), *changes)
    return JobExposure(routes, [FabricJob(costs, rank_mapping(costs, routes, nodes))]).draw(0).slowdowns[0]


def test_a_ring_waits_for_the_cable_that_its_steps_share() -> None:
    """0-1 and 2-3 on a switch each, one cable between: in order the ring crosses it once each way."""
    assert _stretch(RING, [0, 1, 2, 3], *ONE_CABLE).data == (1.0,)
    assert _stretch(RING, [0, 2, 1, 3], *ONE_CABLE).data == pytest.approx((2.0,))


def test_messages_wait_for_the_cable_that_replicas_share() -> None:
    pipelines = Layout(dp=2, pp=2)
    assert set(_stretch(pipelines, [0, 1, 2, 3], *ONE_CABLE).messages.values()) == {1.0}
    crossing = _stretch(pipelines, [0, 2, 1, 3], *ONE_CABLE).messages
    assert crossing == {(0, 1): pytest.approx(2.0), (1, 0): pytest.approx(2.0)}


def test_tensor_rings_that_leave_a_node_wait_too() -> None:
    assert _stretch(Layout(tp=4), [0, 2, 1, 3], *ONE_CABLE).tensor == pytest.approx((2.0,))
    costs, routes = _job(Layout(tp=4), 4, *ONE_CABLE)
    slow = TransferSlowdown(data=(1.0,), tensor=(2.0,), messages={})
    job = FabricJob(costs, rank_mapping(costs, routes, range(4)))
    assert simulate(fabric_costs(job, slow)).seconds > simulate(costs).seconds


@pytest.mark.parametrize("layout", [RING, Layout(dp=2, pp=2), Layout(tp=2, dp=2, zero=3)])
def test_without_stretch_the_prediction_is_the_plain_one(layout: Layout) -> None:
    costs, routes = _job(layout, 4, *ONE_CABLE)
    job = FabricJob(costs, rank_mapping(costs, routes, range(num_slots(costs))))
    none = TransferSlowdown((1.0,) * layout.pp, (1.0,) * layout.pp, {})
    assert simulate(fabric_costs(job, none)).seconds == simulate(costs).seconds
    assert SimulationCache().seconds(fabric_costs(job, none)) == SimulationCache().seconds(costs)


def test_a_stretched_collective_takes_as_much_longer_as_its_bytes() -> None:
    costs, routes = _job(RING, 4, *ONE_CABLE)
    job = FabricJob(costs, rank_mapping(costs, routes, range(4)))
    slow = fabric_costs(job, TransferSlowdown((3.0,), (1.0,), {}))
    begun = float(costs.dp_collectives.all_gather_seconds(0.0))
    for plain, stretched in zip(costs.stages, slow.stages, strict=True):
        assert stretched.reduce - begun == pytest.approx(3 * (plain.reduce - begun))
        assert stretched.gather - begun == pytest.approx(3 * (plain.gather - begun))
        assert stretched.forward == plain.forward


def test_the_two_simulators_agree_on_channels_that_differ() -> None:
    layout = Layout(dp=1, pp=4, virtual_stages=2)
    costs, routes = _job(layout, 4, *ONE_CABLE)
    messages = {(a, b): 1.0 + 50 * a + b for a in range(4) for b in range(4) if a != b}
    job = FabricJob(costs, rank_mapping(costs, routes, range(4)))
    slow = fabric_costs(job, TransferSlowdown((1.0,) * 4, (1.0,) * 4, messages))
    simulated = SimulationCache()._simulated(slow, costs.workload.num_micro_batches)
    assert simulated == pytest.approx(simulate(slow).seconds, rel=1e-12)
    assert simulated > simulate(costs).seconds


def test_more_queue_pairs_and_adaptive_switches_even_out() -> None:
    costs, routes = _job(Layout(dp=32, zero=2), 8, *SPLIT)
    nodes = [0, 2, 4, 6, 1, 3, 5, 7]
    job = FabricJob(costs, rank_mapping(costs, routes, nodes))

    def mean(**how: object) -> float:
        exposure = JobExposure(routes, [job], **how)  # type: ignore[arg-type]
        return float(np.mean([draw.slowdowns[0].slowest_ring for draw in exposure.draws(range(16))]))

    plain = mean()
    assert plain > 1.2
    assert 1.0 <= mean(queue_pairs=16) < plain
    assert mean(routing="adaptive") == pytest.approx(1.0)


@given(st.permutations(range(8)), st.integers(0, 1000))
@settings(max_examples=15, deadline=None)
def test_nothing_is_quicker_than_its_ports(order: list[int], seed: int) -> None:
    costs, routes = _job(Layout(dp=4, tp=4, pp=2, zero=2), 8, *SPLIT)
    exposure = JobExposure(routes, [FabricJob(costs, rank_mapping(costs, routes, order))])
    draw = exposure.draw(seed)
    slowdown = draw.slowdowns[0]
    assert min([*slowdown.data, *slowdown.tensor, *slowdown.messages.values()]) >= 1.0
    assert exposure.simulated(SimulationCache().seconds, draw)[0] >= SimulationCache().seconds(costs) * (
        1 - 1e-9
    )
    again = JobExposure(routes, [FabricJob(costs, rank_mapping(costs, routes, order))]).draw(seed)
    assert again.slowdowns == draw.slowdowns


@given(st.permutations(range(8)))
@settings(max_examples=5, deadline=None)
def test_the_order_that_is_found_is_never_worse(nodes: list[int]) -> None:
    costs, routes = _job(Layout(dp=8, tp=2, pp=2, zero=2), 8, *SPLIT)
    judge = SimulationCache().seconds
    job = FabricJob(costs, rank_mapping(costs, routes, nodes))
    order = optimised_order(job, nodes, routes, judge)
    assert sorted(order) == list(range(8))
    means = [
        float(
            np.mean(JobExposure(routes, [job.at(rank_mapping(costs, routes, one))]).seconds(judge, range(4)))
        )
        for one in (nodes, order)
    ]
    assert means[1] <= means[0] * (1 + 1e-9)


def test_jobs_that_run_at_once_slow_each_other() -> None:
    """Two rings over two switches with one cable: alone each has it to itself."""
    pair = Layout(dp=2, zero=2)
    costs, routes = _job(pair, 4, *ONE_CABLE)
    judge = SimulationCache().seconds
    both = JobsOnFabric([costs, costs], routes, judge, nodes=[[0, 2], [1, 3]])
    numbered, found = both.evaluate(both.numbered(), [0]), both.optimised()
    assert [one.slowest_ring.tolist() for one in numbered] == [[pytest.approx(0.5)]] * 2
    assert numbered[0].seconds[0] > judge(costs)
    assert numbered[0].shared_ratio == 1.0
    free = JobsOnFabric([costs, costs], routes, judge)
    packed = free.optimised()
    assert sorted(map(sorted, packed.nodes)) == [[0, 1], [2, 3]]
    assert [one.slowest_ring.tolist() for one in free.evaluate(packed, [0])] == [[1.0]] * 2
    assert sorted(map(sorted, found.nodes)) == [[0, 2], [1, 3]]
