"""If these break: what a GPU saves where a norm makes the sum before it is not predicted, or is promised to a
CPU, which computes one after the other, or to the systems of published tables, which do too."""

import pytest

from myriad.forecasts.planned_job import framework_profile_of
from myriad.job import load_job
from myriad.model.config import ModelConfig
from myriad.planner.cluster_config import Cluster
from myriad.planner.cost.layer_costs import LayerTimes, block_times
from myriad.planner.cost.operator_costs import stream_seconds
from myriad.planner.cost.product_costs import LayerContext
from myriad.planner.validation import published_systems
from myriad.planner.workload import FrameworkProfile
from myriad.program.config import OverlapConfig
from myriad.recipes.cluster import load_cluster

MODEL = ModelConfig(layers=4, hidden=1024, heads=8, sequence=2048, vocabulary=50304)
GPUS, CORES = load_cluster("one-node-8xh100"), load_cluster("laptop")


def times(cluster: Cluster, model: ModelConfig, *, fused_add_norm: bool) -> LayerTimes:
    profile = FrameworkProfile(fused_add_norm=fused_add_norm)
    return block_times(model, LayerContext(cluster, profile, 2.0, 4.0, 2, OverlapConfig(), 0.0), 1e6)


@pytest.mark.parametrize(("block", "num_sums"), [("serial", 2), ("parallel", 1)])
def test_a_sum_in_a_norm_saves_a_pass_and_an_operator_in_each_direction(block: str, num_sums: int) -> None:
    model = MODEL.model_copy(update={"block": block})
    apart, joined = (times(GPUS, model, fused_add_norm=fused_add_norm) for fused_add_norm in (False, True))
    stream = 4 * MODEL.sequence * MODEL.hidden * 2 / 2  # micro-batch, sequence, hidden, bytes, ranks
    saved = stream_seconds(GPUS.accelerator, num_sums * stream, num_sums)
    for name in ("forward", "backward_input"):
        less = getattr(apart, name).total - getattr(joined, name).total
        assert less == pytest.approx(saved, rel=1e-6)
    assert joined.backward_weight == apart.backward_weight


def test_a_core_makes_sums_by_themselves() -> None:
    assert times(CORES, MODEL, fused_add_norm=True) == times(CORES, MODEL, fused_add_norm=False)


def test_the_systems_of_published_tables_do_too() -> None:
    found = [getattr(published_systems, name) for name in published_systems.__all__]
    assert found and not any(system.profile.fused_add_norm for system in found)


@pytest.mark.parametrize(("kernels", "joined"), [("auto", True), ("plain", False)])
def test_a_job_that_refuses_the_kernel_is_promised_nothing(kernels: str, joined: bool) -> None:
    assert framework_profile_of(load_job("tiny", [f"train.kernels={kernels}"])).fused_add_norm == joined
