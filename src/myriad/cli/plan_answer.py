"""Everything that ``myriad plan`` says of one number of accelerators, as a value: shown, printed as JSON,
drawn."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from myriad.cli.pareto import Point, pareto_svg, pareto_text
from myriad.cli.plan_job import job_of, planned_precision
from myriad.cli.plan_show import figures, show_helps, show_ranking, show_waterfalls
from myriad.errors import BadInputError
from myriad.job import Job
from myriad.planner.costs import Costs
from myriad.planner.explain import Help, helps, waterfall
from myriad.planner.judge import FITS, judge
from myriad.planner.neighbours import neighbours
from myriad.planner.operators import peak_flops
from myriad.planner.placement import Placement, place
from myriad.planner.questions import Answer, best_of, describe
from myriad.planner.rescore import Plan, Simulations, rescore
from myriad.planner.space import Candidate, Problem
from myriad.planner.traffic import fills_nodes, traffic_of
from myriad.recipes.cluster import scale_cluster
from myriad.units import format_number

if TYPE_CHECKING:
    from rich.console import Console

    from myriad.cli.plan_fabric import OnSwitches
    from myriad.planner.fabric_outlook import OnFabric

__all__ = ["Told", "tell"]

_MOST_ALIKE = 3
"""Of layouts with the same grid and micro-batch that are shown."""
_MOST_NODES = 128
"""Of an order that are printed."""


@dataclass(frozen=True)
class Told:
    """The answer and its reasons."""

    job: Job
    answer: Answer
    before: Plan | None
    """The best without --what-if."""
    written: Plan | None
    """The job's own layout."""
    parts: Mapping[str, float]
    near: Sequence[tuple[str, Mapping[str, float]]]
    helps: Sequence[Help]
    placement: Placement | None
    top: int
    slower: Mapping[int, float] = field(default_factory=dict)
    """Slowdown of each node that --straggler named."""
    switches: "OnSwitches | None" = None
    """With --fabric."""

    @property
    def problem(self) -> Problem:
        """What was planned."""
        return self.answer.problem

    @property
    def best(self) -> Plan:
        """The plan."""
        return self.answer.plans[0]

    def ranking(self) -> list[tuple[str, Plan]]:
        """The first few, the layout as written at its place among all, and the best without --what-if. Of
        layouts that differ only in shards, recomputation and overlaps the best one; of those that differ only
        in stages and schedule as well, a few."""
        distinct: dict[tuple[object, ...], Plan] = {}
        alike: Counter[tuple[int, ...]] = Counter()
        for plan in self.answer.plans:
            layout = plan.candidate.layout
            grid = (layout.dp, layout.tp, layout.pp, layout.micro_batch)
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

    def show(self, console: "Console", files: Sequence[str]) -> None:
        """Prints it."""
        found, cluster = self.answer.found, self.problem.cluster
        peak = peak_flops(cluster.accelerator, self.problem.value_bytes)
        precision = planned_precision(self.job, cluster)
        console.print(
            f"{self.job.name} on {cluster.name}: {cluster.world:,} x {cluster.accelerator.name}, peak "
            f"{format_number(peak / 1e12, 4)} TFLOP/s in {precision}. {found.num_layouts:,} layouts, "
            f"{found.num_fitting:,} fit, {len(found.best)} simulated.",
            highlight=False,
        )
        steps = self.job.train.steps
        show_ranking(console, self.problem, self.ranking(), steps, title=f"best for {steps:,} steps")
        show_waterfalls(console, self.parts, self.near)
        show_helps(console, self.best.seconds, [(one.what, one.seconds) for one in self.helps])
        if self.switches is not None:
            self.switches.show(console)
        self._show_placement(console)
        if (devices := self.device_order) is not None:
            visible = f"CUDA_VISIBLE_DEVICES={','.join(map(str, devices))}"
            text = f"{visible} on each node: neighbours in rank share the best links"
            console.print(text, highlight=False, soft_wrap=True)
        if self.island_size is not None:
            text = f"comm.island_size = {self.island_size}: so many ranks of a node share better links"
            console.print(text, highlight=False, soft_wrap=True)
        console.print("time against memory: · layouts that none beats in both, ● the plan", style="bold")
        for line in pareto_text(self._front(), self._point(self.best.candidate)):
            console.print(line, highlight=False)
        for file in files:
            console.print(file, highlight=False, soft_wrap=True)

    @property
    def device_order(self) -> list[int] | None:
        """Accelerators of a node in the order of local ranks, where the cluster says how they are joined and
        their own order is not the best."""
        cluster = self.problem.cluster
        if cluster.inside is None:
            return None
        order = cluster.inside.order(cluster.accelerators_per_node)
        return None if order == tuple(range(len(order))) else list(order)

    @property
    def island_size(self) -> int | None:
        """Local ranks that are joined better than the whole node, where the cluster says so and the job names
        none."""
        cluster = self.problem.cluster
        if cluster.inside is None or self.job.comm.island_size is not None:
            return None
        sizes = cluster.inside.islands(cluster.accelerators_per_node)
        return sizes[0] if len(sizes) > 1 else None

    def _show_placement(self, console: "Console") -> None:
        placed = self.placement
        if placed is None:
            if self.slower:
                console.print("nodes: the plan does not fill whole nodes, so --straggler changes nothing")
            return
        if placed.is_plain:
            console.print(
                "nodes: in their own order; of the others that were tried none is quicker", highlight=False
            )
            return
        gain = 1 - placed.seconds / placed.plain_seconds
        console.print(f"comm.node_order, the nodes in the order that ranks fill ({gain:.1%} quicker):")
        console.print(" ".join(map(str, placed.order[:_MOST_NODES])), highlight=False)
        if len(placed.order) > _MOST_NODES:
            more = f"... and {len(placed.order) - _MOST_NODES:,} more: --out and --json have all"
            console.print(more, highlight=False)

    def picture(self) -> str:
        """Time against memory, as SVG."""
        cluster = self.problem.cluster
        title = f"{self.job.name} on {cluster.world} x {cluster.accelerator.name}"
        capacity = float(cluster.accelerator.memory_bytes)
        return pareto_svg(title, self._front(), self._point(self.best.candidate), capacity)

    def _front(self) -> list[Point]:
        """Layouts that fit, and that no other beats in both."""
        return [self._point(one) for one in self.answer.found.front if one.fits >= FITS]

    def _point(self, candidate: Candidate) -> Point:
        return candidate.memory_bytes, candidate.seconds, describe(candidate)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        found, steps = self.answer.found, self.job.train.steps
        return {
            "job": self.job.name,
            "cluster": self.problem.cluster.name,
            "precision": planned_precision(self.job, self.problem.cluster),
            "layouts": found.num_layouts,
            "fitting": found.num_fitting,
            "plans": [
                {"rank": rank, **figures(self.problem, plan, steps).as_json(), **_keys(plan)}
                for rank, plan in self.ranking()
            ],
            "waterfall": dict(self.parts),
            "neighbours": [{"with": what, "waterfall": dict(parts)} for what, parts in self.near],
            "would_help": [{"what": one.what, "seconds": one.seconds} for one in self.helps],
            "device_order": self.device_order,
            "island_size": self.island_size,
            "node_order": None if self.placement is None else list(self.placement.order),
            **({} if self.switches is None else {"fabric": self.switches.as_json()}),
            "front": [
                {"memory_bytes": memory, "seconds": seconds, "layout": words}
                for memory, seconds, words in self._front()
            ],
        }


