"""If these fail, what only other frameworks do changes Myriad's predictions, or does not change theirs."""

from dataclasses import replace

import pytest

from myriad.comm.layout import Layout
from myriad.errors import BadInputError
from myriad.model.config import ModelConfig
from myriad.planner import Cluster, Costs, FrameworkProfile, SimulationCache, Workload
from myriad.planner.cost.collective_costs import all_reduce_seconds, group_along
from myriad.planner.cost.expert_ranks import ExpertGrid
from myriad.planner.frameworks import read_framework
from myriad.recipes.cluster import load_cluster, scale_cluster

MODEL = ModelConfig(layers=4, hidden=1024, heads=8, sequence=1024, vocabulary=32000, activation="swiglu")
MOE = MODEL.model_copy(update={"experts": 16, "experts_per_token": 4, "expert_hidden": 512})


def cluster(gpus: int) -> Cluster:
    return scale_cluster(load_cluster("eos-3072xh100"), gpus)


def seconds(layout: Layout, on: Cluster, model: ModelConfig = MODEL, **profile: object) -> float:
    own = replace(FrameworkProfile(), **profile)  # type: ignore[arg-type]
    return SimulationCache().seconds(Costs(Workload(model, layout, 64, profile=own), on))


def test_gradients_that_are_added_apart_take_longer() -> None:
    layout, on = Layout(dp=8), cluster(8)
    assert seconds(layout, on, adds_gradients_apart=True) > seconds(layout, on)


def test_recomputation_that_keeps_some_products_is_shorter() -> None:
    layout, on = Layout(dp=8, recompute="full"), cluster(8)
    none = seconds(Layout(dp=8), on)
    half, full = (seconds(layout, on, recomputed_ratio=ratio) for ratio in (0.5, 1.0))
    assert half - none == pytest.approx((full - none) / 2, rel=0.1)


def test_broadcasts_cost_each_rank_of_the_group() -> None:
    layout, on = Layout(dp=64, zero=1), cluster(64)
    added = seconds(layout, on, broadcast_seconds=1e-3) - seconds(layout, on)
    assert added == pytest.approx(63e-3, rel=0.15)
    without = Layout(dp=64, zero=0)
    assert seconds(without, on, broadcast_seconds=1e-3) == seconds(without, on)


def test_a_host_s_seconds_count_only_where_the_device_waits_for_them() -> None:
    layout, on = Layout(tp=8), cluster(8)
    assert seconds(layout, on, host_block_seconds=1e-5) == seconds(layout, on)
    floor = 64 * MODEL.layers * 0.05
    assert seconds(layout, on, host_block_seconds=0.05) == pytest.approx(floor, rel=0.1)
    assert seconds(layout, on, host_peer_seconds=0.05) == seconds(layout, on)
    several = 64 / 2 * MODEL.layers * 8 * 0.05
    assert seconds(Layout(tp=8, dp=2), cluster(16), host_peer_seconds=0.05) == pytest.approx(several, rel=0.1)


def test_a_host_s_steps_of_rings_slow_data_parallelism() -> None:
    on = cluster(64)
    network = on.links.network
    assert network is not None
    slow = network.model_copy(update={"host_step_seconds": 3e-4})
    stepped = on.model_copy(update={"links": on.links.model_copy(update={"network": slow})})
    layout = Layout(dp=64, zero=1)
    assert seconds(layout, stepped) > seconds(layout, on) + 63 * 3e-4
    inside = Layout(tp=8, zero=1)
    one = stepped.model_copy(update={"nodes": 1})
    assert seconds(inside, one) == seconds(inside, on.model_copy(update={"nodes": 1}))


def test_without_trees_an_all_reduce_takes_a_step_for_each_rank() -> None:
    on = cluster(512)
    network = on.links.network
    assert network is not None
    rings = on.links.model_copy(update={"network": network.model_copy(update={"has_trees": False})})
    fast, slow = (
        float(all_reduce_seconds(group_along(one, 64.0, 8.0), 1e3))
        for one in (on, on.model_copy(update={"links": rings}))
    )
    assert slow - fast > (2 * 63 - 2 * 6 - 1) * network.latency_seconds


def test_hidden_exchanges_of_experts_are_shorter_and_never_free() -> None:
    layout, on = Layout(dp=16, ep=16), cluster(16)
    profile = FrameworkProfile(hides_expert_comm=True)
    parts, _ = Costs(Workload(MOE, layout, 64, profile=profile), on).busiest_rank
    assert float(parts.experts) > 0
    hidden, waited = (seconds(layout, on, model=MOE, hides_expert_comm=hides) for hides in (True, False))
    assert hidden < waited


def test_a_router_s_groups_bound_the_nodes_that_a_token_travels_to() -> None:
    grid = ExpertGrid(dp=64, ep=64, dispatch="node")
    (_, free), _ = grid.hops(256, 8, 8)
    (_, bound), _ = grid.hops(256, 8, 8, most_nodes=4)
    assert bound == 4.0 < free


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"title": "x", "profile": {"attention": {"value": "flash9", "source": "docs"}}}, "attention"),
        ({"title": "x", "profile": {"attention": {"value": "flash"}}}, "source"),
        ({"title": "x", "profile": {"speed": {"value": 1, "source": "docs"}}}, "one of"),
        ({"title": "x", "layout": {"zero": {"value": 4, "source": "docs"}}}, "zero"),
        ({"title": "x", "extends": "x"}, "in a row"),
    ],
)
def test_a_framework_file_s_error_names_its_key(tree: dict[str, object], said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        read_framework("x", lambda _: tree)
