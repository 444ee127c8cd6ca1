"""The chart of `bandwidth.py`: step time against rate, both on logarithmic axes, as a plain SVG file."""

import math
from collections.abc import Sequence
from html import escape

from bandwidth_report import Row
from hosts import bits_per_second

__all__ = ["draw"]

_COLOURS = {"data": "#1f5fa8", "tensor": "#b07c1e", "pipeline": "#3a8f5c", "mixed": "#7a4fa3"}
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 500.0, 44.0, 352.0


def draw(rows: Sequence[Row]) -> str:
    """Myriad's kinds as full lines, the best peer of each kind dashed; the bound of compute dotted."""
    rates = list(dict.fromkeys(row.rate for row in rows))
    chart = _Chart(rates, rows)
    parts, legend = chart.axes(), []
    for kind, colour in _COLOURS.items():
        for ours in (True, False):
            points = [(rate, best) for rate in rates if (best := _best(rows, rate, kind, ours)) is not None]
            style = "" if ours else 'stroke-dasharray="5 4"'
            if points:
                parts.append(chart.line(points, colour, style))
                legend.append((colour, style, f"{'Myriad' if ours else 'best peer'}, {kind}"))
    compute = [(rate, next(row.compute_seconds for row in rows if row.rate == rate)) for rate in rates]
    parts.append(chart.line(compute, "#555555", dotted := 'stroke-dasharray="1 3"'))
    return _document([*parts, *_legend([*legend, ("#555555", dotted, "compute alone")])])


def _best(rows: Sequence[Row], rate: str, kind: str, ours: bool) -> float | None:
    found = (row.seconds for row in rows if (row.rate, row.kind, row.is_ours) == (rate, kind, ours))
    return min(found, default=None)


def _document(parts: Sequence[str]) -> str:
    head = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 400" font-family="system-ui, sans-serif" '
        'font-size="12">',
        '<rect width="720" height="400" rx="6" fill="#ffffff"/>',
        '<text x="60" y="26" font-size="15" fill="#1a1a1a">Step time as links get slower</text>',
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


def _legend(entries: Sequence[tuple[str, str, str]]) -> list[str]:
    parts = []
    for row, (colour, style, name) in enumerate(entries):
        y = 56 + 20 * row
        parts.append(
            f'<line x1="520" x2="544" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="2" {style}/>'
        )
        parts.append(f'<text x="552" y="{y + 4}" fill="#444">{escape(name)}</text>')
    return parts


class _Chart:
    """Maps rates and seconds to the picture's pixels; unshaped stands a step left of the highest rate."""

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

    def line(self, points: Sequence[tuple[str, float]], colour: str, style: str) -> str:
        """The points, joined, each with its value on hover."""
        path = " ".join(f"{self._x(rate):.1f},{self._y(seconds):.1f}" for rate, seconds in points)
        dots = "".join(
            f'<circle cx="{self._x(rate):.1f}" cy="{self._y(seconds):.1f}" r="3" fill="{colour}">'
            f"<title>{rate}: {seconds * 1e3:.0f} ms</title></circle>"
            for rate, seconds in points
        )
        return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" {style}/>{dots}'

    def axes(self) -> list[str]:
        """Grid lines with their values, and what the axes are."""
        out = []
        for seconds in self._ticks():
            y = self._y(seconds)
            out.append(f'<line x1="{_LEFT}" x2="{_RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e6e6e6"/>')
            out.append(f'<text x="56" y="{y + 4:.1f}" text-anchor="end" fill="#444">{seconds:g}</text>')
        for rate in self._where:
            x = self._x(rate)
            out.append(f'<text x="{x:.1f}" y="370" text-anchor="middle" fill="#444">{escape(rate)}</text>')
        out.append('<text x="282" y="390" text-anchor="middle" fill="#444">rate of every link</text>')
        turned = 'text-anchor="middle" fill="#444" transform="rotate(-90 14 198)"'
        return [*out, f'<text x="14" y="198" {turned}>seconds a step</text>']

    def _ticks(self) -> list[float]:
        low, high = (math.exp(edge) for edge in self._up)
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = (round(factor * 10.0**power, 6) for power in powers for factor in (1, 2, 5))
        return [tick for tick in ticks if low <= tick <= high]
