"""Predicted beside published iteration times: a colour for each framework, with its prediction interval."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

from myriad.planner.validation.prediction_errors import PredictedRow, TableResult
from myriad.planner.validation.prediction_interval import framework_interval
from myriad.reports.charts.svg import (
    GRID,
    INK,
    SERIES,
    SOFT,
    box,
    document,
    dot,
    log_ticks,
    polyline,
    rule,
    text,
)
from myriad.units import format_number

__all__ = ["validation_svg"]

Group = tuple[bool, str]
"""Whether the models have experts, and the framework."""

_TITLE = "Iteration seconds: predicted without a measurement, and published"
_COLOURS = (*SERIES, "#8c9a2b", "#9c6644", "#e07b39", "#14213d", "#4a9fd8", "#b5179e", "#00b894", "#8d6a9f")
"""A colour for each of the frameworks of Myriad's tables."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 444.0, 48.0, 428.0
"""The square of predicted against published seconds."""
_NAMES, _START, _STOP = 640.0, 652.0, 960.0
"""Right edge of the frameworks' names, and the axis of errors."""
_ROW = 22.0
"""Height of a framework's line."""
_NEAR = 0.1
"""Error that the dashed lines show."""
_BAND = "#dfe7f1"
_WIDEST = math.log(3)
"""Logarithm of the largest error that the axis of errors shows; what is beyond lies on its edge."""


def validation_svg(results: Sequence[TableResult]) -> str:
    """Draw a point for each row, and the errors of each framework on its prediction interval."""
    groups = _groups(results)
    names = sorted({name for _, name in groups})
    colours = {name: _COLOURS[number % len(_COLOURS)] for number, name in enumerate(names)}
    height = max(_BOTTOM + 44, _TOP + _ROW * (len(groups) + 3) + 20)
    parts = [text(_LEFT, 28, _TITLE, size=15, ink=INK)]
    parts += _square(groups, colours)
    parts += _strips(groups, colours)
    return document(980, height, _TITLE, parts)


def _groups(results: Sequence[TableResult]) -> dict[Group, list[PredictedRow]]:
    """Return the rows of each framework in all tables: dense models first, then those with experts."""
    groups: dict[Group, list[PredictedRow]] = defaultdict(list)
    for result in results:
        for one in result.rows:
            groups[one.row.has_experts, one.row.framework].append(one)
    return dict(sorted(groups.items()))


def _square(groups: Mapping[Group, Sequence[PredictedRow]], colours: Mapping[str, str]) -> list[str]:
    """Draw predicted against published seconds, the diagonal, and 10 % to either side."""
    seconds = [s for rows in groups.values() for one in rows for s in (one.seconds, one.row.seconds)]
    low, high = min(seconds) / 1.2, max(seconds) * 1.2

    def x(value: float) -> float:
        return _between(value, low, high, _LEFT, _RIGHT)

    def y(value: float) -> float:
        return _between(value, low, high, _BOTTOM, _TOP)

    frame = [(_LEFT, _TOP), (_RIGHT, _TOP), (_RIGHT, _BOTTOM), (_LEFT, _BOTTOM), (_LEFT, _TOP)]
    parts = [polyline(frame, GRID, width=1), rule((x(low), y(low)), (x(high), y(high)), SOFT)]
    for factor in (1 / (1 + _NEAR), 1 + _NEAR):
        start, end = max(low, low / factor), min(high, high / factor)
        parts.append(rule((x(start), y(start * factor)), (x(end), y(end * factor)), SOFT, dashes="3 3"))
    for tick in log_ticks(low, high, (1, 3)):
        parts.append(text(x(tick), _BOTTOM + 16, f"{tick:g}", "middle"))
        parts.append(text(_LEFT - 6, y(tick) + 4, f"{tick:g}", "end"))
    # Frameworks with few points are drawn over those with many.
    for (_, name), rows in sorted(groups.items(), key=lambda pair: -len(pair[1])):
        parts += (
            dot(x(one.row.seconds), y(one.seconds), 3, colours[name], _hint(one), opacity=0.7) for one in rows
        )
    parts.append(text((_LEFT + _RIGHT) / 2, _BOTTOM + 34, "published (s)", "middle"))
    parts.append(text(20, (_TOP + _BOTTOM) / 2, "predicted (s)", "middle", upright=True))
    return [*parts, text(_RIGHT - 6, _BOTTOM - 8, "dashed: 10 % more or less", "end")]


def _strips(groups: Mapping[Group, Sequence[PredictedRow]], colours: Mapping[str, str]) -> list[str]:
    """Draw a line for each framework: its interval, the errors of its rows and their median."""
    sizes = [abs(math.log1p(one.error)) for rows in groups.values() for one in rows]
    widest = max(math.log(1.2), min(_WIDEST, 1.05 * max(sizes)))

    def x(logarithm: float) -> float:
        inside = max(-widest, min(widest, logarithm))
        return _between(math.exp(inside), math.exp(-widest), math.exp(widest), _START, _STOP)

    parts, y, has_heading = [], _TOP + _ROW / 2, False
    bottom = _TOP + _ROW * (len(groups) + any(experts for experts, _ in groups)) + 4
    for ratio in (0.4, 0.5, 0.7, 1.0, 1.4, 2.0, 2.5):
        if abs(math.log(ratio)) < widest:
            at = x(math.log(ratio))
            parts.append(rule((at, _TOP - 4), (at, bottom), SOFT if ratio == 1 else GRID))
            parts.append(text(at, bottom + 14, f"{ratio:g}", "middle"))
    for (has_experts, name), rows in groups.items():
        if has_experts and not has_heading:
            parts.append(text(_NAMES, y + 4, "with experts", "end"))
            y, has_heading = y + _ROW, True
        width = math.log1p(framework_interval(name, has_experts=has_experts))
        parts.append(text(_NAMES, y + 4, f"{name} ({len(rows)})", "end", ink=INK))
        parts.append(
            box(x(-width), y - 8, x(width) - x(-width), 16, _BAND, f"{name}: ±{math.expm1(width):.0%}")
        )
        parts += (
            dot(x(math.log1p(one.error)), y, 3, colours[name], _hint(one), opacity=0.55) for one in rows
        )
        middle = x(median(math.log1p(one.error) for one in rows))
        parts.append(rule((middle, y - 8), (middle, y + 8), INK, width=2))
        y += _ROW
    parts.append(text((_START + _STOP) / 2, bottom + 32, "predicted / published", "middle"))
    parts.append(
        text((_START + _STOP) / 2, bottom + 48, "band: nine of ten, as plan says; line: median", "middle")
    )
    return parts


def _between(value: float, low: float, high: float, start: float, stop: float) -> float:
    """Return the pixel of a value on a logarithmic axis."""
    return start + (stop - start) * math.log(value / low) / math.log(high / low)


def _hint(one: PredictedRow) -> str:
    published, predicted = format_number(one.row.seconds), format_number(one.seconds)
    return f"{one.row.name}: {published} s, predicted {predicted} s ({one.error:+.1%})"
