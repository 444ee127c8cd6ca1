"""The tables that ``myriad network congestion`` prints."""

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from myriad.network.congestion_study import (
    TOLERANCE,
    ClaimCheck,
    CongestionRow,
    check_claims,
    steady_queues,
    worse_than_parents,
)
from myriad.units import format_number

__all__ = ["show"]

_NAMES = (
    "done\nms",
    "of\nfair",
    "queue\nkB p50",
    "\np99",
    "pauses\nms",
    "slow-\ndown p50",
    "\np99",
    "fair-\nness",
)


def show(rows: Sequence[CongestionRow], hosts: int) -> None:
    """Print a table for each scenario, then the published claims, then the hybrid compared with the controls
    that it combines."""
    console = Console()
    for _, each in groupby(rows, key=lambda row: row.scenario):
        _show_scenario(console, list(each))
    verdicts = check_claims(rows)
    if verdicts:
        console.print(Text("Published of these controls, and here:", style="bold"))
    for verdict in verdicts:
        console.print(_verdict(verdict), soft_wrap=True)
    for control, queue in steady_queues(rows, hosts).items():
        text = f"  {control} has a steady queue of {queue / 1e3:.0f} kB in a long incast (CoNEXT 2016)"
        console.print(Text(text, style="dim"), soft_wrap=True)
    _show_hybrid(console, worse_than_parents(rows))


def _show_scenario(console: Console, rows: Sequence[CongestionRow]) -> None:
    table = Table(
        title=f"{rows[0].scenario}: {rows[0].title} ({rows[0].level} level)", title_justify="left", box=None
    )
    table.add_column("control", no_wrap=True)
    for name in _NAMES:
        table.add_column(name, justify="right")
    for row in rows:
        done = f"{row.seconds * 1e3:.3f}" if not row.num_unfinished else f"{row.num_unfinished} never"
        table.add_row(
            row.control,
            done,
            f"{row.throughput_ratio:.1%}",
            _kilobytes(row.queue_median_bytes),
            _kilobytes(row.queue_p99_bytes),
            "" if row.pause_seconds is None else format_number(row.pause_seconds * 1e3),
            format_number(row.slowdown_median, 4),
            format_number(row.slowdown_p99, 4),
            "" if row.fairness is None else f"{row.fairness:.3f}",
        )
    console.print(table)
    console.print()


def _kilobytes(num_bytes: float | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 1e3:.0f}"


def _verdict(verdict: ClaimCheck) -> Text:
    claim = verdict.claim
    word, style = ("yes", "green") if verdict.holds else ("NO ", "red")
    figures = f"{claim.less} {format_number(verdict.less, 4)}, {claim.more} {format_number(verdict.more, 4)}"
    line = Text(f"  {word} ", style=style)
    return line.append(
        f"{claim.words}: {claim.scenario}, {claim.measure}: {figures} [{claim.source}]", "default"
    )


def _show_hybrid(console: Console, worse: dict[str, list[str]]) -> None:
    if worse:
        text = f"The hybrid control against its parents (differences of {TOLERANCE:.0%} or less are ignored):"
        console.print(Text(text, style="bold"))
    for scenario, losses in worse.items():
        text = "worse: " + ", ".join(losses) if losses else "at least as good in every measure"
        console.print(Text(f"  {scenario}: {text}"), soft_wrap=True)
