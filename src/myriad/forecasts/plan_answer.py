"""``myriad plan`` on one number of accelerators: search, compare, explain.

found = plan_and_explain(question, "time", progress=progress)
found.best              the plan
found.ranking()         the best layouts, and the job's own
found.parts             seconds of the iteration by cause
found.near              the parts of each neighbouring layout
found.improvements      seconds of the plan with more bandwidth, more memory, ...
found.placement         the order of nodes
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from myriad.errors import BadInputError
from myriad.forecasts.measured_loads import MeasuredLoads
from myriad.forecasts.plan_figures import plan_figures
from myriad.forecasts.plan_request import PlanProblem
from myriad.forecasts.planned_job import job_of, planned_precision, planned_steps
from myriad.job import Job
from myriad.planner import (
    Costs,
    LayoutCandidate,
    LayoutProblem,
    PlanResult,
    SimulatedPlan,
    SimulationCache,
    best_plan,
    describe_layout,
    find_plans,
    scale_cluster,
)
from myriad.planner.cost.operator_costs import peak_flops
from myriad.planner.fabric.fabric_forecast import FabricDistribution, FabricForecaster
from myriad.planner.fabric.placement_cost import fills_nodes, traffic_of
from myriad.planner.fabric.placement_search import PlacementResult, place_nodes
from myriad.planner.search.dimension_warnings import DimensionWarning, dimension_warnings
from myriad.planner.search.layout_search import MIN_FIT_PROBABILITY, score_layout
from myriad.planner.search.plan_explanation import Improvement, improvements, neighbour_layouts, waterfall
from myriad.planner.search.plan_ranking import fits, simulate_candidates
from myriad.units import format_number

__all__ = ["ExplainedPlan", "FabricForecast", "FrontPoint", "plan_and_explain", "plan_warnings"]

FrontPoint = tuple[float, float, str]
"""Bytes, seconds and description of a layout."""

_MOST_ALIKE = 3
"""Largest number of layouts with the same grid and micro-batch in the ranking."""
_MOST_ON_FABRIC = 5
"""Number of layouts of the ranking that ``--fabric`` simulates on the switches."""


@dataclass(frozen=True)
class FabricForecast:
    """The best few layouts on the cluster's switches: distributions of iterations over hash seeds."""

    rows: Sequence[tuple[str, SimulatedPlan, FabricDistribution]]
    """Rank in the ranking, plan, and its iterations with nodes in the order of their numbers."""
    placement: PlacementResult | None
    """Order of the best plan's nodes; ``None``: the plan does not fill them evenly."""
    placed: FabricDistribution | None
    """The best plan with its nodes in that order."""

    def as_json(self) -> dict[str, Any]:
        """Return plain values for ``--json``."""
        return {
            "plans": [
                {"rank": rank, "plain_seconds": plan.seconds, **one.as_json()}
                for rank, plan, one in self.rows
            ],
            "placed": None if self.placed is None else self.placed.as_json(),
        }


