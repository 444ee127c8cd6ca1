"""The chart of `bandwidth.py`: step time against rate, both on logarithmic axes."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from bandwidth_report import Row
from myriad.reports.charts.svg import GRID, INK, SERIES, document, dot, log_ticks, polyline, rule, text

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

from hosts import bits_per_second

__all__ = ["draw"]

_COLOURS = {"data": SERIES[0], "tensor": SERIES[3], "pipeline": SERIES[2], "mixed": SERIES[4]}
_TITLE, _COMPUTE = "Step time as links get slower", "#555555"
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 500.0, 44.0, 352.0


def draw(rows: Sequence[Row]) -> str:
    """Draw Myriad's kinds as full lines, the best peer of each kind dashed, the bound of compute dotted."""
    rates = list(dict.fromkeys(row.rate for row in rows))
    chart = _Chart(rates, rows)
    parts, legend = chart.axes(), []
    for kind, colour in _COLOURS.items():
        for ours in (True, False):
            points = [(rate, best) for rate in rates if (best := _best(rows, rate, kind, ours)) is not None]
            dashes = "" if ours else "5 4"
            if points:
                parts += chart.line(points, colour, dashes)
                legend.append((colour, dashes, f"{'Myriad' if ours else 'best peer'}, {kind}"))
    compute = [(rate, next(row.compute_seconds for row in rows if row.rate == rate)) for rate in rates]
    parts += chart.line(compute, _COMPUTE, "1 3")
    parts += _legend([*legend, (_COMPUTE, "1 3", "compute alone")])
    return document(720, 400, _TITLE, [text(60, 26, _TITLE, size=15, ink=INK), *parts])


def _best(rows: Sequence[Row], rate: str, kind: str, ours: bool) -> float | None:
    found = (row.seconds for row in rows if (row.rate, row.kind, row.is_ours) == (rate, kind, ours))
    return min(found, default=None)


def _legend(entries: Sequence[tuple[str, str, str]]) -> list[str]:
    parts = []
    for row, (colour, dashes, name) in enumerate(entries):
        y = 56 + 20 * row
        parts += [polyline([(520, y), (544, y)], colour, dashes=dashes), text(552, y + 4, name)]
    return parts


class _Chart:
    """Maps rates and seconds to pixels; unshaped links stand a step left of the highest rate."""

    def __init__(self, rates: Sequence[str], rows: Sequence[Row]) -> None:
        self._where = {rate: math.log(bits_per_second(rate)) for rate in rates if rate != "unshaped"}
        if "unshaped" in rates:
            self._where = {"unshaped": max(self._where.values(), default=0.0) + 0.7} | self._where
        across, seconds = self._where.values(), [row.seconds for row in rows]
        seconds += [row.compute_seconds for row in rows]
        self._across = (max(across), min(min(across), max(across) - 1e-9))
        self._up = (math.log(min(seconds) * 0.9), math.log(max(seconds) * 1.1))

    def _x(self, rate: str) -> float:
        first, last = self._across
        return _LEFT + 12 + (first - self._where[rate]) / (first - last) * (_RIGHT - _LEFT - 24)

    def _y(self, seconds: float) -> float:
        low, high = self._up
        return _BOTTOM - (math.log(seconds) - low) / (high - low) * (_BOTTOM - _TOP)

    def line(self, points: Sequence[tuple[str, float]], colour: str, dashes: str) -> list[str]:
        """Return the points, joined, each with its value on hover."""
        where = [(self._x(rate), self._y(seconds)) for rate, seconds in points]
        hints = [f"{rate}: {seconds * 1e3:.0f} ms" for rate, seconds in points]
        dots = [dot(x, y, 3, colour, hint) for (x, y), hint in zip(where, hints, strict=True)]
        return [polyline(where, colour, dashes=dashes), *dots]

    def axes(self) -> list[str]:
        """Return grid lines with their values, and the names of the axes."""
        low, high = (math.exp(edge) for edge in self._up)
        parts = [text(282, 390, "rate of every link", "middle")]
        parts.append(text(14, 198, "seconds a step", "middle", upright=True))
        for seconds in log_ticks(low, high):
            y = self._y(seconds)
            parts += [rule((_LEFT, y), (_RIGHT, y), GRID), text(56, y + 4, f"{seconds:g}", "end")]
        return [*parts, *(text(self._x(rate), 370, rate, "middle") for rate in self._where)]
