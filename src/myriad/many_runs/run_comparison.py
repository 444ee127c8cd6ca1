"""Several runs at equal steps or tokens: a metric, the best validation, and the time that each run took.

    run A   ├───────────────┤
    run B       ├──────────────────────┤
                └── range ──┘  that all runs have; its end is where figures are compared

A value of a row is the mean over the steps since the row before, so that the noise of single steps does not
decide a comparison.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from myriad.errors import BadInputError
from myriad.many_runs.run_row import RunRow, read_row
from myriad.run import Run
from myriad.run.run_lines import STEP_FIELDS, figure_of
from myriad.system.jsonl import Record

__all__ = ["Axis", "ComparedRun", "RunComparison", "compare_runs"]

Axis = Literal["steps", "tokens"]
Series = Sequence[tuple[float, float]]
"""Points of a curve: position on the axis, and value."""
_FIELD_OF = {"steps": "step", "tokens": "tokens"}
_CHART_POINTS = 256


@dataclass(frozen=True)
class ComparedRun:
    """A run at the end of the common range."""

    row: RunRow
    label: str
    """Its name, or its path if another run has the same name."""
    value: float | None
    """The metric: mean over the last row's steps."""
    best_validation: float | None
    """Lowest validation loss in the range and before."""
    train_seconds: float
    """Time of its steps to the end of the range, without validation and checkpoints."""
    curve: Series
    """The metric over all of the run, as means over at most 256 parts."""


@dataclass(frozen=True)
class RunComparison:
    """Several runs beside each other."""

    axis: Axis
    metric: str
    first: float
    end: float
    """The range that all runs have."""
    runs: Sequence[ComparedRun]
    rows: Sequence[tuple[float, Sequence[float | None]]]
    """Position, and the metric of each run."""

    def as_json(self) -> dict[str, Any]:
        """Return plain values for ``--json``."""
        runs = [
            {
                "run": str(one.row.path),
                "name": one.label,
                "state": one.row.state,
                "value": one.value,
                "best_validation": one.best_validation,
                "train_seconds": one.train_seconds,
                "tokens_per_second": one.row.tokens_per_second,
                "mfu": one.row.mfu,
            }
            for one in self.runs
        ]
        rows = [{"at": at, "values": list(values)} for at, values in self.rows]
        return {"by": self.axis, "metric": self.metric, "end": self.end, "runs": runs, "rows": rows}


def compare_runs(
    runs: Sequence[Run], *, axis: Axis = "steps", metric: str = "loss", num_rows: int = 10
) -> RunComparison:
    """Compare runs over the range that all of them have.

    Raises `BadInputError` for a run without the metric, and for runs without a common range."""
    metrics, events = [run.read_metrics() for run in runs], [run.read_events() for run in runs]
    lines = [_lines_with_axis(found, axis) for found in metrics]
    points = [_points(run, found, axis, metric) for run, found in zip(runs, lines, strict=True)]
    first, end = max(one[0][0] for one in points), min(one[-1][0] for one in points)
    if first > end:
        allowed = f"must have {axis} in common with the other runs: one begins after another ends"
        raise BadInputError("RUN", [str(run.path) for run in runs], allowed)
    borders = _borders(first, end, num_rows, axis)
    columns = [_means([point for point in one if point[0] >= first], borders) for one in points]
    rows_of = list(map(read_row, runs, metrics, events))
    labels = _labels(rows_of)
    compared = [
        ComparedRun(
            row,
            label,
            column[-1],
            _best_validation(happened, found, axis, end),
            sum(figure_of(line.get("step_seconds")) or 0.0 for line in found if line[_FIELD_OF[axis]] <= end),
            _thinned(one),
        )
        for happened, row, label, column, found, one in zip(
            events, rows_of, labels, columns, lines, points, strict=True
        )
    ]
    rows = list(zip(borders, zip(*columns, strict=True), strict=True))
    return RunComparison(axis, metric, first, end, compared, rows)


def _lines_with_axis(lines: Sequence[Record], axis: Axis) -> list[Record]:
    return [line for line in lines if figure_of(line.get(_FIELD_OF[axis])) is not None]


def _points(run: Run, lines: Sequence[Record], axis: Axis, metric: str) -> list[tuple[float, float]]:
    found = [
        (float(line[_FIELD_OF[axis]]), value)
        for line in lines
        if (value := _value_of(line, metric)) is not None
    ]
    if not found and lines and metric not in STEP_FIELDS:
        names = sorted({name for line in lines for name in line.get("user") or {}})
        values = f" or one of its own values ({', '.join(names)})" if names else ""
        raise BadInputError("--metric", metric, f"must be a field of {run.metrics_path}{values}")
    if not found:
        raise BadInputError("RUN", str(run.path), f"must have steps with a {metric}")
    return found


def _value_of(line: Record, metric: str) -> float | None:
    value = line[metric] if metric in line else (line.get("user") or {}).get(metric)
    return figure_of(value)


def _borders(first: float, end: float, count: int, axis: Axis) -> list[float]:
    """Return the ends of ``count`` equal parts of the range; whole steps, each once."""
    parts = [first + (end - first) * (number + 1) / count for number in range(count)]
    rounded = [float(round(each)) for each in parts[:-1]] if axis == "steps" else parts[:-1]
    return sorted({*(each for each in rounded if first <= each < end), end})


def _means(points: Series, borders: Sequence[float]) -> list[float | None]:
    """Return the mean of the points of each part, which begins after the border before."""
    found: list[float | None] = []
    index = 0
    for border in borders:
        total, count = 0.0, 0
        while index < len(points) and points[index][0] <= border:
            total, count, index = total + points[index][1], count + 1, index + 1
        found.append(total / count if count else None)
    return found


def _thinned(points: Series) -> Series:
    """Return means over equal numbers of points, at most 256."""
    each = math.ceil(len(points) / _CHART_POINTS)
    parts = [points[start : start + each] for start in range(0, len(points), each)]
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]


def _best_validation(
    events: Sequence[Record], lines: Sequence[Record], axis: Axis, end: float
) -> float | None:
    position = {line["step"]: line[_FIELD_OF[axis]] for line in lines}
    losses = [
        loss
        for event in events
        if event["event"] == "validation"
        and (loss := figure_of(event.get("loss"))) is not None
        and position.get(event.get("step"), math.inf) <= end
    ]
    return min(losses, default=None)


def _labels(rows: Sequence[RunRow]) -> list[str]:
    names = [row.name for row in rows]
    return [row.name if names.count(row.name) == 1 else str(row.path) for row in rows]
