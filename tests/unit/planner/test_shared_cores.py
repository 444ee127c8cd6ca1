"""What breaks for the user: a rehearsal on few cores predicted as if each rank had one, or none."""

import pytest

from myriad.comm.layout import Layout
from myriad.model.config import ModelConfig
from myriad.planner.cluster_config import Accelerator, Cluster, Link, Links
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.cost.stage_layers import layer_parameters
from myriad.planner.rehearsal.shared_core_simulator import predict_iteration
from myriad.planner.workload import Workload
from myriad.program.config import OverlapConfig

MODEL = ModelConfig(layers=6, hidden=256, heads=4, sequence=256, vocabulary=1024)
LAYOUTS = [
    Layout(dp=4),
    Layout(dp=2, zero=2),
    Layout(dp=2, zero=3, micro_batch=2),
    Layout(pp=4),
    Layout(pp=2, virtual_stages=2),
    Layout(pp=2, schedule="zero-bubble"),
    Layout(dp=2, pp=2, zero=1),
    Layout(tp=2, pp=2),
    Layout(dp=2, tp=2, pp=2, zero=2),
]


def make_cluster(world, shared_cores=None, latency=1e-9, rate=1e15, busy=0.0, turns=0.0):
    core = Accelerator(
        name="CPU core",
        peak_flops_per_second=1e11,
        memory_bytes=2**33,
        memory_bytes_per_second=1e10,
        num_units=1,
        tile=1,
    )
    link = Link(bytes_per_second=rate, latency_seconds=latency, launch_seconds=latency, busy_ratio=busy)
    return Cluster(
        name="rehearsal",
        nodes=1,
        accelerators_per_node=world,
        accelerator=core,
        links=Links(node=link),
        shared_cores=shared_cores,
        turns_ratio=turns,
    )


def seconds(layout, **cluster):
    workload = Workload(MODEL, layout, 16, OverlapConfig(tensor=False), value_bytes=4)
    return predict_iteration(Costs(workload, make_cluster(layout.world, **cluster)), spans=False).seconds


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_core_each_is_what_accelerators_of_their_own_are(layout):
    assert seconds(layout, shared_cores=layout.world) == pytest.approx(seconds(layout), rel=1e-3)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_one_core_for_all_takes_as_long_as_all_their_work(layout):
    workload = Workload(MODEL, layout, 16, OverlapConfig(tensor=False), value_bytes=4)
    prediction = predict_iteration(Costs(workload, make_cluster(layout.world, shared_cores=1)))
    computing = sum(span.duration - span.waited for span in prediction.spans)
    alone = seconds(layout)
    assert prediction.seconds <= alone * layout.world * 1.001
    assert prediction.seconds >= alone * 0.999
    assert computing * layout.tp >= prediction.seconds * 0.9


def test_ranks_that_take_turns_hide_each_others_waiting():
    slow = {"latency": 0.02, "rate": 1e9}
    alone = seconds(Layout(pp=4), **slow)
    assert seconds(Layout(pp=4), shared_cores=2, **slow) < 2 * alone


def test_what_transfers_take_of_a_core_is_missed_by_compute():
    free = seconds(Layout(dp=2, zero=2), shared_cores=2, rate=1e8)
    assert seconds(Layout(dp=2, zero=2), shared_cores=2, rate=1e8, busy=0.5) > free


@pytest.mark.parametrize("dp", [2, 4])
def test_a_core_that_is_full_does_the_work_of_compute_and_of_transfers(dp):
    """Else hiding would seem to be free."""
    layout, rate, num_bytes = Layout(dp=dp, zero=1), 5e7, 4 * sum(layer_parameters(MODEL))
    compute = seconds(layout, shared_cores=1)
    full = seconds(layout, shared_cores=1, rate=rate, busy=1.0)
    gather_and_sum = 2 * num_bytes * (dp - 1) / dp / (0.79 * rate)
    assert full == pytest.approx(compute + dp * gather_and_sum, rel=0.05)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_iteration_of_days_is_predicted_too(layout):
    """Rounding of its clock must not leave a rest that never ends."""
    core = make_cluster(layout.world, shared_cores=2, rate=1e3, busy=0.7)
    slow = core.accelerator.model_copy(update={"peak_flops_per_second": 1e5, "memory_bytes_per_second": 1e5})
    workload = Workload(MODEL, layout, 16, OverlapConfig(tensor=False), value_bytes=4)
    costs = Costs(workload, core.model_copy(update={"accelerator": slow}))
    assert predict_iteration(costs, spans=False).seconds > 86_400


def test_ranks_on_a_core_are_slower_for_each_doubling():
    layout, four = Layout(pp=4), seconds(Layout(pp=4), shared_cores=1)
    assert seconds(layout, shared_cores=1, turns=0.05) == pytest.approx(1.1 * four, rel=1e-3)
    assert seconds(layout, shared_cores=4, turns=0.05) == pytest.approx(seconds(layout), rel=1e-3)
