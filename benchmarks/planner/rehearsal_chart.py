"""Predicted against measured, each a dot, on logarithmic axes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from myriad.reports.charts.svg import INK, SERIES, SOFT, document, dot, log_ticks, rule, text

__all__ = ["Dot", "dots_svg"]

_LEFT, _TOP, _SIZE, _RIGHT, _BOTTOM = 64.0, 60.0, 440.0, 24.0, 56.0


@dataclass(frozen=True)
class Dot:
    """The measured and predicted time of one layout."""

    name: str
    group: str
    measured: float
    predicted: float


def dots_svg(title: str, unit: str, dots: Sequence[Dot], band_ratio: float = 0.1) -> str:
    """Return the chart: the diagonal is a perfect prediction, dashed lines are off by ``band_ratio``."""
    values = [value for one in dots for value in (one.measured, one.predicted)]
    low, high = min(values) / 1.15, max(values) * 1.15

    def place(value: float) -> float:
        return _SIZE * math.log(value / low) / math.log(high / low)

    def x(value: float) -> float:
        return _LEFT + place(value)

    def y(value: float) -> float:
        return _TOP + _SIZE - place(value)

    right, bottom = _LEFT + _SIZE, _TOP + _SIZE
    colours = {group: SERIES[i % len(SERIES)] for i, group in enumerate(dict.fromkeys(d.group for d in dots))}
    parts = [text(16, 26, title, size=15, ink=INK, weight=600), *_legend(colours)]
    for tick in log_ticks(low, high):
        parts += [rule((x(tick), _TOP), (x(tick), bottom)), rule((_LEFT, y(tick)), (right, y(tick)))]
        parts += [text(x(tick), bottom + 18, f"{tick:g}", "middle", size=11)]
        parts += [text(_LEFT - 8, y(tick) + 4, f"{tick:g}", "end", size=11)]
    parts.append(rule((x(low), y(low)), (x(high), y(high)), SOFT))
    for factor in (1 - band_ratio, 1 + band_ratio):
        start, end = max(low, low / factor), min(high, high / factor)
        parts.append(rule((x(start), y(start * factor)), (x(end), y(end * factor)), SOFT, dashes="3 3"))
    for one in dots:
        hint = f"{one.name}, {one.group}: measured {one.measured:.3g}, predicted {one.predicted:.3g}"
        parts.append(dot(x(one.measured), y(one.predicted), 4, colours[one.group], hint, opacity=0.8))
    parts.append(text(_LEFT + _SIZE / 2, bottom + _BOTTOM - 14, f"measured, {unit}", "middle", ink=INK))
    parts.append(text(18, _TOP + _SIZE / 2, f"predicted, {unit}", "middle", ink=INK, upright=True))
    return document(right + _RIGHT, bottom + _BOTTOM, title, parts)


def _legend(colours: dict[str, str]) -> list[str]:
    parts, x = [], _LEFT
    for group, colour in colours.items():
        parts += [dot(x, 44, 4, colour), text(x + 9, 48, group, ink=INK)]
        x += 30 + 7.2 * len(group)
    return parts
