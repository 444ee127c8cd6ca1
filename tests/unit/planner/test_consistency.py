"""If these fail, two answers of the planner contradict each other, or an engineer's common sense."""

import os
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from planned import candidates, problem_of

from myriad.planner.cluster import Cluster
from myriad.planner.costs import Costs
from myriad.planner.judge import judge, layout_memory
from myriad.planner.questions import best_of
from myriad.planner.rescore import Simulations, rescore
from myriad.planner.simulator import simulate
from myriad.planner.space import Candidate
from myriad.planner.steady import short_counts

SOME = settings(derandomize=True, max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))


def seconds_on(candidate: Candidate, cluster: Cluster) -> float:
    return Simulations().seconds(Costs(candidate.work(problem_of()), cluster))


@SOME
@given(candidates())
def test_plan_and_simulate_predict_the_same_time(candidate: Candidate) -> None:
    problem = problem_of()
    (plan,) = rescore(problem, [candidate])
    costs = Costs(candidate.work(problem), problem.cluster)
    simulated = simulate(costs, spans=False).seconds
    short = short_counts(costs.work.layout, costs.work.num_micro_batches) is not None
    assert plan.seconds == pytest.approx(simulated + costs.stall(simulated), rel=1e-3 if short else 1e-9)
    assert 0 < plan.mfu <= 1


@SOME
@given(candidates(), st.sampled_from(["node", "network"]), st.sampled_from([1.5, 4.0, 100.0]))
def test_a_faster_link_never_makes_an_iteration_slower(
    candidate: Candidate, level: str, factor: float
) -> None:
    plain = problem_of().cluster
    link = getattr(plain.links, level)
    better = link.model_copy(update={"bytes_per_second": factor * link.bytes_per_second})
    links = plain.links.model_copy(update={level: better})
    faster = plain.model_copy(update={"links": links})
    assert seconds_on(candidate, faster) <= seconds_on(candidate, plain) * (1 + 1e-9)


@SOME
@given(candidates(), st.sampled_from(["peak_flops_per_second", "memory_bytes_per_second"]))
def test_a_faster_accelerator_never_makes_an_iteration_slower(candidate: Candidate, key: str) -> None:
    plain = problem_of().cluster
    chip = plain.accelerator.model_copy(update={key: 2 * getattr(plain.accelerator, key)})
    faster = plain.model_copy(update={"accelerator": chip})
    assert seconds_on(candidate, faster) <= seconds_on(candidate, plain) * (1 + 1e-9)


@SOME
@given(candidates())
def test_a_larger_micro_batch_takes_more_memory_and_shards_take_less(candidate: Candidate) -> None:
    problem, layout = problem_of(), candidate.layout
    total = float(layout_memory(problem, candidate).total)

    def changed(**values: object) -> float:
        other = Candidate(layout.model_copy(update=values), candidate.overlap, 0.0, 0.0, 0.0)
        return float(layout_memory(problem, other).total)

    # A single sequence is cut in positions under tensor parallelism, and keeps attention's output twice.
    is_cut = layout.tp > 1 and layout.micro_batch == 1
    if not is_cut and problem.global_batch % (layout.dp * 2 * layout.micro_batch) == 0:
        assert changed(micro_batch=2 * layout.micro_batch) >= total * (1 - 1e-9)
    if layout.dp > 1 and layout.reduce == "last":
        assert changed(zero=1) <= changed(zero=0)
        assert changed(zero=3) <= changed(zero=2)
    assert changed(recompute="full") <= changed(recompute="none") * (1 + 1e-9)


@SOME
@given(candidates())
def test_no_prediction_is_better_than_the_peak(candidate: Candidate) -> None:
    problem = problem_of()
    assume(candidate.layout.world == problem.cluster.world)
    least = candidate.work(problem).model_flops / (
        problem.cluster.world * problem.cluster.accelerator.peak_flops_per_second
    )
    assert judge(problem, candidate).seconds >= least


@pytest.mark.parametrize("batch", [32, 48])
def test_twice_the_nodes_are_at_most_twice_as_quick(batch: int) -> None:
    """Nothing here is short of memory, so that more of it is no reason."""
    roomy = "accelerator.memory_bytes=900 GiB"
    seconds = []
    for nodes in (1, 2, 4):
        plan = best_of(problem_of(roomy, nodes=nodes, batch=batch), Simulations())
        assert plan is not None
        seconds.append(plan.seconds)
    assert seconds[0] <= 2.02 * seconds[1] and seconds[1] <= 2.02 * seconds[2]
    assert seconds[0] >= seconds[1] >= seconds[2]


def test_the_same_question_has_the_same_answer_in_every_process() -> None:
    question = ["plan", "tiny", "--cluster", "laptop", "--gpus", "2", "--json"]
    script = f"from myriad.cli.main import main; main({question})"
    answers = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(answers) == 1
