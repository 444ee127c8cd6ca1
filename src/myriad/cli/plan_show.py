"""What ``myriad plan`` prints: tables by rich, and the same as plain values for ``--json``."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from myriad.planner.curve_points import CurvePoint
from myriad.planner.interval import interval_ratio, promise
from myriad.planner.questions import describe
from myriad.planner.rescore import Plan
from myriad.planner.space import Problem
from myriad.units import format_bytes, format_count, format_duration, format_number, time_unit

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Figures", "figures", "show_curve", "show_helps", "show_ranking", "show_waterfalls"]


@dataclass(frozen=True)
class Figures:
    """Of a plan and a job's number of steps."""

    layout: str
    accelerators: int
    seconds: float
    mfu: float
    memory_bytes: float
    fits_probability: float
    tokens_per_second: float
    days: float
    dollars: float | None
    interval_ratio: float | None
    """Of the seconds, either way, nine times of ten; ``None``: nothing can be said."""

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def figures(problem: Problem, plan: Plan, steps: int) -> Figures:
    """What a plan comes to."""
    candidate, world = plan.candidate, plan.candidate.layout.world
    hours, price = plan.seconds * steps / 3600, problem.cluster.dollars_per_hour
    tokens = problem.global_batch * problem.model.sequence
    return Figures(
        layout=describe(candidate),
        accelerators=world,
        seconds=plan.seconds,
        mfu=plan.mfu,
        memory_bytes=candidate.memory_bytes,
        fits_probability=candidate.fits,
        tokens_per_second=tokens / plan.seconds,
        days=hours / 24,
        dollars=None if price is None else price * world * hours,
        interval_ratio=interval_ratio(problem.cluster),
    )


def show_ranking(
    console: "Console", problem: Problem, rows: Sequence[tuple[str, Plan]], steps: int, *, title: str
) -> None:
    """Two lines for each plan; what stands before it is its rank."""
    names = ("s/iteration", "MFU", "memory", "fits", "tokens/s", "time", "cost")
    lines = []
    for rank, plan in rows:
        found = figures(problem, plan, steps)
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
    _show_promise(console, problem)


def _show_promise(console: "Console", problem: Problem) -> None:
    if said := promise(problem.cluster):
        console.print(said, style="dim", highlight=False)


@dataclass(frozen=True)
class _Line:
    """A plan in a list: a layout is too long to stand in one line with its figures."""

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


def _cost(found: Figures) -> str:
    return "" if found.dollars is None else f"${format_count(found.dollars)}"


def _switched_off(plan: Plan) -> str:
    layout, overlap = plan.candidate.layout, plan.candidate.overlap
    matters = {
        "tensor": layout.tp > 1,
        "pipeline": layout.pp > 1,
        "data": layout.dp > 1,
        "optimizer": layout.dp > 1 and layout.zero > 0,
    }
    off = [name for name, does in matters.items() if does and not getattr(overlap, name)]
    return f" (overlap off: {', '.join(off)})" if off else ""


def _share(ratio: float) -> str:
    """A percentage that is never rounded to nothing."""
    return f"{ratio:.1%}" if ratio >= 0.001 else f"{format_number(100 * ratio, 2)}%"


def show_waterfalls(
    console: "Console", parts: Mapping[str, float], others: Sequence[tuple[str, Mapping[str, float]]]
) -> None:
    """The plan's parts, then what each neighbour loses and where most."""
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
    """A time in the unit of a table, with as many decimals as give ``total`` four digits."""
    scale = time_unit(total)[1]
    decimals = max(0, 3 - math.floor(math.log10(total / scale)))
    return f"{seconds / scale:{sign},.{decimals}f}"


def _most(parts: Mapping[str, float], theirs: Mapping[str, float]) -> str:
    """The part that differs most."""
    total = sum(parts.values())
    gap, name = max(((theirs[name] - parts[name], name) for name in parts), key=lambda gap: abs(gap[0]))
    if abs(gap) <= 1e-4 * total:
        return "nothing"
    return f"{name} {_timed(gap, total, '+')} {time_unit(total)[0]}"


def show_helps(console: "Console", seconds: float, helps: Sequence[tuple[str, float]]) -> None:
    """The most helpful first."""
    from rich.table import Table

    table = Table(box=None, title="what would help most", title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column(time_unit(seconds)[0], justify="right")
    table.add_column("", justify="right")
    for what, better in helps[:8]:
        table.add_row(what, _timed(better, seconds), f"{better / seconds - 1:+.1%}")
    console.print(table)


def show_curve(
    console: "Console",
    rows: Sequence[tuple[Problem, Plan | None]],
    points: Sequence[CurvePoint],
    steps: int,
) -> None:
    """What each number of accelerators comes to, with what was published of it."""
    names = ("s/iteration", "MFU", "tokens/s", "time", "cost")
    lines = []
    for problem, plan in rows:
        world = problem.cluster.world
        told = "; ".join(_published(point) for point in points if point.accelerators == world)
        if plan is None:
            lines.append(_Line(str(world), "nothing fits", (), told))
            continue
        found = figures(problem, plan, steps)
        cells = (
            format_number(found.seconds, 4),
            _share(found.mfu),
            format_count(found.tokens_per_second),
            format_duration(86400 * found.days),
            _cost(found),
        )
        lines.append(_Line(str(world), found.layout, cells, told))
    _show_lines(console, "by number of accelerators", names, lines)
    _show_promise(console, rows[0][0])


def _published(point: CurvePoint) -> str:
    rate = format_count(point.tokens_per_second)
    return f"{point.system} {point.mfu:.1%}, {rate} tokens/s, batch {point.global_batch}"
