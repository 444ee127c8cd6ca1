"""The top plans again, with memory computed from the program that each of them would run.

`closed_form_memory` scores millions of layouts by formulas: half of them within 1 % of their program's
memory, some short schedules as far as 20 % away. A proposed plan must fit, so the memory of the few that are
shown is counted action by action (`rank_memory`), except for the longest programs.

Pairs of forwards and backwards (``overlap.pairs``) are not in the closed form either. They are tried on the
fastest layouts in which ranks share experts.

Layouts with activations or optimizer state in host memory are not in the closed form. They are tried where
they can be the best: on the layouts that are faster than the best that fits, and need more memory.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from myriad.errors import BadInputError
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.cost.operator_costs import peak_flops
from myriad.planner.memory.closed_form_memory import fits_probability
from myriad.planner.memory.memory_bound import least_bytes
from myriad.planner.search.layout_problem import LayoutCandidate, LayoutProblem
from myriad.planner.search.layout_search import MIN_FIT_PROBABILITY, score_layout
from myriad.planner.simulation.simulation_cache import SimulationCache

__all__ = [
    "SimulatedPlan",
    "fits",
    "offloaded_plan",
    "paired_plans",
    "simulate_candidates",
    "verify_memory",
]

_PAIRED = 8
"""Number of the fastest layouts that are tried in pairs."""
_BASES = 4
"""Number of layouts that are tried with data in host memory: those that lack the least memory."""

_FIRST = 12
"""Number of top plans whose memory is recomputed exactly."""
_MOST_FORWARDS = 12_000
"""Largest number of forwards of a program whose memory is recomputed: longer ones keep the formulas'
bytes."""


@dataclass(frozen=True)
class SimulatedPlan:
    """A layout with the simulator's seconds."""

    candidate: LayoutCandidate
    seconds: float
    mfu: float
    """Share of the peak of all accelerators, in the compute type of the job."""

    @property
    def key(self) -> tuple[float, float]:
        """Sort key: time, then memory."""
        return round(self.seconds, 6), self.candidate.memory_bytes


def simulate_candidates(
    problem: LayoutProblem,
    candidates: Iterable[LayoutCandidate],
    simulations: SimulationCache | None = None,
    *,
    progress: Callable[[], None] | None = None,
) -> list[SimulatedPlan]:
    """Simulate the candidates and return the plans, the fastest first. ``progress`` is called after each."""
    simulations = simulations or SimulationCache()
    plans = []
    for candidate in candidates:
        workload = candidate.workload(problem)
        try:
            seconds = simulations.seconds(Costs(workload, problem.cluster))
        except BadInputError:
            continue
        peak = peak_flops(problem.cluster.accelerator, problem.value_bytes) * candidate.layout.world
        plans.append(SimulatedPlan(candidate, seconds, workload.model_flops / (seconds * peak)))
        if progress:
            progress()
    return sorted(plans, key=lambda plan: plan.key)


def paired_plans(
    problem: LayoutProblem, plans: Iterable[SimulatedPlan], simulations: SimulationCache
) -> list[SimulatedPlan]:
    """Return the fastest of the plans, each in pairs, where it can be; the fastest first."""
    found = (plan.candidate.in_pairs(problem) for plan in plans)
    candidates = islice((one for one in found if one is not None), _PAIRED)
    return simulate_candidates(problem, dict.fromkeys(candidates), simulations)


def offloaded_plan(
    problem: LayoutProblem,
    front: Iterable[LayoutCandidate],
    best: SimulatedPlan | None,
    simulations: SimulationCache,
) -> SimulatedPlan | None:
    """Return the fastest plan that fits with data in host memory, if it is faster than the ``best`` that fits
    without. ``front``: layouts that no other beats in both time and memory, from the least memory on."""
    faster = (one for one in front if best is None or one.seconds < best.seconds)
    candidates = [
        replace(base, layout=base.layout.model_copy(update=values))
        for base in islice(faster, _BASES)
        for activations, optimizer in problem.offloads
        for values in [{"offload_activations": activations, "offload_optimizer": optimizer}]
        if (activations or optimizer) and (base.overlap.optimizer or not optimizer)
    ]
    cluster = problem.cluster
    possible = [
        one
        for one in candidates
        if least_bytes(one.workload(problem), on_cpu=cluster.on_cpu) < cluster.accelerator.memory_bytes
    ]
    for plan in simulate_candidates(problem, possible, simulations):
        if best is not None and plan.seconds >= best.seconds:
            return None
        counted = _counted(problem, plan, simulations, whatever_length=True)
        if counted.candidate.fit_probability >= MIN_FIT_PROBABILITY:
            return counted
    return None


def fits(problem: LayoutProblem, candidate: LayoutCandidate, simulations: SimulationCache) -> bool:
    """Return whether a layout fits: by the closed form, or by its program if it has pairs or data in host
    memory."""
    if not (candidate.layout.offloads or candidate.overlap.pairs):
        return score_layout(problem, candidate).fit_probability >= MIN_FIT_PROBABILITY
    plan = SimulatedPlan(candidate, 0.0, 0.0)
    plan = _counted(problem, plan, simulations, whatever_length=True, checks=False)
    return plan.candidate.fit_probability >= MIN_FIT_PROBABILITY


def verify_memory(
    problem: LayoutProblem, plans: Sequence[SimulatedPlan], simulations: SimulationCache
) -> Iterator[SimulatedPlan]:
    """Yield the plans in order, without those that do not fit by their program; plans after the first few are
    not recomputed, and none in pairs is among those."""
    num_counted = 0
    for plan in plans:
        pairs = plan.candidate.overlap.pairs
        if num_counted < _FIRST:
            plan = _counted(problem, plan, simulations, whatever_length=pairs)
            if plan.candidate.fit_probability < MIN_FIT_PROBABILITY:
                continue
            num_counted += 1
        elif pairs:
            continue
        yield plan


def _counted(
    problem: LayoutProblem,
    plan: SimulatedPlan,
    simulations: SimulationCache,
    *,
    whatever_length: bool = False,
    checks: bool = True,
) -> SimulatedPlan:
    """Return the plan with the memory of its program. ``whatever_length``: even if the program is long.
    ``checks=False``: the program need not be proved."""
    cluster, workload = problem.cluster, plan.candidate.workload(problem)
    costs = Costs(workload, cluster)
    layout, count = workload.layout, workload.num_micro_batches
    if count * layout.num_stages * costs.num_chunks > _MOST_FORWARDS and not whatever_length:
        return plan
    ranks = simulations.memory(costs, checks=checks)
    fullest = max(ranks, key=lambda memory: float(memory.total))
    probability = min(float(fits_probability(memory, cluster.accelerator.memory_bytes)) for memory in ranks)
    candidate = replace(plan.candidate, memory_bytes=float(fullest.total), fit_probability=probability)
    return replace(plan, candidate=candidate)