@dataclass(frozen=True)
class ExplainedPlan:
    """The best plan and its reasons."""

    job: Job
    answer: PlanResult
    before: SimulatedPlan | None
    """The best plan without ``--what-if``."""
    written: SimulatedPlan | None
    """The job's own layout."""
    parts: Mapping[str, float]
    """Seconds by part of the iteration."""
    near: Sequence[tuple[str, Mapping[str, float]]]
    """Neighbouring layouts and the parts of their iterations."""
    improvements: Sequence[Improvement]
    placement: PlacementResult | None
    """Order of the best plan's nodes; ``None``: there is one node, the plan does not fill whole nodes, or
    ranks share experts."""
    top: int
    """Number of rows of the ranking."""
    slower: Mapping[int, float] = field(default_factory=dict)
    """Slowdown of each node that ``--straggler`` named."""
    fabric: FabricForecast | None = None
    """Forecast on the switches, with ``--fabric``."""
    loads: MeasuredLoads | None = None
    """Loads of experts that a run measured."""
    at_high_load: SimulatedPlan | None = None
    """The best plan with the high one of those loads."""
    warnings: Sequence[DimensionWarning] = ()
    """Dimensions of the model that cost speed in the best plan."""

    @property
    def problem(self) -> LayoutProblem:
        """The problem that was planned."""
        return self.answer.problem

    @property
    def best(self) -> SimulatedPlan:
        """The plan with the shortest predicted iteration."""
        return self.answer.plans[0]

    @property
    def headline(self) -> str:
        """Job, cluster, peak, and the number of layouts searched."""
        found, cluster = self.answer.found, self.problem.cluster
        peak = peak_flops(cluster.accelerator, self.problem.value_bytes)
        precision = planned_precision(self.job, cluster)
        return (
            f"{self.job.name} on {cluster.name}: {cluster.world:,} x {cluster.accelerator.name}, peak "
            f"{format_number(peak / 1e12, 4)} TFLOP/s in {precision}. {found.num_layouts:,} layouts, "
            f"{found.num_fitting:,} fit, {len(found.best)} simulated."
        )

    def ranking(self) -> list[tuple[str, SimulatedPlan]]:
        """Return the best plans with their ranks, the layout as written at its place among them, and the best
        without ``--what-if``.

        Layouts that differ only in shards, recomputation and overlaps count as one; of layouts that differ
        only in stages and schedule as well, a few are listed."""
        distinct: dict[tuple[object, ...], SimulatedPlan] = {}
        alike: Counter[tuple[int, ...]] = Counter()
        for plan in self.answer.plans:
            layout = plan.candidate.layout
            experts = (layout.ep, layout.expert_tp)
            grid = (layout.dp, layout.tp, layout.pp, layout.cp, layout.ulysses, *experts, layout.micro_batch)
            key = grid if layout.pp == 1 else (*grid, layout.virtual_stages, layout.schedule_name)
            if key not in distinct and alike[grid] < _MOST_ALIKE:
                distinct[key] = plan
                alike[grid] += 1
        first = list(distinct.values())[: self.top]
        rows = [(str(rank), plan) for rank, plan in enumerate(first, 1)]
        if self.written is not None:
            rows.append(("as written", self.written))
            rows.sort(key=lambda row: row[1].seconds)
        if self.before is not None:
            rows.append(("before", self.before))
        return rows

    @property
    def device_order(self) -> list[int] | None:
        """Accelerators of a node in the order of local ranks. ``None``: their own order is the best, or the
        cluster's file does not describe links inside nodes."""
        cluster = self.problem.cluster
        if cluster.inside is None:
            return None
        order = cluster.inside.order(cluster.accelerators_per_node)
        return None if order == tuple(range(len(order))) else list(order)

    @property
    def island_size(self) -> int | None:
        """Number of local ranks that share better links than the whole node.

        ``None``: the cluster's file names no such links, or the job sets comm.island_size."""
        cluster = self.problem.cluster
        if cluster.inside is None or self.job.comm.island_size is not None:
            return None
        sizes = cluster.inside.islands(cluster.accelerators_per_node)
        return sizes[0] if len(sizes) > 1 else None

    def _loads_as_json(self) -> dict[str, Any]:
        if self.loads is None or self.at_high_load is None:
            return {}
        ep, high = self.best.candidate.layout.ep, self.at_high_load
        return {"expert_load": self.loads.as_json(ep, high.seconds, high.candidate.fit_probability)}

    @property
    def load_note(self) -> str | None:
        """A sentence about measured loads of experts; ``None``: the plan counts none."""
        if self.loads is None or self.at_high_load is None:
            return None
        layout, high = self.best.candidate.layout, self.at_high_load
        return self.loads.note(layout.ep, high.seconds, high.candidate.fit_probability)

    def front(self) -> list[FrontPoint]:
        """Return the layouts that fit, and that no other beats in both time and memory."""
        return [
            self.point(one) for one in self.answer.found.front if one.fit_probability >= MIN_FIT_PROBABILITY
        ]

    def point(self, candidate: LayoutCandidate) -> FrontPoint:
        """Return a layout as a point of the front."""
        return candidate.memory_bytes, candidate.seconds, describe_layout(candidate)

    def as_json(self) -> dict[str, Any]:
        """Return plain values for ``--json``."""
        found, steps = self.answer.found, planned_steps(self.job)
        return {
            "job": self.job.name,
            "cluster": self.problem.cluster.name,
            "precision": planned_precision(self.job, self.problem.cluster),
            "layouts": found.num_layouts,
            "fitting": found.num_fitting,
            "plans": [
                {"rank": rank, **plan_figures(self.problem, plan, steps).as_json(), **_keys(plan)}
                for rank, plan in self.ranking()
            ],
            "waterfall": dict(self.parts),
            "neighbours": [{"with": what, "waterfall": dict(parts)} for what, parts in self.near],
            "warnings": [one.as_json() for one in self.warnings],
            "would_help": [{"what": one.what, "seconds": one.seconds} for one in self.improvements],
            "device_order": self.device_order,
            "island_size": self.island_size,
            "node_order": None if self.placement is None else list(self.placement.order),
            **({} if self.fabric is None else {"fabric": self.fabric.as_json()}),
            **self._loads_as_json(),
            "front": [
                {"memory_bytes": memory, "seconds": seconds, "layout": words}
                for memory, seconds, words in self.front()
            ],
        }


