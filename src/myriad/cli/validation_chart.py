"""The picture of `myriad validate`: predicted against published seconds, both on logarithmic axes."""

from collections.abc import Sequence
from html import escape
from math import log10

from myriad.planner.validation import TableResult
from myriad.units import format_number

__all__ = ["draw"]

_COLOURS = ("#1f5fa8", "#b07c1e", "#3a8f5c", "#7a4fa3", "#b3403a", "#2a8a99", "#6b6b6b", "#c06a9b")
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 424.0, 48.0, 408.0
_TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)


def draw(results: Sequence[TableResult]) -> str:
    """A point for each row, a colour for each table; the diagonal and 10 % to either side."""
    seconds = [s for result in results for one in result.rows for s in (one.seconds, one.row.seconds)]
    low, high = log10(min(seconds)) - 0.08, log10(max(seconds)) + 0.08

    def place(value: float) -> float:
        return (log10(value) - low) / (high - low)

    def x(value: float) -> float:
        return _LEFT + place(value) * (_RIGHT - _LEFT)

    def y(value: float) -> float:
        return _BOTTOM - place(value) * (_BOTTOM - _TOP)

    parts = [_line(x(10**low), y(10**low), x(10**high), y(10**high), "#888")]
    for factor in (1 / 1.1, 1.1):
        start, end = max(10**low, 10**low / factor), min(10**high, 10**high / factor)
        parts.append(
            _line(x(start), y(start * factor), x(end), y(end * factor), "#bbb", 'stroke-dasharray="3 3"')
        )
    for tick in _TICKS:
        if low < log10(tick) < high:
            parts.append(_text(x(tick), _BOTTOM + 16, f"{tick:g}", "middle"))
            parts.append(_text(_LEFT - 6, y(tick) + 4, f"{tick:g}", "end"))
    coloured = [(result, _COLOURS[number % len(_COLOURS)]) for number, result in enumerate(results)]
    for number, (result, colour) in enumerate(coloured):
        parts += _entry(number, colour, result)
    for result, colour in sorted(coloured, key=lambda pair: -len(pair[0].rows)):  # few points over many
        for one in result.rows:
            hint = f"{one.row.name}: {format_number(one.row.seconds)} s, "
            hint += f"predicted {format_number(one.seconds)} s ({one.error:+.1%})"
            where = f'cx="{x(one.row.seconds):.1f}" cy="{y(one.seconds):.1f}"'
            parts.append(f'<circle {where} r="3.4" fill="{colour}" fill-opacity="0.75">')
            parts.append(f"<title>{escape(hint)}</title></circle>")
    return _document(parts)


def _entry(number: int, colour: str, result: TableResult) -> list[str]:
    top = _TOP + 12 + 40 * number
    said = f"{len(result.rows)} rows, mean error {result.zero_shot.mean:.1%}"
    return [
        f'<circle cx="448" cy="{top - 4}" r="4" fill="{colour}"/>',
        _text(458, top, result.table.title),
        _text(458, top + 15, said, colour="#666"),
    ]


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, style: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" {style}/>'


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = "#1a1a1a") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def _document(parts: Sequence[str]) -> str:
    frame = f'x="{_LEFT}" y="{_TOP}" width="{_RIGHT - _LEFT}" height="{_BOTTOM - _TOP}"'
    head = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 660 450" font-family="system-ui, sans-serif" '
        'font-size="12">',
        '<rect width="660" height="450" rx="6" fill="#ffffff"/>',
        '<text x="64" y="28" font-size="15" fill="#1a1a1a">Iteration seconds: predicted from data sheets, '
        "and published</text>",
        f'<rect {frame} fill="none" stroke="#ccc"/>',
        _text(448, _BOTTOM, "dashed: 10 % more or less", colour="#666"),
        _text((_LEFT + _RIGHT) / 2, _BOTTOM + 34, "published (s)", "middle"),
        f'<text transform="translate(20 {(_TOP + _BOTTOM) / 2}) rotate(-90)" text-anchor="middle" '
        'fill="#1a1a1a">predicted (s)</text>',
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"
