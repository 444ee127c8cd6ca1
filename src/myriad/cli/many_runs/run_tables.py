"""The tables of `myriad runs` in the terminal."""

import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.text import Text

from myriad.cli.terminal_text import terminal_text
from myriad.errors import plain_value
from myriad.many_runs.run_diff import shown_value
from myriad.many_runs.run_table import is_in_layout_column, values_that_differ
from myriad.reports.charts.loss_chart import overlay_plot
from myriad.reports.charts.svg import SERIES
from myriad.units import format_bytes, format_count, format_duration, format_number

if TYPE_CHECKING:
    from rich.console import JustifyMethod
    from rich.table import Table

    from myriad.many_runs.run_comparison import RunComparison
    from myriad.many_runs.run_diff import RunDiff
    from myriad.many_runs.run_pruning import PrunePlan
    from myriad.many_runs.run_row import RunRow

__all__ = ["show_comparison", "show_diff", "show_list", "show_plan"]

_GAP, _NO_LIMIT = 2, 10_000
_LEAST_CHART, _MOST_CHART, _CHART_EDGE = 20, 100, 11
_MOST_KEYS, _MOST_VALUE = 6, 60
_STYLES = {
    **dict.fromkeys(("starting", "training"), "bold green"),
    **dict.fromkeys(("hangs", "failed", "unreadable"), "red"),
    "interrupted": "yellow",
}
_RIGHT = ("steps", "loss", "best validation", "tokens/s", "MFU", "duration", "size")
_FIGURES = ("loss", "best validation", "tokens/s", "MFU")
_LEFT_OUT_FIRST = ("differs", "tags", "job", "started", "duration", "layout", "MFU", "tokens/s", "steps")
"""Columns that a narrow terminal leaves out, in this order. "differs" moves below the table."""


def show_list(rows: Sequence["RunRow"], keys: Sequence[str], place: str) -> None:
    """Print the table of runs. ``keys``: those in which their jobs differ."""
    from rich.console import Console

    if not rows:
        _print(f"{place}: no run found")
        return
    columns = _list_columns(rows, keys)
    console = Console(highlight=False)
    width = console.width if console.is_terminal or "COLUMNS" in os.environ else _NO_LIMIT
    left_out = _left_out(columns, width)
    shown = {name: cells for name, cells in columns.items() if name not in left_out}
    table = _table(list(shown))
    for cells in zip(*shown.values(), strict=True):
        styles = (
            _STYLES.get(cell, "") if name == "state" else "" for name, cell in zip(shown, cells, strict=True)
        )
        table.add_row(*map(Text, cells, styles))
    Console(highlight=False, width=width).print(table)
    if "differs" in left_out:
        for name, text in zip(columns["run"], columns["differs"], strict=True):
            if text:
                _print(f"{name}: {text}")
    if missing := [name for name in columns if name in left_out and name != "differs"]:
        _print(f"the terminal is too narrow for: {', '.join(missing)}")


def _list_columns(rows: Sequence["RunRow"], keys: Sequence[str]) -> dict[str, list[str]]:
    """Return the cells of each column by its heading; without "tags" and "differs" if they are empty."""
    figures = list(zip(*map(figure_cells, rows), strict=True))
    columns: dict[str, list[str]] = {
        "run": [row.name for row in rows],
        "state": [row.state for row in rows],
        "job": [row.job_name or "" for row in rows],
        "layout": [row.layout for row in rows],
        "steps": [
            str(row.steps) if row.steps_planned is None else f"{row.steps}/{row.steps_planned}"
            for row in rows
        ],
        **{name: list(cells) for name, cells in zip(_FIGURES, figures, strict=True)},
        "started": [
            "" if row.started is None else f"{datetime.fromtimestamp(row.started):%Y-%m-%d %H:%M}"
            for row in rows
        ],
        "duration": ["" if row.seconds is None else format_duration(row.seconds) for row in rows],
        "tags": [" ".join(row.notes.tags) for row in rows],
        "differs": [row.problem or _differs(row, keys) for row in rows],
    }
    plain = {name: list(map(terminal_text, cells)) for name, cells in columns.items()}
    return {name: cells for name, cells in plain.items() if name not in ("tags", "differs") or any(cells)}


def _left_out(columns: Mapping[str, Sequence[str]], width: int) -> list[str]:
    """Return the columns to leave out so that the others fit."""
    widths = {name: max(map(cell_len, (name, *cells))) + _GAP for name, cells in columns.items()}
    left_out: list[str] = []
    for name in filter(columns.__contains__, _LEFT_OUT_FIRST):
        if sum(widths[one] for one in columns if one not in left_out) <= width:
            break
        left_out.append(name)
    return left_out


def figure_cells(row: "RunRow") -> list[str]:
    """Return the loss, the best validation loss, tokens per second and MFU as text."""
    best = "" if row.best_validation is None else f"{row.best_validation:.4f}"
    if best and row.best_validation_step is not None:
        best += f" @{row.best_validation_step}"
    return [
        "" if row.loss is None else f"{row.loss:.4f}",
        best,
        "" if row.tokens_per_second is None else format_count(row.tokens_per_second),
        "" if row.mfu is None else f"{row.mfu:.1%}",
    ]


