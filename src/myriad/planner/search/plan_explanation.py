"""Explanation of a plan: its seconds by cause, the seconds of neighbouring layouts, and the improvements that
save most.

A waterfall is computed by removing costs. The iteration is simulated as it is, then with free messages, then
also without data parallelism, then also without the optimizer, and without copies to host memory. The seconds
that each step saves are that part; the rest is the busiest rank's compute, by operators, and its bubble. The
seconds of snapshots come last. So the parts sum to the predicted time, apart from rounding. Every run uses
the same program.

A neighbouring layout differs in one dimension; everything else is the same, or as close as is legal.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import get_args

from myriad.comm.layout import ExpertDispatch
from myriad.planner.cluster_config import Cluster, Link, SlowNodes
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.cost.stage_costs import StageCosts
from myriad.planner.cost.stage_layers import cut_layers
from myriad.planner.search.layout_problem import LayoutCandidate, LayoutProblem, Sharding
from myriad.planner.search.layout_space import LayoutGrid, divisors, is_redundant, layout_grids
from myriad.planner.search.plan_ranking import SimulatedPlan
from myriad.planner.simulation.simulation_cache import SimulationCache
from myriad.planner.simulation.steady_state import num_simulated_forwards
from myriad.planner.workload import Workload
from myriad.program.build import count_chunks

__all__ = ["WATERFALL_PARTS", "Improvement", "improvements", "neighbour_layouts", "waterfall"]

WATERFALL_PARTS = (
    "matrix products",
    "attention",
    "memory-bound",
    "tensor parallelism",
    "expert parallelism",
    "context parallelism",
    "recomputation",
    "pipeline bubble",
    "pipeline messages",
    "data parallelism",
    "optimizer",
    "host copies",
    "slow nodes, host",
    "checkpoints",
)
"""Parts of a waterfall, in order. Host copies: of offloaded activations; those of optimizer state count as
optimizer. Slow nodes, host: the wait for the batch, and slow nodes. Checkpoints:
the seconds that snapshots add, on average over steps."""


class _Without(Costs):
    """The costs of the same layout with some costs removed."""

    def __init__(self, workload: Workload, cluster: Cluster, *gone: str) -> None:
        super().__init__(workload, cluster)
        self._gone = frozenset(gone)

    @cached_property
    def stages(self) -> list[StageCosts]:
        stages = super().stages
        if "data" in self._gone:
            stages = [replace(stage, gather=0.0, reduce=0.0) for stage in stages]
        if "optimizer" in self._gone:
            stages = [replace(stage, update=0.0, copy_state=0.0) for stage in stages]
        if "copies" in self._gone:
            stages = [replace(stage, copy_activations=0.0) for stage in stages]
        return stages

    @cached_property
    def message(self) -> float:
        return 0.0 if "messages" in self._gone else super().message

    def clip(self, own: float) -> float:
        return 0.0 if "optimizer" in self._gone else super().clip(own)

    @cached_property
    def tied(self) -> float:
        return 0.0 if "data" in self._gone else super().tied

    @cached_property
    def load(self) -> float:
        return 0.0 if "load" in self._gone else super().load


def waterfall(
    problem: LayoutProblem, candidate: LayoutCandidate, simulations: SimulationCache
) -> dict[str, float]:
    """Return the seconds of each of `WATERFALL_PARTS`."""
    workload, cluster = candidate.workload(problem), problem.cluster
    gone = ["messages", "data", "optimizer"]
    gone += ["copies"] if workload.layout.offload_activations else []
    gone += ["load"] if workload.profile.host_seconds else []
    steps = [
        simulations.without_snapshots(_Without(workload, cluster, *gone[:count]))
        for count in range(len(gone) + 1)
    ]
    saved = dict.fromkeys(("copies", "load"), 0.0)
    saved |= {name: before - after for name, (before, after) in zip(gone, pairwise(steps), strict=True)}
    costs = Costs(workload, cluster)
    operators, once_more = costs.busiest_rank
    again = float(once_more.total)
    compute = float(operators.total) + again
    slow = (cluster.expected_slowdown - 1) * compute
    values = (
        float(operators.matmul),
        float(operators.attention),
        float(operators.memory),
        float(operators.tensor),
        float(operators.experts),
        float(operators.context),
        again,
        steps[-1] - compute - slow,
        saved["messages"],
        saved["data"],
        saved["optimizer"],
        saved["copies"],
        saved["load"] + slow,
        costs.stall(steps[0]),
    )
    least = 1e-9 * steps[0]  # Rounding error of the differences.
    return {
        name: value if abs(value) > least else 0.0
        for name, value in zip(WATERFALL_PARTS, values, strict=True)
    }


@dataclass(frozen=True)
class Improvement:
    """The seconds of an iteration after one improvement of the cluster."""

    what: str
    seconds: float


def improvements(
    problem: LayoutProblem, plan: SimulatedPlan, parts: dict[str, float], simulations: SimulationCache
) -> list[Improvement]:
    """Return the seconds of the same layout with one improvement each, the largest saving first."""
    found = [Improvement("no pipeline bubble", plan.seconds - max(0.0, parts["pipeline bubble"]))]
    if plan.candidate.layout.busiest_load > 1:
        balanced = _changed(plan.candidate, expert_load=1.0)
        costs = Costs(balanced.workload(problem), problem.cluster)
        found.append(Improvement("equally loaded experts", simulations.seconds(costs)))
    for what, cluster in _better(problem.cluster):
        costs = Costs(plan.candidate.workload(problem), cluster)
        found.append(Improvement(what, simulations.seconds(costs)))
    return sorted((one for one in found if one.seconds < plan.seconds), key=lambda one: one.seconds)


def _better(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    chip, links = cluster.accelerator, cluster.links
    yield "matrix products twice as fast", _chip(cluster, "peak_flops_per_second", "float32_flops_per_second")
    yield "memory bandwidth doubled", _chip(cluster, "memory_bytes_per_second")
    yield (
        "operators launched in no time",
        cluster.model_copy(update={"accelerator": chip.model_copy(update={"launch_seconds": 0.0})}),
    )
    for level in ("node", "network", "spine"):
        link: Link | None = getattr(links, level)
        if link is not None:
            yield f"links.{level} twice as fast", _link(cluster, level, link, 2.0, 1.0)
            yield f"links.{level} with half the latency", _link(cluster, level, link, 1.0, 0.5)
    if cluster.slow_nodes.ratio:
        yield "no slow nodes", cluster.model_copy(update={"slow_nodes": SlowNodes()})


def _chip(cluster: Cluster, *names: str) -> Cluster:
    chip = cluster.accelerator
    doubled = {name: 2 * value for name in names if (value := getattr(chip, name)) is not None}
    return cluster.model_copy(update={"accelerator": chip.model_copy(update=doubled)})


def _link(cluster: Cluster, level: str, link: Link, rate: float, latency: float) -> Cluster:
    better = link.model_copy(
        update={
            "bytes_per_second": link.bytes_per_second * rate,
            "latency_seconds": link.latency_seconds * latency,
            "launch_seconds": link.launch_seconds * latency,
        }
    )
    return cluster.model_copy(update={"links": cluster.links.model_copy(update={level: better})})


_MOST_FORWARDS = 600_000
"""Largest number of forwards in the programs of all neighbours: more take tens of seconds."""
_SWITCHES = ("pipeline", "data", "optimizer")


def neighbour_layouts(
    problem: LayoutProblem, candidate: LayoutCandidate
) -> Iterator[tuple[str, LayoutCandidate]]:
    """Yield each neighbour with a description of the difference, as many as are simulated in a short time."""
    in_all = 0
    for what, other in _steps(problem, candidate):
        layout = other.layout
        if is_redundant(layout.pp, layout.virtual_stages, layout.zero):
            continue
        layers = cut_layers(problem.model, layout.partition, layout.num_stages)
        num_chunks = count_chunks(layout, other.overlap, layers)
        whole = problem.global_batch // (layout.dp * layout.micro_batch)
        in_all += num_simulated_forwards(layout, num_chunks, whole)
        if in_all <= _MOST_FORWARDS:
            yield what, other


def _steps(problem: LayoutProblem, candidate: LayoutCandidate) -> Iterator[tuple[str, LayoutCandidate]]:
    layout = candidate.layout
    grids = list(layout_grids(problem))
    rows = layout.cp, layout.ulysses
    every = {
        (grid.tp, grid.pp, grid.ep, grid.expert_tp): grid for grid in grids if (grid.cp, grid.ulysses) == rows
    }
    alike = (grid for key, grid in every.items() if key[:3] == (layout.tp, layout.pp, layout.ep))
    home = next((found for grid in alike if (found := grid.with_etp(layout.expert_tp))), None)
    if home is None:
        return
    yield from _other_grids(every, home, candidate)
    yield from _other_contexts(grids, home, candidate)
    yield from _other_schedules(home, candidate)
    yield from _other_sizes(home, candidate)
    yield from _other_shards(home, candidate)
    for again in problem.recomputes:
        if again != candidate.layout.recompute:
            yield f"recompute {again}", _changed(candidate, recompute=again)
    for dispatch in get_args(ExpertDispatch) if layout.ep > 1 else ():
        if dispatch != layout.expert_dispatch:
            yield f"expert_dispatch {dispatch}", _changed(candidate, expert_dispatch=dispatch)
    yield from _other_offloads(problem, candidate)
    if problem.searches_overlap:
        yield from _other_overlaps(home, candidate)


def _changed(candidate: LayoutCandidate, **values: object) -> LayoutCandidate:
    return replace(candidate, layout=candidate.layout.model_copy(update=values))


def _other_grids(
    every: dict[tuple[int, int, int, int], LayoutGrid], home: LayoutGrid, candidate: LayoutCandidate
) -> Iterator[tuple[str, LayoutCandidate]]:
    """Yield the layouts that differ in one degree. In another tp, pp or ep, all tensor-parallel ranks or as
    many as here share the width of experts, if such a layout is legal."""
    own = home.tp, home.pp, home.ep
    degrees = {key[:3] for key in every}
    for place, name in enumerate(("tp", "pp", "ep")):
        others = [one for one in degrees if all(one[i] == own[i] for i in range(3) if i != place)]
        for value in _beside(sorted(one[place] for one in others), own[place]):
            key = next(one for one in others if one[place] == value)
            alike = (grid for place, grid in every.items() if place[:3] == key)
            yield from _moved(min(alike, key=partial(_unlike, home)), candidate, f"{name} {value}")
    widths = {width: grid for width in divisors(home.tp) if (grid := home.with_etp(width))}
    for width in _beside([*widths], home.expert_tp):
        yield from _moved(widths[width], candidate, f"etp {width}")


def _unlike(home: LayoutGrid, grid: LayoutGrid) -> tuple[bool, int]:
    """Return how far the width of experts is shared otherwise on one grid than on another."""
    return (grid.etp is None) != (home.etp is None), abs(grid.expert_tp - home.expert_tp)


def _other_contexts(
    grids: Sequence[LayoutGrid], home: LayoutGrid, candidate: LayoutCandidate
) -> Iterator[tuple[str, LayoutCandidate]]:
    """Yield the layouts in which other numbers of ranks share a sequence."""
    own = home.tp, home.pp, home.ep
    same = (grid.with_etp(home.expert_tp) for grid in grids if (grid.tp, grid.pp, grid.ep) == own)
    alike = {(grid.cp, grid.ulysses): grid for grid in same if grid is not None}.values()
    for cp in _beside(sorted({grid.cp for grid in alike}), home.cp):
        grid = min((one for one in alike if one.cp == cp), key=lambda one: abs(one.ulysses - home.ulysses))
        yield from _moved(grid, candidate, f"cp {cp}")
    for grid in alike:
        if grid.cp == home.cp and grid.ulysses != home.ulysses:
            yield from _moved(grid, candidate, f"ulysses {grid.ulysses}")


def _moved(grid: LayoutGrid, candidate: LayoutCandidate, what: str) -> Iterator[tuple[str, LayoutCandidate]]:
    """Yield the layout on another grid, with the same schedule and the same total of stages where
    possible."""
    layout = candidate.layout
    stages = [v for name, v in grid.schedules if name == layout.schedule_name]
    if grid.pp == 1 or layout.pp == 1:
        stages = [1]
    if not stages:
        return
    v = min(stages, key=lambda v: abs(v * grid.pp - layout.num_stages))
    size = min(grid.micro_batches, key=lambda size: abs(size - layout.micro_batch))
    name = layout.schedule_name if (layout.schedule_name, v) in grid.schedules else "1f1b"
    zero, reduce = (layout.zero, layout.reduce) if grid.num_holders > 1 else (0, "last")
    group = layout.shard_group
    if Sharding(zero, reduce, group) not in grid.shards:
        group = None
    found = _changed(
        candidate,
        dp=grid.dp,
        tp=grid.tp,
        pp=grid.pp,
        cp=grid.cp,
        ulysses=grid.ulysses,
        ep=grid.ep,
        etp=grid.etp,
        expert_dispatch=grid.experts.dispatch,
        virtual_stages=v,
        schedule=name,
        micro_batch=size,
        zero=zero,
        reduce=reduce,
        shard_group=group,
    )
    extra = f" x {v}" if v not in (1, layout.virtual_stages) else ""
    other_size = f", micro-batch {size}" if size != layout.micro_batch else ""
    yield f"{what}{extra}, dp {grid.dp}{other_size}", found


def _beside(values: list[int], value: int) -> list[int]:
    place = values.index(value)
    return values[max(0, place - 1) : place] + values[place + 1 : place + 2]


def _other_schedules(home: LayoutGrid, candidate: LayoutCandidate) -> Iterator[tuple[str, LayoutCandidate]]:
    layout = candidate.layout
    same = sorted(v for name, v in home.schedules if name == layout.schedule_name)
    for v in _beside(same, layout.virtual_stages) if layout.virtual_stages in same else ():
        yield f"virtual_stages {v}", _changed(candidate, virtual_stages=v)
    for name in dict.fromkeys(name for name, _ in home.schedules):
        if name == layout.schedule_name:
            continue
        stages = [v for other, v in home.schedules if other == name]
        v = min(stages, key=lambda v: abs(v - layout.virtual_stages))
        extra = f" x {v}" if v not in (1, layout.virtual_stages) else ""
        yield f"schedule {name}{extra}", _changed(candidate, schedule=name, virtual_stages=v)


def _other_sizes(home: LayoutGrid, candidate: LayoutCandidate) -> Iterator[tuple[str, LayoutCandidate]]:
    sizes = sorted(home.micro_batches)
    for size in _beside(sizes, candidate.layout.micro_batch):
        yield f"micro_batch {size}", _changed(candidate, micro_batch=size)


def _other_shards(home: LayoutGrid, candidate: LayoutCandidate) -> Iterator[tuple[str, LayoutCandidate]]:
    layout, shards = candidate.layout, list(home.shards)
    own = Sharding(layout.zero, layout.reduce, layout.shard_group)
    for shard in shards:
        near = abs(shard.zero - own.zero) <= 1
        changes = sum(a != b for a, b in zip(shard, own, strict=True))
        if changes == 1 and near:
            what = f"zero {shard.zero}, reduce {shard.reduce}"
            if shard.shard_group is not None:
                what += f", shard_group {shard.shard_group}"
            elif own.shard_group is not None:
                what += ", shard_group off"
            yield what, _changed(candidate, **shard._asdict())


def _other_overlaps(home: LayoutGrid, candidate: LayoutCandidate) -> Iterator[tuple[str, LayoutCandidate]]:
    layout, overlap = candidate.layout, candidate.overlap
    matters = {
        "tensor": layout.tp > 1,
        "pipeline": layout.pp > 1,
        "data": layout.num_holders > 1,
        "optimizer": layout.num_holders > 1
        and overlap.data
        and layout.zero > 0
        and not layout.offload_optimizer,
    }
    paired = candidate.in_pairs(home.problem)
    if paired is not None:
        named = paired.layout.schedule_name
        other = f", schedule {named}" if named != layout.schedule_name else ""
        yield f"overlap.pairs on{other}", paired
    elif overlap.pairs:
        yield "overlap.pairs off", _with_overlap(candidate, pairs=False)
    for kind in home.tensors:
        if matters["tensor"] and kind != overlap.tensor:
            yield f"overlap.tensor {kind or 'off'}", _with_overlap(candidate, tensor=kind)
    for name in _SWITCHES:
        if matters[name]:
            value = not getattr(overlap, name)
            what = f"overlap.{name} {'on' if value else 'off'}"
            yield what, _with_overlap(candidate, **{name: value})


def _other_offloads(
    problem: LayoutProblem, candidate: LayoutCandidate
) -> Iterator[tuple[str, LayoutCandidate]]:
    """Yield the layouts that differ in what is in host memory, one key at a time."""
    layout = candidate.layout
    for activations, optimizer in problem.offloads:
        if optimizer == layout.offload_optimizer and activations != layout.offload_activations:
            what = f"offload_activations {activations:g}"
            yield what, _changed(candidate, offload_activations=activations)
        if optimizer != layout.offload_optimizer and activations == layout.offload_activations:
            what = f"offload_optimizer {'on' if optimizer else 'off'}"
            yield what, _changed(candidate, offload_optimizer=optimizer)


def _with_overlap(candidate: LayoutCandidate, **changes: object) -> LayoutCandidate:
    return replace(candidate, overlap=candidate.overlap.model_copy(update=changes))
