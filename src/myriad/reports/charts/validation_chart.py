"""The picture of `myriad validate`: predicted against published seconds, both on logarithmic axes."""

from collections.abc import Sequence
from math import log10

from myriad.planner import TableResult
from myriad.reports.charts.svg import GRID, INK, SERIES, SOFT, document, dot, polyline, rule, text
from myriad.units import format_number

__all__ = ["draw"]

_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 424.0, 48.0, 408.0
_TITLE = "Iteration seconds: predicted from data sheets, and published"
_TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)


def draw(results: Sequence[TableResult]) -> str:
    """Draw a point for each row and a colour for each table, the diagonal, and 10 % to either side."""
    seconds = [s for result in results for one in result.rows for s in (one.seconds, one.row.seconds)]
    low, high = log10(min(seconds)) - 0.08, log10(max(seconds)) + 0.08

    def place(value: float) -> float:
        return (log10(value) - low) / (high - low)

    def x(value: float) -> float:
        return _LEFT + place(value) * (_RIGHT - _LEFT)

    def y(value: float) -> float:
        return _BOTTOM - place(value) * (_BOTTOM - _TOP)

    frame = [(_LEFT, _TOP), (_RIGHT, _TOP), (_RIGHT, _BOTTOM), (_LEFT, _BOTTOM), (_LEFT, _TOP)]
    parts = [text(64, 28, _TITLE, size=15, ink=INK), polyline(frame, GRID, width=1)]
    parts.append(rule((x(10**low), y(10**low)), (x(10**high), y(10**high)), SOFT))
    for factor in (1 / 1.1, 1.1):
        start, end = max(10**low, 10**low / factor), min(10**high, 10**high / factor)
        parts.append(rule((x(start), y(start * factor)), (x(end), y(end * factor)), SOFT, dashes="3 3"))
    for tick in _TICKS:
        if low < log10(tick) < high:
            parts.append(text(x(tick), _BOTTOM + 16, f"{tick:g}", "middle"))
            parts.append(text(_LEFT - 6, y(tick) + 4, f"{tick:g}", "end"))
    coloured = [(result, SERIES[number % len(SERIES)]) for number, result in enumerate(results)]
    for number, (result, colour) in enumerate(coloured):
        parts += _entry(number, colour, result)
    # Tables with few points are drawn over those with many.
    for result, colour in sorted(coloured, key=lambda pair: -len(pair[0].rows)):
        for one in result.rows:
            hint = f"{one.row.name}: {format_number(one.row.seconds)} s, "
            hint += f"predicted {format_number(one.seconds)} s ({one.error:+.1%})"
            parts.append(dot(x(one.row.seconds), y(one.seconds), 3.4, colour, hint, opacity=0.75))
    parts.append(text(448, _BOTTOM, "dashed: 10 % more or less"))
    parts.append(text((_LEFT + _RIGHT) / 2, _BOTTOM + 34, "published (s)", "middle"))
    parts.append(text(20, (_TOP + _BOTTOM) / 2, "predicted (s)", "middle", upright=True))
    return document(660, 450, _TITLE, parts)


def _entry(number: int, colour: str, result: TableResult) -> list[str]:
    top = _TOP + 12 + 40 * number
    said = f"{len(result.rows)} rows, mean error {result.zero_shot.mean:.1%}"
    return [
        dot(448, top - 4, 4, colour),
        text(458, top, result.table.title, ink=INK),
        text(458, top + 15, said),
    ]
