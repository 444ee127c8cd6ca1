"""What a person asks: the best layouts, a scaling curve, the fewest accelerators that are quick enough.

A plan is the best of a search's first hundred by the simulator's word. On a curve, where many sizes are
asked, it is the best of the first ten.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from myriad.comm.layout import MOST_RANKS
from myriad.errors import BadInputError
from myriad.planner.cluster import Cluster
from myriad.planner.operators import peak_flops
from myriad.planner.rescore import Plan, Simulations, rescore
from myriad.planner.search import Found, Objective, search
from myriad.planner.space import Candidate, Problem, tensor_degrees
from myriad.planner.suggestions import nearest_that_plan
from myriad.planner.verify import verified
from myriad.units import format_bytes, format_number

__all__ = ["Answer", "Progress", "answer", "best_of", "describe", "fewest_accelerators", "sizes_between"]

_FEW = 10
_ROOMY = 0.8
"""Share of the memory: formulas and programs are at most 20 % apart (`verified`)."""
_MOST_ACCELERATORS = 49152
"""That are thought of."""


@dataclass(frozen=True)
class Answer:
    """Plans by the objective, the best first."""

    problem: Problem
    found: Found
    plans: tuple[Plan, ...]


Progress = Callable[[str, int, int], None]
"""Stage, done, in all."""


def answer(
    problem: Problem,
    *,
    objective: Objective = "time",
    count: int = 100,
    simulations: Simulations | None = None,
    progress: Progress | None = None,
) -> Answer:
    """The best layouts. Raises `BadInputError` where there is none, or none fits."""
    tell = progress or (lambda stage, done, total: None)
    found = search(
        problem,
        count=count,
        objective=objective,
        progress=lambda done, total: tell("searched", done, total),
    )
    _refuse_nothing(problem, found)
    done = iter(range(1, count + 1))
    simulations = simulations or Simulations()
    plans = rescore(
        problem,
        found.best,
        simulations,
        progress=lambda: tell("simulated", next(done), len(found.best)),
    )
    if objective == "memory":
        plans.sort(key=lambda plan: (plan.candidate.memory_bytes, plan.seconds))
    fitting = tuple(verified(problem, plans, simulations))
    _refuse_nothing(problem, found if fitting else replace(found, best=()))
    return Answer(problem, found, fitting)


def best_of(problem: Problem, simulations: Simulations) -> Plan | None:
    """The quickest plan, with fewer layouts simulated; ``None`` where nothing fits."""
    plans = rescore(problem, search(problem, count=_FEW).best, simulations)
    return next(verified(problem, plans, simulations), None)


def _refuse_nothing(problem: Problem, found: Found) -> None:
    world, model = problem.cluster.world, problem.model
    if found.num_layouts == 0:
        degrees = ", ".join(map(str, tensor_degrees(model)))
        given = "".join(f", {key} {value} (given)" for key, value in problem.fixed.items())
        allowed = (
            f"{world} accelerators have no layout: tp must be one of {degrees}, pp at most "
            f"{model.layers + 2}{given}, and {world} / (tp x pp) replicas must divide the batch"
        )
        near = nearest_that_plan(problem, lambda other: _roomy(other) is not None)
        raise BadInputError("train.global_batch", problem.global_batch, allowed + near)
    if not found.best:
        leanest, chip = found.front[0], problem.cluster.accelerator
        missing = leanest.memory_bytes - chip.memory_bytes
        allowed = (
            f"nothing fits: of {found.num_layouts:,} layouts the leanest ({describe(leanest)}) needs "
            f"{format_bytes(leanest.memory_bytes)} of the {format_bytes(chip.memory_bytes)} of {chip.name}"
        )
        lacks = f", {format_bytes(missing)} too much" if missing > 0 else ", too little room to be safe"
        raise BadInputError("accelerators", world, allowed + lacks + _nearest_that_fits(problem))


def _nearest_that_fits(problem: Problem) -> str:
    """With more nodes, where the cluster can have more."""
    cluster = problem.cluster
    for factor in (2, 4, 8, 16, 32) if cluster.links.network is not None else ():
        more = cluster.model_copy(update={"nodes": factor * cluster.nodes})
        if more.world > MOST_RANKS:
            break
        larger = problem.with_cluster(more)
        leanest = next(iter(search(larger, count=1, objective="memory").best), None)
        if leanest is not None and (_roomy(larger) or best_of(larger, Simulations())):
            needs = f"{describe(leanest)}: {format_bytes(leanest.memory_bytes)}"
            return f"; with {more.world} of them something does ({needs})"
    return ""


def _roomy(problem: Problem) -> Candidate | None:
    """The leanest layout, if it leaves so much memory free that its program, too, is sure to fit: what is
    suggested must plan, and to simulate it would take minutes."""
    found = search(problem, count=1, objective="memory").best
    capacity = problem.cluster.accelerator.memory_bytes
    return next((one for one in found if one.memory_bytes < _ROOMY * capacity), None)


def describe(candidate: Candidate) -> str:
    """A layout in few words."""
    layout = candidate.layout
    several = layout.virtual_stages > 1
    pipeline = f"pp {layout.pp}" + (f" x {layout.virtual_stages}" if several and layout.pp > 1 else "")
    words = [f"dp {layout.dp} tp {layout.tp} {pipeline}"]
    if layout.pp > 1:
        words[0] += f" {layout.schedule_name}"
    words.append(f"micro-batch {layout.micro_batch}")
    if layout.zero:
        parts = f" in {layout.virtual_stages} parts" if several and layout.pp == 1 else ""
        words.append(f"ZeRO {layout.zero}{parts}" + (" each" if layout.reduce == "each" else ""))
    if layout.recompute != "none":
        words.append(f"recompute {layout.recompute}")
    return ", ".join(words)


def sizes_between(fewest: int, most: int, per_node: int, also: Iterable[int] = ()) -> list[int]:
    """Powers of two and three times powers of two between two numbers of accelerators, whole nodes, with both
    ends."""
    steps = {factor * 2**power for factor in (1, 3) for power in range(40)}
    inside = {size for size in {*steps, *also} if fewest < size < most}
    whole = {size for size in inside if size <= per_node or size % per_node == 0}
    return sorted({fewest, most, *whole})


def fewest_accelerators(
    problem_of: Callable[[int], Problem],
    cluster: Cluster,
    seconds: float,
    simulations: Simulations,
    progress: Progress,
) -> tuple[Problem, Plan]:
    """The smallest number, of a part of a node or of whole nodes, by powers of two and three times them, with
    an iteration of at most so many seconds. Raises `BadInputError` where none is."""
    per_node = cluster.accelerators_per_node
    least = problem_of(per_node)
    flops = least.model.flops_per_token() * least.model.sequence * least.global_batch
    fewest = flops / (seconds * peak_flops(cluster.accelerator, least.value_bytes))
    most = per_node if cluster.links.network is None else _MOST_ACCELERATORS
    sizes = [size for size in sizes_between(1, most, per_node) if size >= fewest]
    quickest: tuple[float, int] | None = None
    for number, size in enumerate(sizes):
        progress(f"{size} accelerators", number, len(sizes))
        problem = problem_of(size)
        plan = best_of(problem, simulations)
        if plan is not None and plan.seconds <= seconds:
            return problem, plan
        if plan is not None and (quickest is None or plan.seconds < quickest[0]):
            quickest = plan.seconds, size
    told = f"up to {most} accelerators are too slow or too small: "
    if quickest is None:
        told += f"{max(1, math.ceil(fewest)):,} are needed even at their peak"
    else:
        told += f"{quickest[1]} take {format_number(quickest[0], 4)} s an iteration, "
        told += f"{format_number(seconds, 4)} s are needed"
    raise BadInputError("seconds an iteration", seconds, told)