def _keys(plan: Plan) -> dict[str, Any]:
    layout, overlap = plan.candidate.layout, plan.candidate.overlap
    switches = ("tensor", "pipeline", "data", "optimizer")
    return {
        "keys": layout.model_dump(mode="json"),
        "overlap": {name: getattr(overlap, name) for name in switches},
    }


def tell(
    job: Job,
    answer: Answer,
    *,
    before: Answer | None,
    written: Candidate | None,
    simulations: Simulations,
    slower: dict[int, float],
    top: int,
    on_fabric: "OnFabric | None" = None,
) -> Told:
    """Everything there is to say."""
    answer = _checked(job, answer)
    problem, best = answer.problem, answer.plans[0]
    parts = waterfall(problem, best.candidate, simulations)
    near = []
    for what, candidate in neighbours(problem, best.candidate):
        if _is_legal(job, candidate):
            fits = judge(problem, candidate).fits >= FITS
            told = what if fits else f"{what}: does not fit"
            near.append((told, waterfall(problem, candidate, simulations)))
    whole = Told(
        job=job,
        answer=answer,
        before=None if before is None else before.plans[0],
        written=_judged(problem, written, simulations),
        parts=parts,
        near=near,
        helps=[*helps(problem, best, parts, simulations), *_more_memory(problem, best, simulations)],
        placement=None if on_fabric else _placed(problem, best, slower),
        top=top,
        slower=slower,
    )
    if on_fabric is None:
        return whole
    from myriad.cli.plan_fabric import on_switches

    switches = on_switches(on_fabric, problem, whole.ranking(), slower)
    return replace(whole, switches=switches, placement=switches.placement)


def _checked(job: Job, answer: Answer) -> Answer:
    """Without what the rest of the job rules out."""
    plans = tuple(plan for plan in answer.plans if _is_legal(job, plan.candidate))
    if not plans:
        job_of(job, answer.plans[0].candidate)  # says why
    return replace(answer, plans=plans)


def _is_legal(job: Job, candidate: Candidate) -> bool:
    try:
        job_of(job, candidate)
    except BadInputError:
        return False
    return True


def _judged(problem: Problem, written: Candidate | None, simulations: Simulations) -> Plan | None:
    """On as many accelerators of the cluster as the layout has ranks."""
    if written is None:
        return None
    try:
        own = problem.with_cluster(scale_cluster(problem.cluster, written.layout.world))
    except BadInputError:
        return None
    return rescore(own, [judge(own, written)], simulations)[0]


def _more_memory(problem: Problem, best: Plan, simulations: Simulations) -> list[Help]:
    """Another layout may then be the best."""
    cluster = problem.cluster
    chip = cluster.accelerator.model_copy(update={"memory_bytes": 2 * cluster.accelerator.memory_bytes})
    found = best_of(problem.with_cluster(cluster.model_copy(update={"accelerator": chip})), simulations)
    if found is None or found.seconds >= best.seconds * (1 - 1e-4):
        return []
    return [Help(f"memory doubled ({describe(found.candidate)})", found.seconds)]


def _placed(problem: Problem, best: Plan, slower: dict[int, float]) -> Placement | None:
    """Where there is more than one node."""
    cluster, layout = problem.cluster, best.candidate.layout
    fills = layout.world == cluster.world and fills_nodes(layout, cluster.accelerators_per_node)
    if cluster.nodes == 1 or not fills:
        return None
    return place(cluster, traffic_of(Costs(best.candidate.work(problem), cluster)), slower)
