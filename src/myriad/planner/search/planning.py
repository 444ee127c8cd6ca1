"""The planner's entry points: the best layouts, the best plan for a scaling curve, the fewest accelerators
that are fast enough.

`find_plans` simulates the first hundred layouts of a search. `best_plan` simulates the first ten, because a
curve plans many sizes.

Where no layout divides a batch among a cluster's accelerators, the error suggests the nearest batches and the
nearest numbers of accelerators that have a plan. Every suggestion has been planned, so it leads to a layout
that fits.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from myriad.comm.layout import MOST_RANKS
from myriad.errors import BadInputError
from myriad.planner.cluster_config import Cluster
from myriad.planner.cost.operator_costs import peak_flops
from myriad.planner.search.layout_problem import LayoutCandidate, LayoutProblem
from myriad.planner.search.layout_search import Objective, SearchResult, search_layouts
from myriad.planner.search.layout_space import has_layout, parallel_degrees, tensor_degrees
from myriad.planner.search.plan_ranking import (
    SimulatedPlan,
    offloaded_plan,
    paired_plans,
    simulate_candidates,
    verify_memory,
)
from myriad.planner.simulation.simulation_cache import SimulationCache
from myriad.units import format_bytes, format_number

__all__ = [
    "PlanResult",
    "Progress",
    "best_plan",
    "cluster_sizes",
    "describe_layout",
    "fewest_accelerators",
    "find_plans",
]

_FEW = 10
_ROOMY = 0.8
"""Share of the memory that is safe by formula: formulas and programs are at most 20 % apart
(`verify_memory`)."""
_MOST_ACCELERATORS = 49152
"""Largest number of accelerators that the search for the fewest considers."""


@dataclass(frozen=True)
class PlanResult:
    """The plans ordered by the objective, the best first."""

    problem: LayoutProblem
    found: SearchResult
    plans: tuple[SimulatedPlan, ...]


Progress = Callable[[str, int, int], None]
"""Called with the stage, the steps done and the total."""


def find_plans(
    problem: LayoutProblem,
    *,
    objective: Objective = "time",
    count: int = 100,
    simulations: SimulationCache | None = None,
    progress: Progress | None = None,
) -> PlanResult:
    """Return the best layouts. Raises `BadInputError` where there is no layout, or none fits."""
    report_progress = progress or (lambda stage, done, total: None)
    found = search_layouts(
        problem,
        count=count,
        objective=objective,
        num_with_more_memory=_FEW,
        progress=lambda done, total: report_progress("searched", done, total),
    )
    allows_plain = (0.0, False) in problem.offloads
    offloads = not allows_plain or (objective != "memory" and len(problem.offloads) > 1)
    if not (offloads and found.num_layouts):
        _refuse_nothing(problem, found)
    done = iter(range(1, count + 1))
    simulations = simulations or SimulationCache()
    plans = simulate_candidates(
        problem,
        found.best,
        simulations,
        progress=lambda: report_progress("simulated", next(done), len(found.best)),
    )
    plans = sorted([*plans, *paired_plans(problem, plans, simulations)], key=lambda plan: plan.key)
    if objective == "memory":
        plans.sort(key=lambda plan: (plan.candidate.memory_bytes, plan.seconds))
    fitting = tuple(verify_memory(problem, plans, simulations))
    if offloads:
        fitting = fitting if allows_plain else ()
        best = min(fitting, key=lambda plan: plan.seconds, default=None)
        faster = offloaded_plan(problem, found.score_front(), best, simulations)
        fitting = fitting if faster is None else (faster, *fitting)
    if not fitting:
        _refuse_nothing(problem, replace(found, best=()))
    return PlanResult(problem, found, fitting)


def best_plan(
    problem: LayoutProblem,
    simulations: SimulationCache,
    candidates: Iterable[LayoutCandidate] | None = None,
) -> SimulatedPlan | None:
    """Return the fastest plan, from a smaller number of simulated layouts; ``None`` where nothing fits.
    ``candidates``: these layouts, if a search has found them already."""
    if candidates is None:
        candidates = search_layouts(problem, count=_FEW).best
    plans = simulate_candidates(problem, candidates, simulations)
    return next(verify_memory(problem, plans, simulations), None)


def _refuse_nothing(problem: LayoutProblem, found: SearchResult) -> None:
    world, model = problem.cluster.world, problem.model
    if found.num_layouts == 0:
        degrees = ", ".join(map(str, tensor_degrees(model)))
        given = "".join(f", {key} {value} (given)" for key, value in problem.fixed.items())
        allowed = (
            f"{world} accelerators have no layout: tp must be one of {degrees}, pp at most "
            f"{model.layers + 2}{given}, and {world} / (tp x pp) replicas must divide the batch"
        )
        near = suggest_alternatives(problem, _has_roomy)
        raise BadInputError("train.global_batch", problem.global_batch, allowed + near)
    if not found.best:
        leanest, chip = next(found.score_front()), problem.cluster.accelerator
        missing = leanest.memory_bytes - chip.memory_bytes
        allowed = (
            f"nothing fits: of {found.num_layouts:,} layouts the leanest ({describe_layout(leanest)}) needs "
            f"{format_bytes(leanest.memory_bytes)} of the {format_bytes(chip.memory_bytes)} of {chip.name}"
        )
        lacks = f", {format_bytes(missing)} too much" if missing > 0 else ", too little room to be safe"
        raise BadInputError("accelerators", world, allowed + lacks + _nearest_that_fits(problem))


def _nearest_that_fits(problem: LayoutProblem) -> str:
    """Return the part of an error message that names a larger number of accelerators on which a layout fits;
    empty where there is none."""
    cluster = problem.cluster
    for factor in (2, 4, 8, 16, 32) if cluster.links.network is not None else ():
        more = cluster.model_copy(update={"nodes": factor * cluster.nodes})
        if more.world > MOST_RANKS:
            break
        larger = problem.with_cluster(more)
        leanest = next(iter(search_layouts(larger, count=1, objective="memory").best), None)
        if leanest is not None and (_is_roomy(larger, leanest) or best_plan(larger, SimulationCache())):
            needs = f"{describe_layout(leanest)}: {format_bytes(leanest.memory_bytes)}"
            return f"; with {more.world} of them something does ({needs})"
    return ""


def _has_roomy(problem: LayoutProblem) -> bool:
    """Return whether the layout with the least memory is roomy."""
    found = search_layouts(problem, count=1, objective="memory").best
    return any(_is_roomy(problem, one) for one in found)


def _is_roomy(problem: LayoutProblem, candidate: LayoutCandidate) -> bool:
    """Return whether a layout leaves so much memory free that its program is sure to fit. A suggestion must
    lead to a plan, and a simulation here would take minutes."""
    return candidate.memory_bytes < _ROOMY * problem.cluster.accelerator.memory_bytes


def describe_layout(candidate: LayoutCandidate) -> str:
    """Return a short description of a layout."""
    layout = candidate.layout
    several = layout.virtual_stages > 1
    pipeline = f"pp {layout.pp}" + (f" x {layout.virtual_stages}" if several and layout.pp > 1 else "")
    experts = f"ep {layout.ep} " if layout.folds_experts else ""
    experts += f"etp {layout.expert_tp} " if layout.num_etp_groups > 1 else ""
    experts += f"by {layout.expert_dispatch} " if layout.expert_dispatch != "expert" else ""
    context = f"cp {layout.cp} " if layout.cp > 1 else ""
    context += f"ulysses {layout.ulysses} " if layout.ulysses > 1 else ""
    words = [f"dp {layout.dp} {context}{experts}tp {layout.tp} {pipeline}"]
    if layout.pp > 1:
        words[0] += f" {layout.schedule_name}"
    words.append(f"micro-batch {layout.micro_batch}")
    if layout.zero:
        parts = f" in {layout.virtual_stages} parts" if several and layout.pp == 1 else ""
        words.append(f"ZeRO {layout.zero}{parts}" + (" each" if layout.reduce == "each" else ""))
        if layout.reduces_across:
            words[-1] += f" in groups of {layout.shard_group}"
    if layout.recompute != "none":
        words.append(f"recompute {layout.recompute}")
    if candidate.overlap.pairs:
        words.append("in pairs")
    host = ["activations"] * (layout.offload_activations > 0) + ["optimizer"] * layout.offload_optimizer
    if host:
        words.append(f"offload {' and '.join(host)}")
    return ", ".join(words)


def cluster_sizes(fewest: int, most: int, per_node: int, also: Iterable[int] = ()) -> list[int]:
    """Return the powers of two and three times powers of two between two numbers of accelerators, in whole
    nodes, with both ends."""
    steps = {factor * 2**power for factor in (1, 3) for power in range(40)}
    inside = {size for size in {*steps, *also} if fewest < size < most}
    whole = {size for size in inside if size <= per_node or size % per_node == 0}
    return sorted({fewest, most, *whole})


def fewest_accelerators(
    problem_of: Callable[[int], LayoutProblem],
    cluster: Cluster,
    seconds: float,
    simulations: SimulationCache,
    progress: Progress,
) -> tuple[LayoutProblem, SimulatedPlan]:
    """Return the smallest number of accelerators with an iteration of at most so many seconds, and its plan.
    The numbers tried are powers of two and three times these, in a part of a node or whole nodes. Raises
    `BadInputError` where none is fast enough."""
    per_node = cluster.accelerators_per_node
    least = problem_of(per_node)
    flops = least.model.flops_per_token() * least.model.sequence * least.global_batch
    fewest = flops / (seconds * peak_flops(cluster.accelerator, least.value_bytes))
    most = per_node if cluster.links.network is None else _MOST_ACCELERATORS
    sizes = [size for size in cluster_sizes(1, most, per_node) if size >= fewest]
    quickest: tuple[float, int] | None = None
    for number, size in enumerate(sizes):
        progress(f"{size} accelerators", number, len(sizes))
        problem = problem_of(size)
        plan = best_plan(problem, simulations)
        if plan is not None and plan.seconds <= seconds:
            return problem, plan
        if plan is not None and (quickest is None or plan.seconds < quickest[0]):
            quickest = plan.seconds, size
    reason = f"up to {most} accelerators are too slow or too small: "
    if quickest is None:
        reason += f"{max(1, math.ceil(fewest)):,} are needed even at their peak"
    else:
        reason += f"{quickest[1]} take {format_number(quickest[0], 4)} s an iteration, "
        reason += f"{format_number(seconds, 4)} s are needed"
    raise BadInputError("seconds an iteration", seconds, reason)


_MOST_BATCH = 2**24
"""Largest batch that `train.global_batch` allows."""
_MOST_TRIED, _MOST_STEPS = 3, 4096
"""Numbers of problems that are planned and of node counts that are tried, in each direction."""

Plans = Callable[[LayoutProblem], bool]


def suggest_alternatives(problem: LayoutProblem, plans: Plans) -> str:
    """Return the suggestion at the end of an error message, or an empty string. ``plans``: returns whether a
    problem has a plan."""
    batches = _both(_batches(problem, -1), _batches(problem, 1), plans)
    sizes = _both(_sizes(problem, -1), _sizes(problem, 1), plans)
    found = []
    if batches:
        found.append(f"with a global batch of {_either(one.global_batch for one in batches)}")
    if sizes:
        found.append(f"on {_either(one.cluster.world for one in sizes)} accelerators")
    return f"; there is a plan {', or '.join(found)}" if found else ""


def _both(
    below: Iterator[LayoutProblem], above: Iterator[LayoutProblem], plans: Plans
) -> list[LayoutProblem]:
    """Return the first problem with a plan from each of the two directions."""
    found = [next(filter(plans, islice(some, _MOST_TRIED)), None) for some in (below, above)]
    return [one for one in found if one is not None]


def _either(numbers: Iterable[int]) -> str:
    return " or ".join(map(str, numbers))


def _batches(problem: LayoutProblem, direction: int) -> Iterator[LayoutProblem]:
    """Yield the problem with other batches that can be divided, the nearest first."""
    sizes = problem.fixed.get("micro_batch", 1)
    units = {dp * sizes for _, _, dp, _ in parallel_degrees(problem)}
    batch = problem.global_batch
    for _ in range(_MOST_STEPS):
        if direction < 0:
            batch = max((batch - 1) // unit * unit for unit in units) if units else 0
        else:
            batch = min((batch // unit + 1) * unit for unit in units) if units else 0
        if not 1 <= batch <= _MOST_BATCH:
            return
        other = replace(problem, global_batch=batch)
        if has_layout(other):
            yield other


def _sizes(problem: LayoutProblem, direction: int) -> Iterator[LayoutProblem]:
    """Yield the problem on fewer or more nodes, or on a part of one, the nearest first."""
    cluster = problem.cluster
    for step in range(1, _MOST_STEPS):
        other = _resized(cluster, direction * step)
        if other is None:
            return
        if has_layout(problem.with_cluster(other)):
            yield problem.with_cluster(other)


def _resized(cluster: Cluster, step: int) -> Cluster | None:
    """Return the cluster with so many more nodes; below one node, with fewer accelerators."""
    nodes, each = cluster.nodes + step, cluster.accelerators_per_node
    if nodes >= 1:
        if nodes > 1 and (cluster.links.network is None or nodes * each > MOST_RANKS):
            return None
        unequal = tuple(group for group in cluster.unequal if max(group.nodes) < nodes)
        return cluster.model_copy(update={"nodes": nodes, "unequal": unequal})
    each = cluster.accelerators_per_node + nodes - 1
    if each < 1:
        return None
    return cluster.model_copy(update={"nodes": 1, "accelerators_per_node": each, "unequal": ()})
