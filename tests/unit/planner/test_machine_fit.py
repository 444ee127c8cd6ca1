"""What breaks for the user: plans for this machine made with constants that its timings do not show."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.model.config import ModelConfig
from myriad.model.overlap_parts import num_parts
from myriad.planner.cluster_config import Accelerator, Cluster, Link, Links
from myriad.planner.cost.layer_costs import block_times
from myriad.planner.cost.operator_costs import flash_seconds, matmul_seconds
from myriad.planner.cost.product_costs import LayerContext
from myriad.planner.rehearsal.machine_fit import (
    AttentionTiming,
    LayerTiming,
    MatmulTiming,
    PrecisionTimings,
    TensorParallelTiming,
    block_seconds,
    doubling_ratio,
    fit_line,
    fit_precision,
    fit_tensor_parallel,
    head_seconds,
)
from myriad.planner.workload import FrameworkProfile
from myriad.program.config import OverlapConfig

SWEEP = 12e9
LAYERS = ((64, 64, 1), (64, 64, 8), (256, 256, 1), (256, 256, 4), (512, 512, 2))


def make_core(rate, saturation, launch, stream, flash, half, backward, loss, weights=1e18):
    return Accelerator(
        name="core",
        peak_flops_per_second=rate,
        float32_flops_per_second=rate,
        achievable_ratio=1.0,
        sustained_ratio=1.0,
        memory_bytes=2**30,
        memory_bytes_per_second=SWEEP,
        memory_ratio=1.0,
        num_units=1,
        tile=1,
        saturation=saturation,
        launch_seconds=launch,
        stream_bytes_per_second=stream,
        flash_ratio=flash,
        flash_half_length=half,
        flash_backward=backward,
        loss_bytes_per_second=loss,
        weights_bytes_per_second=weights,
    )


def timings(core, call_seconds=0.0):
    """Of a machine that does exactly what the model says."""
    bare = core.model_copy(update={"launch_seconds": 0.0, "memory_bytes_per_second": 1e18})
    shapes = [(m, n, k) for m in (64, 256, 1024) for n in (64, 256) for k in (32, 64, 256, 1024)]
    products = [
        MatmulTiming(m, n, k, float(matmul_seconds(bare, m, n, k, value_bytes=4)) + call_seconds)
        for m, n, k in shapes
    ]
    attentions = []
    for sequence in (64, 128, 256, 512):
        flops = 2.0 * 256 * sequence * (sequence + 1)
        seconds = float(flash_seconds(bare, flops, sequence, 64, 4))
        attentions.append(AttentionTiming(sequence, 64, flops, seconds, core.flash_backward * seconds))
    layers = []
    for hidden, sequence, micro_batch in LAYERS:
        model = ModelConfig(layers=1, hidden=hidden, heads=hidden // 64, sequence=sequence)
        one = LayerTiming(model, micro_batch, 1.0)
        layers.append(LayerTiming(model, micro_batch, block_seconds(one, 4, core)))
    heads = []
    for hidden, vocabulary, micro_batch in ((64, 512, 8), (256, 1024, 1), (256, 8192, 1)):
        model = ModelConfig(layers=1, hidden=hidden, heads=hidden // 64, sequence=256, vocabulary=vocabulary)
        one = LayerTiming(model, micro_batch, 1.0)
        heads.append(LayerTiming(model, micro_batch, head_seconds(one, 4, core)))
    return PrecisionTimings(4, products, attentions, layers, heads)


@settings(max_examples=25, deadline=None, derandomize=True)  # within tolerances, not exactly
@given(
    rate=st.floats(2e10, 2e12),
    saturation=st.floats(1.0, 200.0),
    launch=st.floats(5e-6, 1e-4),
    stream=st.floats(1e9, 5e10),
    flash=st.floats(0.05, 0.9),
    half=st.floats(10.0, 1000.0),
    backward=st.floats(1.0, 9.0),
    call=st.floats(0.0, 1e-5),
    loss=st.floats(1e8, 1e9),
    weights=st.floats(2e9, 1e11),
)
def test_constants_come_back_from_the_timings_that_they_give(
    rate, saturation, launch, stream, flash, half, backward, call, loss, weights
):
    core = make_core(rate, saturation, launch, stream, flash, half, backward, loss, weights)
    found = fit_precision(timings(core, call), SWEEP)
    assert found.flops_per_second == pytest.approx(rate, rel=0.05)
    assert found.saturation == pytest.approx(saturation, rel=0.2, abs=1)
    assert found.flash_ratio * found.flops_per_second == pytest.approx(flash * rate, rel=0.05)
    assert found.flash_half_length == pytest.approx(half, rel=0.05)
    assert found.flash_backward == pytest.approx(backward, rel=0.01)
    # launch, streams and weights share the products' small error: together they must say the layers' time
    again = make_core(
        found.flops_per_second,
        found.saturation,
        found.launch_seconds,
        found.stream_bytes_per_second,
        found.flash_ratio,
        found.flash_half_length,
        found.flash_backward,
        found.loss_bytes_per_second,
        found.weights_bytes_per_second,
    )
    for layer in timings(core).layers:
        assert block_seconds(layer, 4, again) == pytest.approx(layer.seconds, rel=0.05)
    for head in timings(core).heads:
        assert head_seconds(head, 4, again) == pytest.approx(head.seconds, rel=0.05)


def test_a_block_of_few_tokens_waits_for_its_weights():
    """A micro-batch of one sequence adds as many gradients to memory as one of eight."""
    core = make_core(2e11, 4.0, 3e-5, 8e9, 0.5, 200.0, 2.0, 5e8, weights=1e10)
    free = core.model_copy(update={"weights_bytes_per_second": None})
    model = ModelConfig(layers=1, hidden=256, heads=4, sequence=256)
    one, eight = (
        block_seconds(LayerTiming(model, micro_batch, 1.0), 4, core)
        - block_seconds(LayerTiming(model, micro_batch, 1.0), 4, free)
        for micro_batch in (1, 8)
    )
    assert one == pytest.approx(eight) and one == pytest.approx(12 * 256**2 * 16 / 1e10)


@given(empty=st.floats(1e-6, 1e-3), rate=st.floats(1e7, 1e11))
def test_a_line_through_sizes(empty, rate):
    sizes = [2.0**power for power in range(8, 26, 3)]
    found = fit_line(sizes, [empty + size / rate for size in sizes])
    assert found.empty_seconds == pytest.approx(empty, rel=1e-3)
    assert found.bytes_per_second == pytest.approx(rate, rel=1e-2) or empty > 1e3 * sizes[-1] / rate


def test_timings_that_fall_with_size_never_give_negative_constants():
    found = fit_line([1e3, 1e4, 1e5], [3e-3, 2e-3, 1e-3])
    assert found.empty_seconds > 0
    assert found.bytes_per_second > 0


def tensor_time(core, link, hidden, sequence, micro_batch, work_ratio=0.0):
    """What crossings add to a block, on a machine that does exactly what the model says."""
    overlap = OverlapConfig()

    def seconds(used, overlap_mode):
        cluster = Cluster(
            name="pair",
            nodes=1,
            accelerators_per_node=2,
            accelerator=core,
            links=Links(node=NODE, tensor=used),
        )
        model = ModelConfig(layers=1, hidden=hidden, heads=hidden // 64, sequence=sequence)
        where = LayerContext(cluster, FrameworkProfile(), 2.0, float(micro_batch), 4, overlap, overlap_mode)
        times = block_times(model, where, micro_batch * sequence * sequence / 2)
        parts = times.forward, times.backward_input, times.backward_weight
        return float(sum(part.total for part in parts))

    nothing = Link(
        bytes_per_second=1e18, latency_seconds=1e-12, launch_seconds=0.0, skew_seconds=0.0, busy_ratio=0.5
    )
    free = seconds(nothing, 0.0) - (8 + 2 * NODE.busy_ratio) * NODE.latency_seconds
    parts = num_parts(
        micro_batch,
        sequence / 2,
        hidden * 4,
        chunks=overlap.tensor_chunks,
        message_bytes=overlap.tensor_message,
        on_cpu=True,
    )
    num_bytes = 4.0 * micro_batch * sequence * hidden
    waited, behind = seconds(link, 0.0) - free, seconds(link, 1.0) - free
    return TensorParallelTiming(num_bytes, free, waited, float(parts), behind, work_ratio * waited)


NODE = Link(bytes_per_second=1e9, latency_seconds=5e-5, launch_seconds=0.0, skew_seconds=0.0, busy_ratio=0.5)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(launch=st.floats(1e-5, 1e-3), rate=st.floats(2e8, 2e9), busy=st.floats(0.05, 1.5))
def test_crossings_of_a_known_machine_are_found(launch, rate, busy):
    """Plans with tensor parallelism would be scored with communication that is hidden."""
    core = make_core(2e10, 10.0, 1e-5, 1e10, 0.5, 100.0, 2.0, 5e9)
    link = NODE.model_copy(update={"launch_seconds": launch, "bytes_per_second": rate, "busy_ratio": busy})
    shapes = ((128, 128, 2), (256, 256, 1), (256, 256, 4), (512, 256, 2))
    found = fit_tensor_parallel([tensor_time(core, link, *shape) for shape in shapes], NODE)
    assert found.launch_seconds == pytest.approx(launch, rel=0.1, abs=3e-5)
    assert found.bytes_per_second == pytest.approx(rate, rel=0.1)
    assert found.busy_ratio == pytest.approx(busy, rel=0.2, abs=0.1)


def test_crossings_take_of_a_core_what_they_work():
    """Ranks that share a core would be said to hide each other's crossings."""
    core = make_core(2e10, 10.0, 1e-5, 1e10, 0.5, 100.0, 2.0, 5e9)
    link = NODE.model_copy(update={"launch_seconds": 1e-4, "busy_ratio": 0.2})
    shapes = ((128, 128, 2), (256, 256, 4), (512, 256, 2))
    found = fit_tensor_parallel([tensor_time(core, link, *shape, work_ratio=0.8) for shape in shapes], NODE)
    assert found.busy_ratio == pytest.approx(0.8)


@given(doubling=st.floats(0.0, 0.3))
def test_what_a_doubling_of_ranks_on_a_core_adds_is_found(doubling):
    seconds = {1: 2e-3, 2: 2e-3 * (1 + doubling), 4: 2e-3 * (1 + 2 * doubling)}
    assert doubling_ratio(seconds) == pytest.approx(doubling)


def test_crossings_that_cost_nothing_are_no_reason_to_fail():
    times = [
        TensorParallelTiming(1e6, 1e-3, -1e-4, 2.0, -2e-4, -1e-4),
        TensorParallelTiming(4e6, 4e-3, 1e-4, 4.0, 1e-4, 0.0),
    ]
    found = fit_tensor_parallel(times, NODE)
    assert Link.model_validate(found.model_dump()) == found, "a cluster file with it could not be read"
