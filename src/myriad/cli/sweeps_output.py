"""The planner's choice in each sweep of layouts, as ``myriad validate`` prints it."""

from collections.abc import Sequence
from math import isnan
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from myriad.planner import LayoutSweep, SweepSummary, TableResult

__all__ = ["print_sweeps", "sweeps_json"]


def sweeps_json(results: "Sequence[TableResult]") -> dict[str, Any]:
    """Return the sweeps, and their summary: ``None`` where tables have no sweep."""
    from myriad.planner import layout_sweeps, summarize_sweeps

    sweeps = layout_sweeps(results)
    return {
        "sweeps": [_sweep(one) for one in sweeps],
        "sweeps_summary": _summary(summarize_sweeps(sweeps)) if sweeps else None,
    }


def _sweep(one: "LayoutSweep") -> dict[str, Any]:
    _, pairs = one.ordered_pairs
    return {
        "name": one.name,
        "table": one.table,
        "framework": one.framework,
        "rows": one.num_rows,
        "layouts": len(one.layouts),
        "pairs": pairs,
        "regret": one.regret,
        "tau": one.tau,
        "chosen": one.chosen.name,
        "chosen_seconds": one.chosen.seconds,
        "best": one.best.name,
        "best_seconds": one.best.seconds,
    }


def _summary(one: "SweepSummary") -> dict[str, Any]:
    return {
        "sweeps": one.num_sweeps,
        "median_regret": one.median_regret,
        "worst_regret": one.worst_regret,
        "regret_within_10_percent": one.num_close_regrets,
        "taus": one.num_taus,
        "median_tau": _number(one.median_tau),
        "tau_at_least_0.8": one.num_close_taus,
        "all_pairs_tau": _number(one.all_pairs_tau),
    }


def _number(value: float) -> float | None:
    return None if isnan(value) else value


def print_sweeps(console: "Console", results: "Sequence[TableResult]") -> None:
    """Print a line for each sweep, and a summary, if there are sweeps."""
    from rich.table import Table as Grid

    from myriad.planner import layout_sweeps, summarize_sweeps

    sweeps = layout_sweeps(results)
    if not sweeps:
        return
    grid = Grid(
        title="Choice of a layout", title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0)
    )
    grid.add_column("sweep", overflow="fold")
    grid.add_column("framework", no_wrap=True)
    for name in ("rows", "best s", "chosen s", "regret", "pairs", "tau"):
        grid.add_column(name, justify="right", no_wrap=True)
    for one in sweeps:
        _, pairs = one.ordered_pairs
        grid.add_row(
            one.name,
            one.framework,
            str(one.num_rows),
            f"{one.best.seconds:.3f}",
            f"{one.chosen.seconds:.3f}",
            f"{one.regret:.1%}",
            str(pairs),
            "" if one.tau is None else f"{one.tau:.2f}",
        )
    console.print(grid)
    console.print(_LEGEND, style="dim")
    console.print(_summary_line(summarize_sweeps(sweeps)), "")


def _summary_line(one: "SweepSummary") -> str:
    line = f"Choice in {one.num_sweeps} sweep{'s' * (one.num_sweeps > 1)}: "
    line += f"regret {one.median_regret:.1%} in the median, "
    line += f"{one.worst_regret:.1%} at worst, at most 10 % in {one.num_close_regrets}"
    if not one.num_taus:
        return f"{line}."
    taus = f"tau {one.median_tau:.2f} in the median, at least 0.8 in {one.num_close_taus} of {one.num_taus}"
    return f"{line}; {taus}, {one.all_pairs_tau:.2f} over all pairs."


_LEGEND = """\
A sweep: three or more layouts of one job. regret: measured seconds of the layout with the smallest
prediction, beyond those of the fastest. tau: Kendall's, of predicted and measured order, over the
pairs whose measured seconds differ by more than 3 %."""
