"""The picture of `myriad network congestion`: for each scenario and control a bar in four measures."""

from collections.abc import Callable, Sequence
from html import escape
from itertools import groupby

from myriad.cli.svg import text
from myriad.network.levels import Row
from myriad.units import format_number

__all__ = ["draw"]

_WIDTH, _LEFT, _COLUMN, _BAR = 980, 170, 200, 120
_COLOURS = {"dcqcn": "#1f5fa8", "swift": "#3a8f5c", "hpcc": "#b07c1e", "hybrid": "#d1495b"}


def draw(rows: Sequence[Row], title: str) -> str:
    """Self-contained, readable on light and dark pages."""
    parts, top = [], 78.0
    for _, group in groupby(rows, key=lambda row: row.scenario):
        each = list(group)
        parts.append(text(20, top, f"{each[0].scenario}: {each[0].title}", size=13, ink="#1a1a1a"))
        for number, (_, value, words, start) in enumerate(_MEASURES):
            parts += _column(each, top + 12, _LEFT + number * _COLUMN, value, words, start)
        for place, row in enumerate(each):
            parts.append(text(_LEFT - 10, top + 26 + 18 * place, row.control, anchor="end"))
        top += 18 * len(each) + 44
    return _document(title, parts, int(top))


def _column(
    rows: Sequence[Row],
    top: float,
    left: float,
    value: Callable[[Row], float | None],
    words: Callable[[float], str],
    start: float,
) -> list[str]:
    """Bars from ``start`` (the value of no bar) to the largest of the scenario."""
    values = [value(row) for row in rows]
    most = max((one for one in values if one is not None), default=0.0)
    out = []
    for place, (row, one) in enumerate(zip(rows, values, strict=True)):
        if one is None:
            continue
        y = top + 18 * place
        length = max(0.0, one - start) / (most - start) * _BAR if most > start else 0.0
        colour = next((ink for name, ink in _COLOURS.items() if row.control.startswith(name)), "#777")
        hint = f"<title>{escape(f'{row.control}: {words(one)}')}</title>"
        size = f'width="{max(length, 1):.1f}" height="11" rx="2"'
        out.append(f'<rect x="{left}" y="{y + 4:.1f}" {size} fill="{colour}">{hint}</rect>')
        out.append(text(left + max(length, 1) + 5, y + 14, words(one), size=11))
    return out


_Measure = tuple[str, Callable[[Row], float | None], Callable[[float], str], float]
_MEASURES: tuple[_Measure, ...] = (
    ("time till the last is done / fair", lambda row: 1 / row.throughput_ratio, lambda v: f"{v:.3f}", 0.98),
    ("queue p99", lambda row: row.queue_p99_bytes, lambda v: f"{v / 1e3:.0f} kB", 0.0),
    ("pauses", lambda row: row.pause_seconds, lambda v: f"{format_number(v * 1e3)} ms", 0.0),
    ("slowdown p99", lambda row: row.slowdown_p99, lambda v: f"{v:.2f}", 0.98),
)


def _document(title: str, parts: Sequence[str], height: int) -> str:
    heads = [text(_LEFT + n * _COLUMN, 52, name, size=11) for n, (name, *_) in enumerate(_MEASURES)]
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="system-ui, sans-serif" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" rx="6" fill="#ffffff"/>',
        text(20, 28, title, size=15, ink="#1a1a1a"),
    ]
    return "\n".join([*head, *heads, *parts, "</svg>"]) + "\n"
