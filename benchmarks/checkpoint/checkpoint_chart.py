"""The chart of `checkpoint.py`: stall and time to durable against ranks.

A line of panels for each storage and sharing; seconds on a logarithmic axis, a mark for each contender.
"""

import math
from collections.abc import Sequence

from checkpoint_report import Row
from myriad.reports.charts.svg import INK, SERIES, document, dot, log_ticks, polyline, rule, text

__all__ = ["draw"]

_TITLE = "Seconds that a save blocks training, and until it is durable, against the number of ranks"
_WIDTH, _HEIGHT, _LEFT, _TOP, _LINE = 250.0, 150.0, 62.0, 62.0, 214.0


def draw(rows: Sequence[Row]) -> str:
    """Draw the rows that have figures."""
    shown = [row for row in rows if row.stall is not None]
    places = list(dict.fromkeys((row.storage, row.sharing) for row in shown))
    colours = dict(zip(dict.fromkeys(row.contender for row in shown), SERIES, strict=False))
    parts = []
    for line, place in enumerate(places):
        group = [row for row in shown if (row.storage, row.sharing) == place]
        stalls = [(row, row.stall.median) for row in group if row.stall is not None]
        durable = [(row, row.durable_seconds) for row in group if row.durable_seconds is not None]
        top, name = _TOP + line * _LINE, ", ".join(place)
        parts += _Panel(_LEFT, top, f"{name}: stall", stalls).draw(colours)
        parts += _Panel(2 * _LEFT + _WIDTH, top, f"{name}: time to durable", durable).draw(colours)
    parts += [text(60, 26, _TITLE, size=15, ink=INK), *_legend(colours)]
    return document(960, _TOP + max(len(places), 1) * _LINE, _TITLE, parts)


def _legend(colours: dict[str, str]) -> list[str]:
    parts = []
    for row, (name, colour) in enumerate(colours.items()):
        y = _TOP + 8 + 20 * row
        parts += [dot(666, y - 4, 4, colour), text(678, y, name)]
    return parts


class _Panel:
    """Maps ranks and seconds to pixels."""

    def __init__(self, left: float, top: float, title: str, points: Sequence[tuple[Row, float]]) -> None:
        self._left, self._top, self._title, self._points = left, top, title, points
        self._worlds = sorted({row.world for row, _ in points})
        seconds = [max(value, 1e-6) for _, value in points]
        self._low, self._high = math.log(min(seconds) * 0.8), math.log(max(seconds) * 1.25)

    def _x(self, world: int) -> float:
        return self._left + (self._worlds.index(world) + 0.5) * _WIDTH / len(self._worlds)

    def _y(self, seconds: float) -> float:
        share = (math.log(max(seconds, 1e-6)) - self._low) / (self._high - self._low)
        return self._top + _HEIGHT * (1 - share)

    def draw(self, colours: dict[str, str]) -> list[str]:
        """Return title, grid, and the contenders' lines."""
        parts = [text(self._left, self._top - 8, self._title, ink=INK), *self._grid()]
        for contender, colour in colours.items():
            own = sorted((row.world, value) for row, value in self._points if row.contender == contender)
            where = [(self._x(world), self._y(value)) for world, value in own]
            parts.append(polyline(where, colour, width=1.5))
            for (x, y), (_, value) in zip(where, own, strict=True):
                parts.append(dot(x, y, 3.5, colour, f"{contender}: {value:.4g} s"))
        return parts

    def _grid(self) -> list[str]:
        low, high = math.exp(self._low), math.exp(self._high)
        parts = []
        for seconds in log_ticks(low, high, (1, 2, 5) if high / low < 200 else (1,)):
            y = self._y(seconds)
            label = f"{seconds * 1e3:g} ms" if seconds < 1 else f"{seconds:g} s"
            parts += [rule((self._left, y), (self._left + _WIDTH, y))]
            parts += [text(self._left - 6, y + 4, label, "end")]
        bottom = self._top + _HEIGHT + 18
        return [*parts, *(text(self._x(world), bottom, str(world), "middle") for world in self._worlds)]
