"""If these fail, `myriad plan` gives reasons that are not the reasons."""

import pytest
from hypothesis import HealthCheck, given, settings
from planned import candidates, problem_of

from myriad.planner.cost.layout_costs import Costs
from myriad.planner.search.layout_problem import LayoutCandidate
from myriad.planner.search.plan_explanation import WATERFALL_PARTS, improvements, neighbour_layouts, waterfall
from myriad.planner.search.planning import find_plans
from myriad.planner.simulation.simulation_cache import SimulationCache


@given(candidates())
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_waterfall_sums_to_the_predicted_time(candidate: LayoutCandidate) -> None:
    problem, simulations = problem_of(), SimulationCache()
    parts = waterfall(problem, candidate, simulations)
    seconds = simulations.seconds(Costs(candidate.workload(problem), problem.cluster))
    assert tuple(parts) == WATERFALL_PARTS
    assert sum(parts.values()) == pytest.approx(seconds, rel=1e-9)
    assert min(parts.values()) > -0.02 * seconds


def test_parts_that_a_layout_does_not_have_are_nothing() -> None:
    problem = problem_of(nodes=1, batch=8)
    plan = next(p for p in find_plans(problem).plans if p.candidate.layout.pp == 1)
    parts = waterfall(problem, plan.candidate, SimulationCache())
    assert parts["pipeline messages"] == parts["recomputation"] == 0
    assert parts["pipeline bubble"] == pytest.approx(0, abs=1e-9 * plan.seconds)


def test_neighbours_differ_in_one_dimension_and_are_no_better() -> None:
    """The best may be beaten by what the closed form put behind the first hundred, but not by much."""
    problem, simulations = problem_of(), SimulationCache()
    best = find_plans(problem).plans[0]
    near = dict(neighbour_layouts(problem, best.candidate))
    assert len(near) == len(set(near)) > 8
    for candidate in near.values():
        seconds = simulations.seconds(Costs(candidate.workload(problem), problem.cluster))
        assert seconds > best.seconds * 0.98


def test_what_would_help_helps() -> None:
    problem, simulations = problem_of(), SimulationCache()
    best = find_plans(problem).plans[0]
    parts = waterfall(problem, best.candidate, simulations)
    found = improvements(problem, best, parts, simulations)
    assert found[0].what == "matrix products twice as fast"
    assert all(one.seconds < best.seconds for one in found)
    assert any(one.what == "no slow nodes" for one in found)
