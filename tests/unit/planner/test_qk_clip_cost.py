"""If these fail, a plan with QK-clip does not count the product of queries and keys that finds the largest
scores, or counts it where there is none."""

import pytest

from myriad.comm.layout import Layout
from myriad.forecasts.planned_job import problem_of
from myriad.job import load_job
from myriad.job.job_values import work_of
from myriad.planner.cost.layer_costs import LayerTimes, block_times
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.cost.operator_costs import peak_flops
from myriad.planner.cost.product_costs import LayerContext
from myriad.planner.cost.stage_layers import computed_pairs
from myriad.planner.search.layout_problem import LayoutCandidate
from myriad.planner.search.layout_search import score_layout
from myriad.planner.simulation.simulation_cache import SimulationCache
from myriad.planner.workload import FrameworkProfile, Recompute
from myriad.program.config import OverlapConfig
from myriad.recipes.cluster import load_cluster

CORES = load_cluster("laptop", ["accelerators_per_node=1"])
GPUS = load_cluster("one-node-8xh100", ["accelerator.launch_seconds=0"])
MUON, CLIPPED = ["optimizer.name=muon"], ["optimizer.name=muon", "optimizer.qk_clip=100"]


@pytest.mark.parametrize(("tp", "window"), [(1, None), (2, None), (1, 512)])
def test_a_forward_is_longer_by_one_product_and_its_passes(tp: int, window: int | None) -> None:
    model = load_job("llama3-8b").model.model_copy(update={"window": window})
    pairs = computed_pairs(model, 0)

    def times(*, qk_clip: bool) -> LayerTimes:
        overlap = OverlapConfig()
        where = LayerContext(GPUS, FrameworkProfile(), float(tp), 2.0, 2, overlap, 0.0, qk_clip=qk_clip)
        return block_times(model, where, pairs)

    plain, clipped = times(qk_clip=False), times(qk_clip=True)
    added = float(clipped.forward.total - plain.forward.total)
    scores = 2 * pairs * model.heads / tp
    chip = GPUS.accelerator
    at_peak = 2 * scores * model.head_width / peak_flops(chip, 4)
    at_peak += 16 * scores / chip.memory_bytes_per_second  # written, masked and read in float32
    assert at_peak < added < 2 * at_peak
    assert added == pytest.approx(float(clipped.forward.attention - plain.forward.attention))
    for name in ("backward_input", "backward_weight", "selective_recompute"):
        assert getattr(plain, name) == getattr(clipped, name)


@pytest.mark.parametrize(("recompute", "passes"), [("none", 1), ("selective", 1), ("full", 2)])
def test_every_forward_of_a_step_counts_it(recompute: Recompute, passes: int) -> None:
    """In the simulated iteration and in the search's closed form."""
    layout = Layout(recompute=recompute)
    jobs = [load_job("tiny", keys).model_copy(update={"layout": layout}) for keys in (MUON, CLIPPED)]
    costs = [Costs(work_of(job, 4), CORES) for job in jobs]
    plain, clipped = (one._times["block 0"].forward.total for one in costs)
    model, count = jobs[0].model, costs[0].workload.num_micro_batches
    added = float(clipped - plain) * model.layers * count * passes
    assert added > 0
    simulated = [SimulationCache().seconds(one) for one in costs]
    assert simulated[1] - simulated[0] == pytest.approx(added * simulated_share(costs[0]), rel=1e-6)
    candidate = LayoutCandidate(layout, jobs[0].overlap, 0.0, 0.0, 0.0)
    scored = [score_layout(problem_of(job, CORES), candidate).seconds for job in jobs]
    assert scored[1] - scored[0] == pytest.approx(simulated[1] - simulated[0], rel=1e-6)


def simulated_share(costs: Costs) -> float:
    """How much slower the cluster's accelerators are than their nominal rate."""
    return costs.cluster.expected_slowdown / costs.cluster.slowest_core
