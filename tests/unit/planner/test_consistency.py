"""If these fail, two answers of the planner contradict each other, or an engineer's common sense."""

import os
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from planned import candidates, problem_of

from myriad.cli.main import main
from myriad.job import load_job
from myriad.job.job_values import work_of
from myriad.planner.cluster_config import Cluster
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.cost.stage_costs import StageCosts
from myriad.planner.memory.closed_form_memory import PeakMemory
from myriad.planner.memory.rank_memory import memory_of_ranks
from myriad.planner.search.layout_problem import LayoutCandidate
from myriad.planner.search.layout_search import layout_memory, score_layout
from myriad.planner.search.plan_ranking import simulate_candidates
from myriad.planner.search.planning import best_plan
from myriad.planner.simulation.simulation_cache import SimulationCache
from myriad.planner.simulation.simulator import simulate
from myriad.planner.simulation.steady_state import short_run_lengths
from myriad.recipes.cluster import load_cluster

SOME = settings(derandomize=True, max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))


def seconds_on(candidate: LayoutCandidate, cluster: Cluster) -> float:
    return SimulationCache().seconds(Costs(candidate.workload(problem_of()), cluster))


def test_a_stage_of_blocks_without_experts_is_planned_as_one_of_a_dense_model() -> None:
    """In time, parameters and memory; and one of blocks with experts as where all have them."""

    def stages(*keys: str) -> tuple[list[StageCosts], list[PeakMemory]]:
        base = ["layout.pp=2", "layout.recompute=selective", "layout.schedule=zero-bubble"]
        workload = work_of(load_job("tiny-moe", [*base, "model.expert_every=1", *keys]), 2)
        cluster = load_cluster("laptop", ["accelerators_per_node=2"])
        return Costs(workload, cluster).stages, memory_of_ranks(workload, on_cpu=True)

    mixed, dense, sparse = stages("model.dense_layers=2"), stages("model.experts=off"), stages()
    assert mixed[0] == [dense[0][0], sparse[0][1]] and dense[0][0] != sparse[0][0]
    assert mixed[1] == [dense[1][0], sparse[1][1]] and dense[1][0] != sparse[1][0]


@SOME
@given(candidates())
def test_plan_and_simulate_predict_the_same_time(candidate: LayoutCandidate) -> None:
    problem = problem_of()
    (plan,) = simulate_candidates(problem, [candidate])
    costs = Costs(candidate.workload(problem), problem.cluster)
    simulated = simulate(costs, spans=False).seconds
    short = short_run_lengths(costs.workload.layout, costs.workload.num_micro_batches) is not None
    assert plan.seconds == pytest.approx(simulated + costs.stall(simulated), rel=1e-3 if short else 1e-9)
    assert 0 < plan.mfu <= 1


@SOME
@given(candidates(), st.sampled_from(["node", "network"]), st.sampled_from([1.5, 4.0, 100.0]))
def test_a_faster_link_never_makes_an_iteration_slower(
    candidate: LayoutCandidate, level: str, factor: float
) -> None:
    plain = problem_of().cluster
    link = getattr(plain.links, level)
    better = link.model_copy(update={"bytes_per_second": factor * link.bytes_per_second})
    links = plain.links.model_copy(update={level: better})
    faster = plain.model_copy(update={"links": links})
    assert seconds_on(candidate, faster) <= seconds_on(candidate, plain) * (1 + 1e-9)


@SOME
@given(candidates(), st.sampled_from(["peak_flops_per_second", "memory_bytes_per_second"]))
def test_a_faster_accelerator_never_makes_an_iteration_slower(candidate: LayoutCandidate, key: str) -> None:
    plain = problem_of().cluster
    chip = plain.accelerator.model_copy(update={key: 2 * getattr(plain.accelerator, key)})
    faster = plain.model_copy(update={"accelerator": chip})
    assert seconds_on(candidate, faster) <= seconds_on(candidate, plain) * (1 + 1e-9)


@SOME
@given(candidates())
def test_a_larger_micro_batch_takes_more_memory_and_shards_take_less(candidate: LayoutCandidate) -> None:
    problem, layout = problem_of(), candidate.layout
    total = float(layout_memory(problem, candidate).total)

    def changed(**values: object) -> float:
        other = LayoutCandidate(layout.model_copy(update=values), candidate.overlap, 0.0, 0.0, 0.0)
        return float(layout_memory(problem, other).total)

    if problem.global_batch % (layout.dp * 2 * layout.micro_batch) == 0:
        assert changed(micro_batch=2 * layout.micro_batch) >= total * (1 - 1e-9)
    if layout.dp > 1 and layout.reduce == "last":
        assert changed(zero=1) <= changed(zero=0)
        assert changed(zero=3) <= changed(zero=2)
    if problem.global_batch > layout.dp * layout.micro_batch:  # one micro-batch alone is kept to its end
        assert changed(recompute="full") <= changed(recompute="none") * (1 + 1e-9)


@SOME
@given(candidates())
def test_no_prediction_is_better_than_the_peak(candidate: LayoutCandidate) -> None:
    problem = problem_of()
    assume(candidate.layout.world == problem.cluster.world)
    least = candidate.workload(problem).model_flops / (
        problem.cluster.world * problem.cluster.accelerator.peak_flops_per_second
    )
    assert score_layout(problem, candidate).seconds >= least


@pytest.mark.parametrize("batch", [32, 48])
def test_twice_the_nodes_are_at_most_twice_as_quick(batch: int) -> None:
    """Nothing here is short of memory, so that more of it is no reason."""
    roomy = "accelerator.memory_bytes=900 GiB"
    seconds = []
    for nodes in (1, 2, 4):
        plan = best_plan(problem_of(roomy, nodes=nodes, batch=batch), SimulationCache())
        assert plan is not None
        seconds.append(plan.seconds)
    assert seconds[0] <= 2.02 * seconds[1] and seconds[1] <= 2.02 * seconds[2]
    assert seconds[0] >= seconds[1] >= seconds[2]


def test_the_same_question_has_the_same_answer_in_every_process(capsys: pytest.CaptureFixture[str]) -> None:
    """The other process orders its sets and hashes differently."""
    question = ["plan", "tiny", "--cluster", "laptop", "--gpus", "2", "--json"]
    with pytest.raises(SystemExit) as ended:
        main(question)
    assert not ended.value.code
    other = subprocess.run(
        [sys.executable, "-c", f"from myriad.cli.main import main; main({question})"],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout == capsys.readouterr().out