def _keys(plan: SimulatedPlan) -> dict[str, Any]:
    layout, overlap = plan.candidate.layout, plan.candidate.overlap
    switches = ("tensor", "pairs", "pipeline", "data", "optimizer")
    return {
        "keys": layout.model_dump(mode="json"),
        "overlap": {name: getattr(overlap, name) for name in switches},
    }


def plan_and_explain(
    question: PlanProblem,
    objective: Literal["time", "cost", "memory"],
    *,
    top: int,
    on_switches: bool,
    progress: Callable[[str, int, int], None],
) -> ExplainedPlan:
    """Search for the best layouts and explain the first one. Raises `BadInputError` where nothing fits.

    ``top``: rows of the ranking; ``on_switches``: simulate the cluster's switches, too."""
    job, simulations = question.job, SimulationCache()
    problem = question.layouts_on(question.cluster)
    found = find_plans(problem, objective=objective, simulations=simulations, progress=progress)
    before = None
    if question.plain is not None:
        before = find_plans(problem.with_cluster(question.plain), simulations=simulations, progress=progress)
    progress("explaining", 0, 0)
    found = _without_illegal(job, found)
    problem, best = found.problem, found.plans[0]
    parts = waterfall(problem, best.candidate, simulations)
    whole = ExplainedPlan(
        job=job,
        answer=found,
        before=None if before is None else before.plans[0],
        written=_scored(problem, question.written, simulations),
        parts=parts,
        near=_neighbours(job, problem, best, simulations),
        improvements=[
            *improvements(problem, best, parts, simulations),
            *_more_memory(found, best, simulations),
        ],
        placement=None if on_switches else _placed(problem, best, question.slower),
        top=top,
        slower=question.slower,
        loads=question.loads,
        at_high_load=_at_high_load(question.loads, problem, best, simulations),
        warnings=plan_warnings(problem, best, simulations),
    )
    if not on_switches:
        return whole
    on_fabric = FabricForecaster(question.cluster, simulations.seconds)
    fabric = _fabric_forecast(on_fabric, problem, whole.ranking(), question.slower)
    return replace(whole, fabric=fabric, placement=fabric.placement)


def plan_warnings(
    problem: LayoutProblem, plan: SimulatedPlan, simulations: SimulationCache
) -> list[DimensionWarning]:
    """Return the dimensions of the model that cost speed in a plan."""
    return dimension_warnings(plan.candidate.workload(problem), problem.cluster, simulations.seconds)


