"""What ZeRO 3 costs when parameters are gathered module by module, what TCP sockets carry, where replicas
lie."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myriad.comm.layout import Layout
from myriad.errors import BadInputError
from myriad.job import load_job, load_job_to_plan
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.cost.module_gathers import Module, ModuleGathers, module_order, step_seconds
from myriad.planner.frameworks import Framework
from myriad.planner.simulation.simulation_cache import SimulationCache
from myriad.planner.validation.published_systems import (
    DEEPSPEED_0_4_2,
    MEGATRON_2_4,
    MEGATRON_2021,
)
from myriad.planner.workload import Workload
from myriad.recipes.cluster import load_cluster

ONE_AHEAD = ModuleGathers(
    prefetch_elements=1.0, reuse_elements=0.0, persistent_elements=1.0, bucket_elements=1.0
)


def module(forward: float, gather: float, elements: float = 10.0, reduce: float = 0.0) -> Module:
    return Module("linear", elements, forward, 2 * forward, gather, reduce)


def in_layers(count: int, each: int = 1) -> list[range]:
    return [range(first, first + each) for first in range(0, count, each)]


seconds = st.floats(0.0, 5.0)
lists = st.lists(st.tuples(seconds, seconds, st.floats(1.0, 50.0), seconds), min_size=2, max_size=8)
keys_of = st.builds(
    ModuleGathers,
    prefetch_elements=st.floats(0.0, 200.0),
    live_elements=st.floats(0.0, 200.0),
    reuse_elements=st.floats(0.0, 200.0),
    persistent_elements=st.floats(0.0, 20.0),
    bucket_elements=st.floats(0.0, 200.0),
)


@given(lists, keys_of, st.booleans())
def test_a_step_takes_its_compute_at_least_and_all_that_it_does_one_after_the_other_at_most(
    rows, keys, again
):
    modules = [Module("m", size, f, 2 * f, g, r) for f, g, size, r in rows]
    order = module_order(in_layers(len(modules)), again)
    forward, backward = step_seconds(modules, order, keys, 0.0)
    compute = sum(
        (3 + (again and 0 < i < len(modules) - 1)) * one.forward_seconds for i, one in enumerate(modules)
    )
    gathers = sum(modules[use.module].gather_seconds for use in order)
    reduces = sum(one.reduce_seconds for one in modules)
    assert compute - 1e-9 <= forward + backward <= compute + 2 * gathers + reduces + 1e-9
    assert forward + backward >= reduces - 1e-9


def test_each_gather_travels_behind_the_compute_of_one_module_and_no_more():
    modules = [module(forward=f, gather=3.0) for f in (1.0, 5.0, 1.0, 1.0)]
    forward, _ = step_seconds(modules, module_order(in_layers(4), False), ONE_AHEAD, 0.0)
    # the first gather; then the longer of each module's compute and the next one's gather; then the last
    # compute
    assert forward == pytest.approx(3.0 + 3.0 + 5.0 + 3.0 + 1.0)


def test_of_a_large_prefetch_all_but_the_last_gather_are_waited_for():
    modules = [module(forward=2.0, gather=2.0) for _ in range(6)]
    order = module_order(in_layers(6), False)
    ahead, _ = step_seconds(modules, order, ONE_AHEAD, 0.0)
    everything, _ = step_seconds(modules, order, replace(ONE_AHEAD, prefetch_elements=1e9), 0.0)
    assert ahead == pytest.approx(14.0)
    assert everything == pytest.approx(
        6 * 2.0 + 5 * 2.0
    )  # five gathers in a row, then computes behind the sixth


def test_small_parameters_stay_and_recomputed_layers_are_gathered_once_for_their_backward():
    small = [module(forward=1.0, gather=7.0, elements=0.5) for _ in range(3)]
    assert sum(step_seconds(small, module_order(in_layers(3), False), ONE_AHEAD, 0.0)) == pytest.approx(9.0)
    modules = [module(forward=0.0, gather=1.0) for _ in range(6)]
    order = module_order(in_layers(6, 2), recompute=True)
    within = replace(
        ONE_AHEAD, reuse_elements=35.0, prefetch_elements=0.0
    )  # of the layer that is computed again
    assert sum(step_seconds(modules, order, within, 0.0)) < sum(step_seconds(modules, order, ONE_AHEAD, 0.0))


def test_reductions_delay_the_next_gather_and_slow_the_compute_they_travel_behind():
    quick = [module(forward=1.0, gather=1.0) for _ in range(4)]
    slow = [replace(one, reduce_seconds=10.0) for one in quick]
    order = module_order(in_layers(4), False)
    assert step_seconds(slow, order, ONE_AHEAD, 0.0)[1] >= 40.0
    assert sum(step_seconds(quick, order, ONE_AHEAD, 0.5)) > sum(step_seconds(quick, order, ONE_AHEAD, 0.0))


def predicted(
    system: Framework, changes: tuple[str, ...], cluster: str = "vegiant-32xa100-800g", **layout: object
) -> float:
    job = load_job_to_plan("gpt-13b")
    workload = Workload(job.model, Layout(**layout), 1536, overlap=system.overlap, profile=system.profile)
    return SimulationCache().seconds(Costs(workload, load_cluster(cluster, changes)))


def test_zero_3_loses_more_by_tcp_the_more_often_it_gathers_and_a_pipeline_hardly_anything():
    tcp = ("nics.transport=tcp",)

    def loss(system: Framework, **layout: object) -> float:
        return predicted(system, tcp, **layout) / predicted(system, (), **layout)

    zero = {"dp": 32, "zero": 3, "recompute": "full", "reduce": "each"}
    once, often = (loss(DEEPSPEED_0_4_2, micro_batch=size, **zero) for size in (48, 4))
    assert often > 2 * once > 2
    assert 1.0 < loss(MEGATRON_2_4, dp=2, tp=4, pp=4, micro_batch=16) < 1.1


def test_replicas_of_megatron_lie_in_one_machine():
    grid = {"dp": 2, "tp": 4, "pp": 4, "micro_batch": 16}
    assert predicted(MEGATRON_2_4, (), **grid) < predicted(MEGATRON_2021, (), **grid)


def test_sockets_carry_what_they_were_measured_to_carry():
    plain, tcp = (load_cluster("vegiant-32xa100-800g", change) for change in ([], ["nics.transport=tcp"]))
    one = load_cluster("vegiant-32xa100-800g", ["nics.transport=tcp", "nics.socket_ports=1"])

    def machine(cluster):
        return 8 * cluster.link("network").bytes_per_second * cluster.ratio("network")

    assert [machine(each) for each in (plain, tcp, one)] == pytest.approx([90e9, 20e9, 5e9])
    assert tcp.link("network").latency_seconds == 40e-6 and tcp.link("node") == plain.link("node")
    slow = load_cluster("vegiant-32xv100-100g", ["nics.transport=tcp", "links.network=10Gbps"])
    assert machine(slow) == pytest.approx(0.9 * 1.25e9)  # a line that sockets can fill
    with pytest.raises(BadInputError, match="socket_ports"):
        load_cluster("vegiant-32xa100-800g", ["nics.transport=tcp", "nics.socket_ports=0"])


def test_gloo_is_as_it_was_measured_whatever_the_transport_is_called():
    changes = ["nics.transport=tcp", "links.network={bytes_per_second=25e9, latency_seconds=1e-6}"]
    laptop = load_cluster("laptop", changes)
    assert laptop.on_cpu and laptop.ratio("network") == load_cluster("laptop", changes[1:]).ratio("network")


@pytest.mark.parametrize(
    ("name", "accelerator", "gigabytes", "machine_bytes_per_second"),
    [("vegiant-32xv100-100g", "V100", 32, 12.5e9), ("vegiant-32xa100-800g", "A100", 40, 100e9)],
)
def test_the_recipes_are_the_machines_that_vegiantmodels_article_names(
    name, accelerator, gigabytes, machine_bytes_per_second
):
    cluster, layout = load_cluster(name), load_job("gpt-13b").layout
    assert accelerator in cluster.accelerator.name
    assert cluster.accelerator.memory_bytes == gigabytes * 2**30
    assert cluster.links.network.bytes_per_second * 8 == machine_bytes_per_second
    assert (layout.dp, layout.tp, layout.pp) == (2, 4, 4) and cluster.world == layout.world
