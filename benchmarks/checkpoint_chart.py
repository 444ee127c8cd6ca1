"""The chart of `checkpoint.py`: stall and time to durable against ranks, as a plain SVG file.

A line of panels for each storage and sharing; seconds on a logarithmic axis, a mark for each contender.
"""

import math
from collections.abc import Sequence
from html import escape

from checkpoint_report import Row

__all__ = ["draw"]

_COLOURS = ("#1f5fa8", "#b07c1e", "#3a8f5c", "#7a4fa3", "#b0413e", "#4a8f9c", "#777777")
_WIDTH, _HEIGHT, _LEFT, _TOP, _LINE = 250.0, 150.0, 62.0, 62.0, 214.0


def draw(rows: Sequence[Row]) -> str:
    """Of the rows that have figures."""
    shown = [row for row in rows if row.stall is not None]
    places = list(dict.fromkeys((row.storage, row.sharing) for row in shown))
    colours = dict(zip(dict.fromkeys(row.contender for row in shown), _COLOURS, strict=False))
    parts = []
    for line, place in enumerate(places):
        group = [row for row in shown if (row.storage, row.sharing) == place]
        stalls = [(row, row.stall.median) for row in group if row.stall is not None]
        durable = [(row, row.durable_seconds) for row in group if row.durable_seconds is not None]
        top, name = _TOP + line * _LINE, ", ".join(place)
        parts += _Panel(_LEFT, top, f"{name}: stall", stalls).draw(colours)
        parts += _Panel(2 * _LEFT + _WIDTH, top, f"{name}: time to durable", durable).draw(colours)
    return _document([*parts, *_legend(colours)], _TOP + max(len(places), 1) * _LINE)


def _document(parts: Sequence[str], height: float) -> str:
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 {height:.0f}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="960" height="{height:.0f}" rx="6" fill="#ffffff"/>',
        '<text x="60" y="26" font-size="15" fill="#1a1a1a">Seconds that a save blocks training, and until it '
        "is durable, against the number of ranks</text>",
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


def _legend(colours: dict[str, str]) -> list[str]:
    parts = []
    for row, (name, colour) in enumerate(colours.items()):
        y = _TOP + 8 + 20 * row
        parts.append(f'<circle cx="666" cy="{y - 4:.0f}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="678" y="{y:.0f}" fill="#444">{escape(name)}</text>')
    return parts


class _Panel:
    """Maps ranks and seconds to the picture's pixels."""

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
        """Title, grid, and the contenders' lines."""
        parts = [
            f'<text x="{self._left:.0f}" y="{self._top - 8:.0f}" fill="#1a1a1a">{escape(self._title)}</text>'
        ]
        parts += self._grid()
        for contender, colour in colours.items():
            own = sorted((row.world, value) for row, value in self._points if row.contender == contender)
            where = [(self._x(world), self._y(value), value) for world, value in own]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in where)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
            parts += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}">'
                f"<title>{escape(contender)}: {value:.4g} s</title></circle>"
                for x, y, value in where
            ]
        return parts

    def _grid(self) -> list[str]:
        parts, right = [], self._left + _WIDTH
        for seconds in self._ticks():
            y = self._y(seconds)
            parts.append(
                f'<line x1="{self._left:.0f}" x2="{right:.0f}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e6e6e6"/>'
            )
            label = f"{seconds * 1e3:g} ms" if seconds < 1 else f"{seconds:g} s"
            parts.append(
                f'<text x="{self._left - 6:.0f}" y="{y + 4:.1f}" text-anchor="end" fill="#444">{label}</text>'
            )
        for world in self._worlds:
            where = f'x="{self._x(world):.1f}" y="{self._top + _HEIGHT + 18:.0f}"'
            parts.append(f'<text {where} text-anchor="middle" fill="#444">{world}</text>')
        return parts

    def _ticks(self) -> list[float]:
        low, high = math.exp(self._low), math.exp(self._high)
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        factors = (1, 2, 5) if high / low < 200 else (1,)
        ticks = (round(factor * 10.0**power, 9) for power in powers for factor in factors)
        return [tick for tick in ticks if low <= tick <= high]