def _at_high_load(
    loads: MeasuredLoads | None, problem: LayoutProblem, best: SimulatedPlan, simulations: SimulationCache
) -> SimulatedPlan | None:
    """Return the best plan with the high load of a run; ``None``: no run is given, or no ranks share
    experts."""
    layout = best.candidate.layout
    if loads is None or layout.ep == 1:
        return None
    busier = layout.model_copy(update={"expert_load": loads.high(layout.ep)})
    scored = score_layout(problem, replace(best.candidate, layout=busier))
    return simulate_candidates(problem, [scored], simulations)[0]


def _without_illegal(job: Job, found: PlanResult) -> PlanResult:
    """Drop the plans that other keys of the job rule out."""
    plans = tuple(plan for plan in found.plans if _is_legal(job, plan.candidate))
    if not plans:
        job_of(job, found.plans[0].candidate)  # job_of raises the reason.
    return replace(found, plans=plans)


def _is_legal(job: Job, candidate: LayoutCandidate) -> bool:
    try:
        job_of(job, candidate)
    except BadInputError:
        return False
    return True


def _neighbours(
    job: Job, problem: LayoutProblem, best: SimulatedPlan, simulations: SimulationCache
) -> list[tuple[str, Mapping[str, float]]]:
    near: list[tuple[str, Mapping[str, float]]] = []
    for what, candidate in neighbour_layouts(problem, best.candidate):
        if _is_legal(job, candidate):
            label = what if fits(problem, candidate, simulations) else f"{what}: does not fit"
            near.append((label, waterfall(problem, candidate, simulations)))
    return near


def _scored(
    problem: LayoutProblem, written: LayoutCandidate | None, simulations: SimulationCache
) -> SimulatedPlan | None:
    """Score the job's own layout on as many accelerators of the cluster as it has ranks."""
    if written is None:
        return None
    try:
        own = problem.with_cluster(scale_cluster(problem.cluster, written.layout.world))
    except BadInputError:
        return None
    return simulate_candidates(own, [score_layout(own, written)], simulations)[0]


def _more_memory(answer: PlanResult, best: SimulatedPlan, simulations: SimulationCache) -> list[Improvement]:
    """Plan with twice the memory, where another layout may be the best."""
    cluster = answer.problem.cluster
    chip = cluster.accelerator.model_copy(update={"memory_bytes": 2 * cluster.accelerator.memory_bytes})
    problem = answer.problem.with_cluster(cluster.model_copy(update={"accelerator": chip}))
    found = best_plan(problem, simulations, answer.found.with_more_memory)
    if found is None or found.seconds >= best.seconds * (1 - 1e-4):
        return []
    return [Improvement(f"memory doubled ({describe_layout(found.candidate)})", found.seconds)]


def _placed(problem: LayoutProblem, best: SimulatedPlan, slower: dict[int, float]) -> PlacementResult | None:
    """Order the nodes, where there is more than one and the plan fills them."""
    cluster, layout = problem.cluster, best.candidate.layout
    fills = layout.world == cluster.world and fills_nodes(layout, cluster.accelerators_per_node)
    if cluster.nodes == 1 or not fills:
        return None
    return place_nodes(cluster, traffic_of(Costs(best.candidate.workload(problem), cluster)), slower)


def _fabric_forecast(
    on_fabric: FabricForecaster,
    problem: LayoutProblem,
    ranking: Sequence[tuple[str, SimulatedPlan]],
    slower: dict[int, float],
) -> FabricForecast:
    """Simulate the first few rows of the ranking on the switches, and order the best plan's nodes."""
    rows, best, placement = [], None, None
    for rank, plan in [row for row in ranking if row[0] != "before"][:_MOST_ON_FABRIC]:
        tenant = on_fabric.job(Costs(plan.candidate.workload(problem), problem.cluster))
        rows.append((rank, plan, on_fabric.outlook(tenant)))
        if rank == "1":
            best, layout = tenant, plan.candidate.layout
            per_node = problem.cluster.accelerators_per_node
            if layout.world == problem.cluster.world and fills_nodes(layout, per_node):
                placement = on_fabric.best_placement(tenant, slower)
    placed = None
    if best is not None and placement is not None and not placement.is_plain:
        placed = on_fabric.outlook(best, placement.order)
    return FabricForecast(rows, placement, placed)
