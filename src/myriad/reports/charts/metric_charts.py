"""A chart for every number in the metrics of a run, as on the page: for reports and notebooks.

The MFU of a step is that of `myriad.run.run_speed`, not the one in the line: the peak may have risen since.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from myriad.reports.charts.loss_chart import (
    loss_series,
    loss_svg,
    phase_marks,
    steps_svg,
    thinned,
    validation_series,
)
from myriad.run.run_lines import figure_of
from myriad.run.run_speed import Peaks
from myriad.system.jsonl import Record

__all__ = ["CHART_AXES", "ChartAxis", "MetricCharts", "figures_of"]

ChartAxis = Literal["steps", "tokens", "time"]
CHART_AXES = {"steps": ("step", "step"), "tokens": ("tokens", "tokens"), "time": ("time", "seconds")}
"""Column and text of each horizontal axis; time counts from the first step."""
_OWN, _LARGEST = "user", 1e300
_NO_CHART = ("step", "time", "tokens", "flops", "noise_gradient", "noise_variance", "skipped", "overflow")
"""Numbers that are axes, or parts of other charts."""
_TITLES = {
    "loss": ("loss", "loss (nats a token)"),
    "learning_rate": ("learning rate", "learning rate"),
    "grad_norm": ("gradient norm", "norm"),
    "tokens_per_second": ("tokens per second", "tokens a second"),
    "mfu": ("MFU", "share of the peak"),
    "step_seconds": ("time of a step", "seconds"),
    "exposed_comm_seconds": ("exposed communication", "seconds"),
    "data_wait_seconds": ("wait for data", "seconds"),
    "checkpoint_wait_seconds": ("wait for checkpoints", "seconds"),
    "memory_bytes": ("memory of rank 0", "bytes"),
    "prediction_loss": ("loss of the prediction layers", "nats a token"),
    "max_attention_logit": ("largest attention logit", "logit"),
    "expert_load": ("load of the busiest expert", "times the mean"),
    "dropped_share": ("tokens dropped by experts", "share of their pairs"),
    "router_entropy": ("entropy of routers", "share of the largest"),
    "noise_scale": ("gradient noise scale", "tokens"),
    "loss_scale": ("loss scale", "factor"),
}
"""Title and vertical axis of each chart, in order; further numbers follow under their own names."""


def figures_of(line: Record) -> dict[str, float | None]:
    """Return the numbers of a line by column, those of `myriad.log` as ``user/NAME``; ``None``: not
    finite."""
    found = {
        key: figure_of(value)
        for key, value in line.items()
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    }
    own = line.get(_OWN) or {}
    return found | {f"{_OWN}/{name}": figure_of(value) for name, value in own.items()}


class MetricCharts:
    """The charts of one run's lines, which are read in one pass."""

    def __init__(self, metrics: Sequence[Record], events: Sequence[Record]) -> None:
        self._metrics, self._events, self._peaks = metrics, events, Peaks(events)
        self._columns: dict[str, list[tuple[int, float]]] = {name: [] for name in _TITLES}
        """Index of the line, and value, of each number."""
        for index, line in enumerate(metrics):
            self._add(index, line, "")
            if own := line.get(_OWN):
                self._add(index, own, f"{_OWN}/")
        if metrics and self._peaks.mfu(metrics[-1]) is not None:
            self._columns["mfu"] = [
                (index, 1.0) for index in range(len(metrics))
            ]  # computed where it is drawn

    def _add(self, index: int, values: Mapping[str, Any], prefix: str) -> None:
        for key, value in values.items():
            kind = type(value)
            if (kind is float or kind is int) and -_LARGEST < value < _LARGEST:
                self._columns.setdefault(prefix + key, []).append((index, value))

    def names(self) -> list[str]:
        """Return the names of all curves: numbers of at least two steps that are not all 0."""
        return [
            name
            for name, found in self._columns.items()
            if name not in _NO_CHART and len(found) > 1 and any(value for _, value in found)
        ]

    def svg(self, name: str, by: ChartAxis = "steps", most_points: int = 1000) -> str | None:
        """Return the chart of a number; ``None``: it has no curve. The loss by steps has validations and
        phases."""
        if name == "loss" and by == "steps":
            training, validation = loss_series(self._metrics, self._events)
            average, marks = validation_series(self._events, "ema_loss"), phase_marks(self._events)
            drawn = thinned(training, most_points)
            return loss_svg(drawn, validation, "loss", average, marks) if len(training) > 1 else None
        found = thinned(self._columns.get(name, []), most_points) if name not in _NO_CHART else []
        points = list(self._points(name, found, by))
        own = name.removeprefix(f"{_OWN}/") if name.startswith(f"{_OWN}/") else name.replace("_", " ")
        title, up = _TITLES.get(name, (own, own))
        return steps_svg(points, title, up, CHART_AXES[by][1]) if len(points) > 1 else None

    def _points(
        self, name: str, found: Sequence[tuple[float, float]], by: ChartAxis
    ) -> Iterator[tuple[float, float]]:
        """Yield place and value of each step that has both. Places rise, although a clock may jump back."""
        column = CHART_AXES[by][0]
        began = self._columns.get(column, [(0, 0.0)])[0][1] if by == "time" else 0.0
        before = -math.inf
        for index, number in found:
            line = self._metrics[int(index)]
            at, value = figure_of(line.get(column)), self._peaks.mfu(line) if name == "mfu" else number
            if at is not None and value is not None:
                before = max(before, at - began)
                yield before, value
