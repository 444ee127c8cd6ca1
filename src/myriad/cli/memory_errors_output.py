"""Predicted peak memory beside measured, as ``myriad validate`` prints it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from myriad.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from myriad.planner import MemoryErrors, PredictedMemory, TableResult

__all__ = ["memory_json", "print_memory"]


def memory_json(results: "Sequence[TableResult]") -> dict[str, Any]:
    """Return errors by framework, and rows; both are empty for tables without memory."""
    from myriad.planner import memory_errors, predict_memory

    tables = [(result.table.name, predict_memory(result)) for result in results]
    every = [one for _, rows in tables for one in rows]
    return {
        "frameworks": [_framework(one) for one in memory_errors(every)],
        "rows": [{"table": name} | _row(one) for name, rows in tables for one in rows],
    }


def _framework(one: "MemoryErrors") -> dict[str, Any]:
    return {
        "framework": one.framework,
        "rows": len(one.rows),
        "out_of_memory_rows": one.num_out_of_memory,
        "allocated_rows": len(one.allocated),
        "allocated_median_error_ratio": one.allocated_median,
        "reserved_rows": len(one.reserved),
        "reserved_median_error_ratio": one.reserved_median,
        "fits_right_ratio": one.fits_right_ratio,
    }


def _row(one: "PredictedMemory") -> dict[str, Any]:
    return {
        "row": one.row.name,
        "framework": one.row.framework,
        "allocated_bytes": one.measured.allocated_bytes,
        "predicted_allocated_bytes": one.allocated_bytes,
        "allocated_error_ratio": one.allocated_error,
        "reserved_bytes": one.measured.reserved_bytes,
        "predicted_reserved_bytes": one.reserved_bytes,
        "reserved_error_ratio": one.reserved_error,
        "out_of_memory": one.measured.ran_out,
        "predicted_needed_bytes": one.needed_bytes,
        "predicted_fits_probability": one.fit_probability,
    }


def print_memory(console: "Console", results: "Sequence[TableResult]", *, rows: bool) -> None:
    """Print the errors of each framework, and with ``rows`` those of each row, if there is memory."""
    from myriad.planner import memory_errors, predict_memory

    found = [one for result in results for one in predict_memory(result)]
    if not found:
        return
    if rows:
        console.print(_rows(found), "")
    grid = _grid("Peak memory by framework")
    grid.add_column("framework", no_wrap=True)
    for name in ("rows", "ran out", "allocated", "reserved", "fits right"):
        grid.add_column(name, justify="right", no_wrap=True)
    for one in memory_errors(found):
        grid.add_row(
            one.framework,
            str(len(one.rows)),
            str(one.num_out_of_memory),
            _ratio(one.allocated_median),
            _ratio(one.reserved_median),
            f"{one.fits_right_ratio:.1%}",
        )
    console.print(grid)
    console.print(_LEGEND, style="dim")
    console.print("")


_LEGEND = """\
allocated, reserved: median errors of the peak of tensors, and of what the allocator holds.
fits right: share of rows that ran or ran out of memory as predicted."""


def _rows(found: "Sequence[PredictedMemory]") -> "Table":
    grid = _grid("Peak memory, row by row")
    grid.add_column("row", overflow="fold")
    for name in ("allocated", "predicted", "error", "reserved", "predicted", "error", "fits"):
        grid.add_column(name, justify="right", no_wrap=True)
    for one in found:
        measured = one.measured
        grid.add_row(
            one.row.name,
            _size(measured.allocated_bytes),
            _size(one.allocated_bytes),
            _signed(one.allocated_error),
            "ran out" if measured.ran_out else _size(measured.reserved_bytes),
            _size(one.reserved_bytes),
            _signed(one.reserved_error),
            f"{one.fit_probability:.0%}",
        )
    return grid


def _grid(title: str) -> "Table":
    from rich.table import Table

    return Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))


def _size(num_bytes: float | None) -> str:
    return "" if num_bytes is None else format_bytes(int(num_bytes))


def _signed(error: float | None) -> str:
    return "" if error is None else f"{error:+.1%}"


def _ratio(error: float | None) -> str:
    return "" if error is None else f"{error:.1%}"