def show_diff(names: Sequence[str], found: "RunDiff") -> None:
    """Print the differences of two runs."""
    parts = (
        ("job", [(one.key, one.before, one.after) for one in found.job], "off"),
        (
            "environment",
            [(key, *(shown_value(key, one) for one in pair)) for key, *pair in found.environment],
            "-",
        ),
    )
    for title, rows, nothing in parts:
        if not rows:
            _print(f"{title}: no difference")
            continue
        _print(_diff_table(title, names, rows, nothing))
    for name, events in zip(names, found.resumes, strict=True):
        for event in events:
            change = f"{_value(event.get('before'), 'off')} -> {_value(event.get('after'), 'off')}"
            _print(f"{name}: changed after step {event.get('step')}: {event.get('key')} = {change}")


def show_comparison(found: "RunComparison") -> None:
    """Print several runs beside each other: figures, a chart of the metric, and its values by row."""
    from rich.console import Console

    letters = [chr(ord("A") + index) for index in range(len(found.runs))]
    unit = found.axis.removesuffix("s")
    end = f"{unit} {found.end:,.0f}"
    table = _table(["", *(f"{letter} {one.label}" for letter, one in zip(letters, found.runs, strict=True))])
    figures: dict[str, list[str]] = {
        "state": [one.row.state for one in found.runs],
        "job, layout": [f"{one.row.job_name or ''}, {one.row.layout}" for one in found.runs],
        "steps": [str(one.row.steps) for one in found.runs],
        f"{found.metric} to {end}": [_number(one.value) for one in found.runs],
        f"best validation to {end}": [_number(one.best_validation) for one in found.runs],
        f"time of steps to {end}": [format_duration(one.train_seconds) for one in found.runs],
        "tokens/s": [figure_cells(one.row)[2] for one in found.runs],
        "MFU": [figure_cells(one.row)[3] for one in found.runs],
    }
    for name, cells in figures.items():
        table.add_row(*map(Text, map(terminal_text, (name, *cells))))
    _print(table)
    console = Console(highlight=False)
    width = min(_MOST_CHART, console.width - _CHART_EDGE - len(found.runs) * 2)
    if width >= _LEAST_CHART:
        console.print()
        for parts in overlay_plot([one.curve for one in found.runs], width=width, unit=unit):
            pieces = [(text, "" if owner is None else SERIES[owner % len(SERIES)]) for text, owner in parts]
            console.print(Text.assemble(*pieces), soft_wrap=True)
        console.print()
    table = _table([unit, *letters], right=True)
    for at, values in found.rows:
        table.add_row(f"{at:,.0f}", *map(_number, values))
    _print(table)


def show_plan(plan: "PrunePlan", place: str) -> None:
    """Print the runs that would be deleted, and the selected ones that stay."""
    for path, why in plan.stay.items():
        _print(f"stays: {path}: {why}")
    if not plan.delete:
        _print(f"{place}: no run to delete")
        return
    table = _table(["to delete", "state", "steps", "best validation", "last change", "size"])
    for row in plan.delete:
        changed = "" if row.changed is None else f"{datetime.fromtimestamp(row.changed):%Y-%m-%d %H:%M}"
        cells = (str(row.path), row.state, str(row.steps), figure_cells(row)[1], changed)
        table.add_row(*map(Text, map(terminal_text, (*cells, format_bytes(plan.num_bytes[row.path])))))
    _print(table)
    runs = "run" if len(plan.delete) == 1 else "runs"
    _print(f"{len(plan.delete)} {runs}, {format_bytes(plan.total_bytes)}")


def _number(value: float | None) -> str:
    return "" if value is None else format_number(value, 5)


def _diff_table(
    title: str, names: Sequence[str], rows: Sequence[tuple[str, Any, Any]], nothing: str
) -> "Table":
    table = _table([title, *names])
    for key, before, after in rows:
        table.add_row(*map(Text, (key, _value(before, nothing), _value(after, nothing))))
    return table


def _differs(row: "RunRow", keys: Sequence[str]) -> str:
    found = values_that_differ(row, [key for key in keys if not is_in_layout_column(key)])
    parts = [f"{key}={_value(value, 'off')}" for key, value in list(found.items())[:_MOST_KEYS]]
    more = len(found) - _MOST_KEYS
    return ", ".join(parts) + (f" and {more} more" if more > 0 else "")


def _value(value: Any, nothing: str) -> str:
    text = nothing if value is None else plain_value(value)
    text = terminal_text(text)
    return text if len(text) <= _MOST_VALUE else f"{text[: _MOST_VALUE - 3]}..."


def _table(headings: Sequence[str], *, right: bool = False) -> "Table":
    from rich.table import Table

    table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="bold")
    for heading in headings:
        justify: JustifyMethod = "right" if right or heading in _RIGHT else "left"
        table.add_column(Text(terminal_text(heading)), justify=justify, overflow="fold")
    return table


def _print(value: "str | Table") -> None:
    from rich.console import Console

    if isinstance(value, str):
        Console(highlight=False).print(terminal_text(value), markup=False, soft_wrap=True)
    else:
        Console(highlight=False).print(value)
