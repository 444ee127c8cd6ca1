"""The tables that ``myriad plan`` prints."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from myriad.forecasts.plan_answer import ExplainedPlan, FabricForecast
from myriad.forecasts.plan_curve import PlanCurve
from myriad.forecasts.plan_figures import PlanFigures, plan_figures
from myriad.planner import (
    CurvePoint,
    DimensionWarning,
    FabricDistribution,
    LayoutProblem,
    SimulatedPlan,
    describe_interval,
    describe_layout,
)
from myriad.reports.charts.pareto_chart import pareto_text
from myriad.units import format_bytes, format_count, format_duration, format_energy, format_number, time_unit

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["show_curve", "show_plan", "show_ranking", "show_warnings", "show_waterfalls"]

_MOST_NODES = 128
"""Largest number of nodes of an order that are printed."""


def show_plan(console: "Console", found: ExplainedPlan, files: Sequence[str]) -> None:
    """Print the ranking, the reasons, the order of nodes, and time against memory. ``files``: files that were
    written."""
    from myriad.forecasts.packed_documents import attended_note
    from myriad.forecasts.planned_job import planned_phase, planned_steps

    steps, phase = planned_steps(found.job), planned_phase(found.job)
    console.print(found.headline, highlight=False)
    if steps != found.job.train.steps:
        batch = f"{phase.train.global_batch} sequences of {phase.model.sequence} tokens"
        text = f"phases: planned for steps of {batch}; {steps:,} of them take the run's tokens"
        console.print(text, highlight=False, soft_wrap=True)
    if said := attended_note(phase, found.problem.attended):
        console.print(said, highlight=False, soft_wrap=True)
    if said := found.load_note:
        console.print(said, highlight=False, soft_wrap=True)
    show_warnings(console, found.warnings)
    show_ranking(console, found.problem, found.ranking(), steps, title=f"best for {steps:,} steps")
    show_waterfalls(console, found.parts, found.near)
    _show_helps(console, found.best.seconds, [(one.what, one.seconds) for one in found.improvements])
    if found.fabric is not None:
        _show_fabric(console, found.fabric)
    _show_placement(console, found)
    if (devices := found.device_order) is not None:
        visible = f"CUDA_VISIBLE_DEVICES={','.join(map(str, devices))}"
        text = f"{visible} on each node: neighbours in rank share the best links"
        console.print(text, highlight=False, soft_wrap=True)
    if found.island_size is not None:
        text = f"comm.island_size = {found.island_size}: this many ranks of a node share better links"
        console.print(text, highlight=False, soft_wrap=True)
    console.print("time against memory: · layouts that none beats in both, ● the plan", style="bold")
    for line in pareto_text(found.front(), found.point(found.best.candidate)):
        console.print(line, highlight=False)
    for file in files:
        console.print(file, highlight=False, soft_wrap=True)


def show_warnings(console: "Console", warnings: Sequence[DimensionWarning]) -> None:
    """Print a line for each warning."""
    for one in warnings:
        console.print(one.line, style="yellow", highlight=False, soft_wrap=True)


def _show_placement(console: "Console", found: ExplainedPlan) -> None:
    placed = found.placement
    if placed is None:
        if found.slower:
            why = "the plan does not fill whole nodes, so --straggler changes nothing"
            console.print(f"nodes: {why}", highlight=False)
        return
    if placed.is_plain:
        console.print("nodes: in their own order; no other order that was tried is quicker", highlight=False)
        return
    gain = 1 - placed.seconds / placed.plain_seconds
    console.print(f"comm.node_order, the nodes in the order of ranks ({gain:.1%} quicker):")
    console.print(" ".join(map(str, placed.order[:_MOST_NODES])), highlight=False)
    if len(placed.order) > _MOST_NODES:
        more = f"... and {len(placed.order) - _MOST_NODES:,} more: --out and --json have all"
        console.print(more, highlight=False)


def _show_fabric(console: "Console", found: FabricForecast) -> None:
    from rich.table import Table

    draws = len(found.rows[0][2].seconds)
    title = f"on its switches: {draws} draws of their hash seeds, nodes as they are numbered"
    table = Table(box=None, title=title, title_justify="left", title_style="bold")
    table.add_column("", justify="right")
    table.add_column("")
    for name in ("plain", "p50", "p95", "slowest ring"):
        table.add_column(name, justify="right")
    for rank, plan, one in found.rows:
        seconds = f"{format_number(plan.seconds, 4)} s"
        table.add_row(rank, describe_layout(plan.candidate), seconds, *_fabric_cells(one))
    if found.placed is not None:
        table.add_row("", "1, its nodes in the order below", "", *_fabric_cells(found.placed), style="bold")
    console.print(table)


def _fabric_cells(one: FabricDistribution) -> tuple[str, str, str]:
    return f"{format_number(one.p50, 4)} s", f"{format_number(one.p95, 4)} s", f"{one.ring:.2f}"


def show_ranking(
    console: "Console",
    problem: LayoutProblem,
    rows: Sequence[tuple[str, SimulatedPlan]],
    steps: int,
    *,
    title: str,
) -> None:
    """Print two lines for each plan: rank and layout, then its figures."""
    names = ("s/iteration", "MFU", "memory", "fits", "tokens/s", "time", "cost")
    lines = []
    for rank, plan in rows:
        found = plan_figures(problem, plan, steps)
        cells = (
            format_number(found.seconds, 4),
            _share(found.mfu),
            format_bytes(found.memory_bytes),
            f"{found.fits_probability:.0%}",
            format_count(found.tokens_per_second),
            format_duration(86400 * found.days),
            _cost(found),
        )
        elsewhere = "" if found.accelerators == problem.cluster.world else f", on {found.accelerators:,}"
        lines.append(_Line(rank, found.layout + elsewhere + _switched_off(plan), cells))
    _show_lines(console, title, names, lines)
    best = next((plan for rank, plan in rows if rank == "1"), None)
    if best is not None and (said := _totals(problem, plan_figures(problem, best, steps))):
        console.print(said, style="dim", highlight=False)
    _show_promise(console, problem)


def _totals(problem: LayoutProblem, found: PlanFigures) -> str:
    """Return what the first plan costs and draws, or an empty string where neither is known."""
    cluster, said = problem.cluster, []
    if found.dollars is not None and cluster.price is not None:
        said.append(f"{_cost(found)} (${cluster.price:,.2f} for an hour of one accelerator)")
    if found.megawatt_hours is not None:
        said.append(f"{format_energy(1e6 * found.megawatt_hours)} ({cluster.power:,.0f} W each)")
    return f"plan 1: {', '.join(said)}" if said else ""


def _show_promise(console: "Console", problem: LayoutProblem) -> None:
    has_experts = problem.model.experts is not None
    if said := describe_interval(problem.cluster, problem.framework, has_experts=has_experts):
        console.print(said, style="dim", highlight=False)


@dataclass(frozen=True)
class _Line:
    """A plan in a list, on two lines: the layout, then its figures."""

    rank: str
    layout: str
    cells: tuple[str, ...]
    note: str = ""


def _show_lines(console: "Console", title: str, names: Sequence[str], lines: Sequence[_Line]) -> None:
    from rich.text import Text

    used = [i for i in range(len(names)) if any(line.cells[i : i + 1] > ("",) for line in lines)]
    widths = {i: max(len(names[i]), *(len("".join(line.cells[i : i + 1])) for line in lines)) for i in used}
    margin = max(len(line.rank) for line in lines)
    head = "  ".join(names[i].rjust(widths[i]) for i in used)
    console.print(Text(title, style="bold"))
    console.print(Text(f"{'':>{margin}}  {head}", style="dim"))
    for line in lines:
        style = "bold" if line.rank == "1" else ""
        console.print(Text(f"{line.rank:>{margin}}  {line.layout}", style=style), soft_wrap=True)
        figures_line = "  ".join("".join(line.cells[i : i + 1]).rjust(widths[i]) for i in used)
        if line.cells:
            console.print(Text(f"{'':>{margin}}  {figures_line}", style=style))
        if line.note:
            console.print(Text(f"{'':>{margin}}  published: {line.note}", style="dim"), soft_wrap=True)


def _cost(found: PlanFigures) -> str:
    return "" if found.dollars is None else f"${format_count(found.dollars)}"


def _switched_off(plan: SimulatedPlan) -> str:
    layout, overlap = plan.candidate.layout, plan.candidate.overlap
    matters = {
        "tensor": layout.tp > 1,
        "pipeline": layout.pp > 1,
        "data": layout.num_holders > 1,
        "optimizer": layout.num_holders > 1 and layout.zero > 0,
    }
    off = [name for name, does in matters.items() if does and not getattr(overlap, name)]
    return f" (overlap off: {', '.join(off)})" if off else ""


def _share(ratio: float) -> str:
    """Return a percentage that is never rounded to zero."""
    return f"{ratio:.1%}" if ratio >= 0.001 else f"{format_number(100 * ratio, 2)}%"


def show_waterfalls(
    console: "Console", parts: Mapping[str, float], others: Sequence[tuple[str, Mapping[str, float]]]
) -> None:
    """Print the parts of the iteration, then the loss of each neighbouring layout and its cause."""
    from rich.table import Table

    total = sum(parts.values())
    unit, _ = time_unit(total)
    table = Table(box=None, title="where the time goes", title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column(unit, justify="right")
    table.add_column("", justify="right")
    table.add_column("")
    for name, seconds in parts.items():
        if name == "checkpoints" and not seconds:
            continue
        bar = "█" * round(40 * max(0.0, seconds) / total)
        table.add_row(name, _timed(seconds, total), f"{seconds / total:.1%}", f"[blue]{bar}[/blue]")
    table.add_row("iteration", _timed(total, total), "100%", "", style="bold")
    console.print(table)
    if not others:
        return
    near = Table(box=None, title="its neighbours", title_justify="left", title_style="bold")
    for name, side in (("with", "left"), (unit, "right"), ("slower by", "right"), ("mostly", "left")):
        near.add_column(name, justify="left" if side == "left" else "right")
    for what, theirs in sorted(others, key=lambda other: sum(other[1].values())):
        seconds = sum(theirs.values())
        near.add_row(what, _timed(seconds, total), f"{seconds / total - 1:+.1%}", _most(parts, theirs))
    console.print(near)


def _timed(seconds: float, total: float, sign: str = "") -> str:
    """Return a time in the unit of a table, with the decimals that show ``total`` with four digits."""
    scale = time_unit(total)[1]
    decimals = max(0, 3 - math.floor(math.log10(total / scale)))
    return f"{seconds / scale:{sign},.{decimals}f}"


def _most(parts: Mapping[str, float], theirs: Mapping[str, float]) -> str:
    """Return the part of the step time that differs most between two plans, with the difference."""
    total = sum(parts.values())
    gap, name = max(((theirs[name] - parts[name], name) for name in parts), key=lambda gap: abs(gap[0]))
    if abs(gap) <= 1e-4 * total:
        return "nothing"
    return f"{name} {_timed(gap, total, '+')} {time_unit(total)[0]}"


def _show_helps(console: "Console", seconds: float, helps: Sequence[tuple[str, float]]) -> None:
    """Print the improvements that would make the plan faster, largest gain first."""
    from rich.table import Table

    table = Table(box=None, title="what would help most", title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column(time_unit(seconds)[0], justify="right")
    table.add_column("", justify="right")
    for what, better in helps[:8]:
        table.add_row(what, _timed(better, seconds), f"{better / seconds - 1:+.1%}")
    console.print(table)


def show_curve(console: "Console", curve: PlanCurve) -> None:
    """Print the best plan on each number of accelerators, next to published measurements."""
    names = ("s/iteration", "MFU", "tokens/s", "time", "cost")
    lines = []
    for problem, plan in curve.rows:
        world = problem.cluster.world
        published = "; ".join(_published(point) for point in curve.points if point.accelerators == world)
        if plan is None:
            lines.append(_Line(str(world), "nothing fits", (), published))
            continue
        found = plan_figures(problem, plan, curve.steps)
        cells = (
            format_number(found.seconds, 4),
            _share(found.mfu),
            format_count(found.tokens_per_second),
            format_duration(86400 * found.days),
            _cost(found),
        )
        lines.append(_Line(str(world), found.layout, cells, published))
    _show_lines(console, "by number of accelerators", names, lines)
    _show_promise(console, curve.rows[0][0])


def _published(point: CurvePoint) -> str:
    rate = format_count(point.tokens_per_second)
    return f"{point.system} {point.mfu:.1%}, {rate} tokens/s, batch {point.global_batch}"
