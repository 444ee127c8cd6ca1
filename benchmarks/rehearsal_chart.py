"""Predicted against measured, each a dot, on logarithmic axes: one self-contained SVG."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Dot", "dots_svg"]

_LEFT, _TOP, _SIZE, _RIGHT, _BOTTOM = 64.0, 60.0, 440.0, 24.0, 56.0
_INK, _SOFT, _GRID = "#16202c", "#66717f", "#e3e8ee"
_COLOURS = ("#2f6db5", "#c2571a", "#3f8f4f", "#8a4fb0")


@dataclass(frozen=True)
class Dot:
    """Of one layout."""

    name: str
    group: str
    measured: float
    predicted: float


def dots_svg(title: str, unit: str, dots: Sequence[Dot], band_ratio: float = 0.1) -> str:
    """The diagonal is a perfect prediction; the band around it is off by ``band_ratio`` at most."""
    values = [value for dot in dots for value in (dot.measured, dot.predicted)]
    low, high = min(values) / 1.15, max(values) * 1.15

    def place(value: float) -> float:
        return _SIZE * math.log(value / low) / math.log(high / low)

    def x(value: float) -> float:
        return _LEFT + place(value)

    def y(value: float) -> float:
        return _TOP + _SIZE - place(value)

    width, height = _LEFT + _SIZE + _RIGHT, _TOP + _SIZE + _BOTTOM
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" font-family="system-ui, sans-serif" role="img">',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
        _text(16, 26, title, 15, weight=600),
    ]
    lines += _legend([dot.group for dot in dots])
    for tick in _ticks(low, high):
        lines.append(
            f'<path d="M{x(tick):.1f} {_TOP}V{_TOP + _SIZE}M{_LEFT} {y(tick):.1f}H{_LEFT + _SIZE}" '
            f'stroke="{_GRID}"/>'
        )
        lines.append(_text(x(tick), _TOP + _SIZE + 18, f"{tick:g}", 11, _SOFT, anchor="middle"))
        lines.append(_text(_LEFT - 8, y(tick) + 4, f"{tick:g}", 11, _SOFT, anchor="end"))
    wide = place(low * (1 + band_ratio))
    box = f"{_LEFT} {_TOP} {_SIZE} {_SIZE}".split()
    lines.append(
        f'<clipPath id="box"><rect x="{box[0]}" y="{box[1]}" width="{box[2]}" height="{box[3]}"/></clipPath>'
        f'<path clip-path="url(#box)" d="M{_LEFT} {_TOP + _SIZE}L{_LEFT + _SIZE} {_TOP}" stroke="{_GRID}" '
        f'stroke-width="{2 * wide / math.sqrt(2):.1f}"/>'
        f'<path d="M{_LEFT} {_TOP + _SIZE}L{_LEFT + _SIZE} {_TOP}" stroke="{_SOFT}"/>'
    )
    groups = list(dict.fromkeys(dot.group for dot in dots))
    for dot in dots:
        colour = _COLOURS[groups.index(dot.group) % len(_COLOURS)]
        words = f"{dot.name}, {dot.group}: measured {dot.measured:.3g}, predicted {dot.predicted:.3g}"
        lines.append(
            f'<circle cx="{x(dot.measured):.1f}" cy="{y(dot.predicted):.1f}" r="4" fill="{colour}" '
            f'fill-opacity="0.8"><title>{escape(words)}</title></circle>'
        )
    lines.append(_text(_LEFT + _SIZE / 2, height - 14, f"measured, {unit}", 12, anchor="middle"))
    middle = _TOP + _SIZE / 2
    lines.append(
        f'<g transform="rotate(-90 18 {middle:.0f})">'
        f"{_text(18, middle, f'predicted, {unit}', 12, anchor='middle')}</g>"
    )
    return "\n".join([*lines, "</svg>"]) + "\n"


def _legend(groups: Sequence[str]) -> list[str]:
    lines, x = [], _LEFT
    for number, group in enumerate(dict.fromkeys(groups)):
        colour = _COLOURS[number % len(_COLOURS)]
        lines.append(f'<circle cx="{x:.0f}" cy="44" r="4" fill="{colour}"/>' + _text(x + 9, 48, group, 12))
        x += 30 + 7.2 * len(group)
    return lines


def _ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [step * 10.0**power for power in powers for step in (1, 2, 5)]
    return [tick for tick in found if low <= tick <= high]


def _text(
    x: float, y: float, words: str, size: int, colour: str = _INK, *, anchor: str = "start", weight: int = 400
) -> str:
    look = f'font-size="{size}" fill="{colour}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(words)}</text>'
