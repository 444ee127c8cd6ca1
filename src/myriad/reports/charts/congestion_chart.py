"""The picture of `myriad network congestion`: a bar for each measure, scenario and control."""

from collections.abc import Callable, Sequence
from itertools import groupby

from myriad.network.congestion_study import CongestionRow
from myriad.reports.charts.svg import INK, SERIES, box, document, text
from myriad.units import format_number

__all__ = ["draw"]

_WIDTH, _LEFT, _COLUMN, _BAR = 980, 170, 200, 120
_COLOURS = {"dcqcn": SERIES[0], "swift": SERIES[2], "hpcc": SERIES[3], "hybrid": SERIES[1]}


def draw(rows: Sequence[CongestionRow], title: str) -> str:
    """Draw a table of bars: scenarios and controls downwards, measures across."""
    parts, top = [], 78.0
    for _, group in groupby(rows, key=lambda row: row.scenario):
        each = list(group)
        parts.append(text(20, top, f"{each[0].scenario}: {each[0].title}", size=13, ink=INK))
        for number, (_, value, words, start) in enumerate(_MEASURES):
            parts += _column(each, top + 12, _LEFT + number * _COLUMN, value, words, start)
        for place, row in enumerate(each):
            parts.append(text(_LEFT - 10, top + 26 + 18 * place, row.control, anchor="end"))
        top += 18 * len(each) + 44
    head = [text(20, 28, title, size=15, ink=INK), *_headings()]
    return document(_WIDTH, int(top), title, [*head, *parts])


def _column(
    rows: Sequence[CongestionRow],
    top: float,
    left: float,
    value: Callable[[CongestionRow], float | None],
    words: Callable[[float], str],
    start: float,
) -> list[str]:
    """Draw bars from ``start`` (the value with an empty bar) to the largest value of the scenario."""
    values = [value(row) for row in rows]
    most = max((one for one in values if one is not None), default=0.0)
    out = []
    for place, (row, one) in enumerate(zip(rows, values, strict=True)):
        if one is None:
            continue
        y = top + 18 * place
        length = max(0.0, one - start) / (most - start) * _BAR if most > start else 0.0
        colour = next((ink for name, ink in _COLOURS.items() if row.control.startswith(name)), SERIES[6])
        out.append(box(left, y + 4, max(length, 1), 11, colour, f"{row.control}: {words(one)}", rounding=2))
        out.append(text(left + max(length, 1) + 5, y + 14, words(one), size=11))
    return out


_Measure = tuple[str, Callable[[CongestionRow], float | None], Callable[[float], str], float]
_MEASURES: tuple[_Measure, ...] = (
    ("time till the last is done / fair", lambda row: 1 / row.throughput_ratio, lambda v: f"{v:.3f}", 0.98),
    ("queue p99", lambda row: row.queue_p99_bytes, lambda v: f"{v / 1e3:.0f} kB", 0.0),
    ("pauses", lambda row: row.pause_seconds, lambda v: f"{format_number(v * 1e3)} ms", 0.0),
    ("slowdown p99", lambda row: row.slowdown_p99, lambda v: f"{v:.2f}", 0.98),
)


def _headings() -> list[str]:
    return [text(_LEFT + n * _COLUMN, 52, name, size=11) for n, (name, *_) in enumerate(_MEASURES)]
