"""If these fail, float8 and NVFP4 of other frameworks are converted and sent more often than they are."""

from dataclasses import replace
from functools import partial

import pytest

from myriad.model.config import ModelConfig
from myriad.planner.cluster_config import Cluster
from myriad.planner.cost.layer_costs import LayerTimes, block_times
from myriad.planner.cost.product_costs import LayerContext
from myriad.planner.cost.quantization_costs import (
    Gathered,
    Quantization,
    QuantizationLibrary,
    library_traffic,
)
from myriad.planner.workload import FrameworkProfile
from myriad.program.config import OverlapConfig
from myriad.recipes.cluster import load_cluster
from myriad.recipes.framework import load_framework

MODEL = ModelConfig(layers=4, hidden=8192, heads=64, sequence=8192, vocabulary=32000)
HOPPER, BLACKWELL = load_cluster("one-node-8xh100"), load_cluster("gb200-576xgb200")
X, GRAD, WEIGHT = 1e6, 2e6, 4e6


def times(cluster: Cluster, tp: float = 8.0, **changed: object) -> LayerTimes:
    profile = replace(load_framework("megatron-core").profile, quantization="tensor")
    profile = replace(profile, **changed)  # type: ignore[arg-type]
    return block_times(MODEL, LayerContext(cluster, profile, tp, 1.0, 2, OverlapConfig(), 0.0), 1e7)


@pytest.mark.parametrize(
    ("quantization", "known", "any_order", "gathers", "expected"),
    [
        # Two bytes are read, twice if the largest value is searched, and one is written for each form.
        ("tensor", False, False, None, (6 * X + 6 * WEIGHT, 6 * GRAD, 0.0)),
        ("tensor", True, False, None, (4 * X + 4 * WEIGHT, 4 * GRAD, 0.0)),
        ("tensor", True, True, None, (3 * X + 3 * WEIGHT, 3 * GRAD, 0.0)),
        # A norm writes float8; what was gathered is transposed for the weight's gradient.
        ("tensor", True, False, "x", (4 * WEIGHT, 4 * GRAD, 2 * X)),
        ("tensor", False, False, "x", (5 * X / 4 + 6 * WEIGHT, 6 * GRAD, 2 * X)),
        ("tensor", True, False, "grad", (4 * X + 4 * WEIGHT, (3 / 4 + 2) * GRAD, 0.0)),
        ("tensor", True, True, "grad", (3 * X + 3 * WEIGHT, 3 / 4 * GRAD, 0.0)),
        # Scales of 32 neighbours take a 32nd of a byte a value, and both forms are written.
        ("blocks", True, True, "x", (4.0625 * (X / 4 + WEIGHT), 4.0625 * GRAD, 0.0)),
        # NVFP4: the largest values are searched; each form has half a byte and a 16th of a scale's byte.
        ("nvfp4", False, True, None, (5.125 * (X + WEIGHT), 5.125 * GRAD, 0.0)),
        ("nvfp4", True, True, "grad", (5.125 * (X + WEIGHT), 5.125 / 4 * GRAD, 0.0)),
    ],
)
def test_a_library_converts_each_matrix_once(
    quantization: Quantization,
    known: bool,
    any_order: bool,
    gathers: Gathered | None,
    expected: tuple[float, float, float],
) -> None:
    library = QuantizationLibrary(quantization, 2, known, any_order, 4.0)
    found = library_traffic(library, X, GRAD, WEIGHT, 0.0, 1, gathers)
    assert [float(one.num_bytes) for one in found] == pytest.approx(expected)
    kept = library_traffic(library, X, GRAD, WEIGHT, 10.0, 2, gathers)
    assert found[0].num_bytes - kept[0].num_bytes == pytest.approx(
        library.converted(WEIGHT, library.num_forms).num_bytes / 2
    )
    assert kept[2].num_bytes - found[2].num_bytes == pytest.approx(10 * WEIGHT)


def test_gathers_in_float8_send_half_and_reductions_the_same() -> None:
    half, whole = times(HOPPER), times(HOPPER, gathers_quantized=False)
    for name in ("forward", "backward_input"):
        found, before = (getattr(one, name).tensor for one in (half, whole))
        assert 0.7 * before < found < 0.82 * before


def test_blocks_are_gathered_in_float8_on_blackwell_alone() -> None:
    for cluster, is_less in ((HOPPER, False), (BLACKWELL, True)):
        half, whole = (times(cluster, quantization="blocks", gathers_quantized=one) for one in (True, False))
        assert (half.forward.tensor < 0.9 * whole.forward.tensor) == is_less
        assert half.backward_input.tensor == pytest.approx(whole.backward_input.tensor, rel=0.1)


def test_without_float8_nothing_changes() -> None:
    sets = {"gathers_quantized": False, "keeps_quantized_inputs": False, "knows_float8_scales": False}
    plain = times(HOPPER, quantization=None)
    assert plain == times(HOPPER, quantization=None, **sets, adds_float8_apart=True)
    assert not FrameworkProfile().gathers_quantized, "Myriad gathers in the compute type"


@pytest.mark.parametrize("cluster", [HOPPER, BLACKWELL], ids=["H100", "GB200"])
def test_products_in_float8_reach_the_share_that_was_measured(cluster: Cluster) -> None:
    measured = cluster.accelerator.float8_achievable_ratio
    assert measured is not None and measured < cluster.accelerator.achievable_ratio
    quick = cluster.model_copy(
        update={"accelerator": cluster.accelerator.model_copy(update={"float8_achievable_ratio": None})}
    )
    assert times(cluster).forward.matmul > times(quick).forward.matmul
    assert times(cluster, quantization=None) == times(quick, quantization=None)


def test_nvfp4_is_faster_than_float8_where_the_accelerator_has_it() -> None:
    on_blackwell = partial(times, BLACKWELL)
    fours, eights = (on_blackwell(quantization=one) for one in ("nvfp4", "blocks"))
    for name in ("forward", "backward_input", "backward_weight"):
        assert 0.5 < getattr(fours, name).matmul / getattr(eights, name).matmul < 0.75, name
    on_hopper = times(HOPPER, quantization="nvfp4").forward.matmul
    assert on_hopper == times(HOPPER, quantization=None).forward.matmul, "no such instructions"


def test_gathers_in_nvfp4_send_nine_sixteenths_of_a_byte_a_value() -> None:
    fours, eights = (times(BLACKWELL, quantization=one).forward.tensor for one in ("nvfp4", "blocks"))
    whole = times(BLACKWELL, quantization=None).forward.tensor
    assert (whole - fours) / (whole - eights) == pytest.approx((2 - 9 / 16) / (2 - 1), rel=0.05)


def test_each_generation_has_the_rate_of_its_own_attention() -> None:
    """cuDNN's attention is three times as fast as FlashAttention-2 on Blackwell, and 1.6 times on H100, where
    FlashAttention-2 reaches 335 TFLOP/s (arXiv 2307.08691, section 4.1)."""
    for cluster, factor in ((HOPPER, 0.532 / 0.339), (BLACKWELL, 0.55 / 0.155)):
        own, second = (times(cluster, attention=one).forward.attention for one in ("flash3", "flash2"))
        assert second == pytest.approx(factor * own, rel=0.01)
