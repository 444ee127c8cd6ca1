"""The pictures of `myriad network ecmp`: the slowest flow by number of flows, and by remedy on a fabric."""

from collections.abc import Mapping, Sequence
from html import escape

from myriad.cli.svg import text
from myriad.network.remedies import Row

__all__ = ["draw_bars", "draw_curves"]

_COLOURS = ("#1f5fa8", "#d1495b", "#3a8f5c", "#b07c1e")
_LEFT, _RIGHT, _TOP, _BOTTOM = 60.0, 700.0, 64.0, 350.0
_BAR_LEFT, _BAR_RIGHT, _ROW = 320.0, 640.0, 26.0


def draw_curves(
    title: str, lines: Mapping[str, Sequence[tuple[float, float]]], asked: tuple[float, float]
) -> str:
    """Share of its rate that the slowest flow is expected to have; ``asked``: the point of the question."""
    most = max(x for line in lines.values() for x, _ in line)

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + x / most * (_RIGHT - _LEFT), _BOTTOM - y * (_BOTTOM - _TOP)

    parts = [text(_LEFT, 28, title, size=15, ink="#1a1a1a")]
    for tenth in range(0, 11, 2):
        _, y = place(0, tenth / 10)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_RIGHT}" stroke="#e6e6e6"/>')
        parts.append(text(_LEFT - 8, y + 4, f"{tenth / 10:.1f}", anchor="end"))
    for quarter in range(5):
        x, _ = place(most * quarter / 4, 0)
        parts.append(text(x, _BOTTOM + 18, f"{most * quarter / 4:.0f}", anchor="middle"))
    for number, (name, line) in enumerate(lines.items()):
        points = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in line)
        colour = _COLOURS[number % len(_COLOURS)]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        x = _LEFT + 10 + 150 * number
        parts.append(f'<rect x="{x:.0f}" y="44" width="14" height="4" fill="{colour}"/>')
        parts.append(text(x + 20, 50, name))
    x, y = place(*asked)
    hint = f"{asked[0]:.0f} flows: {asked[1]:.2f}"
    parts.append(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{_COLOURS[0]}"><title>{hint}</title></circle>'
    )
    parts.append(text((_LEFT + _RIGHT) / 2, _BOTTOM + 38, "flows that go up at once", anchor="middle"))
    parts.append(
        '<text x="16" y="207" fill="#444" text-anchor="middle" transform="rotate(-90 16 207)">'
        "slowest flow, share of its rate</text>"
    )
    return _document(720, 400, title, parts)


def draw_bars(title: str, rows: Sequence[Row]) -> str:
    """A bar for the median draw, a whisker from the 5th to the 95th percentile."""
    parts = [text(24, 28, title, size=15, ink="#1a1a1a")]
    parts.append(text(24, 50, "slowest flow, share of its rate: median draw, 5th to 95th percentile"))
    scale, top = _BAR_RIGHT - _BAR_LEFT, 66.0
    for row in rows:
        middle, colour = top + 8, _COLOURS[1 if row.is_asked else 0]
        parts.append(text(_BAR_LEFT - 8, middle + 4, row.name, anchor="end"))
        hint = f"{row.name}: {row.slowest_ratio:.2f}, {row.held_up_ratio:.0%} of the flows slowed"
        box = f'x="{_BAR_LEFT}" y="{top:.1f}" width="{row.slowest_ratio * scale:.1f}" height="16"'
        parts.append(f'<rect {box} fill="{colour}"><title>{escape(hint)}</title></rect>')
        low, high = (_BAR_LEFT + share * scale for share in (row.low_ratio, row.high_ratio))
        for ink, width in (("#ffffff", 4.0), ("#1a1a1a", 1.5)):
            line = f'd="M{low:.1f} {middle:.1f}H{high:.1f}"'
            parts.append(f'<path {line} stroke="{ink}" stroke-width="{width:g}"/>')
        parts.append(text(max(high, _BAR_LEFT) + 8, middle + 4, f"{row.slowest_ratio:.2f}"))
        top += _ROW
    return _document(720, top + 16, title, parts)


def _document(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    size = f'width="{width:g}" height="{height:g}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        'font-family="system-ui, sans-serif" font-size="12" role="img">'
    )
    background = f'<rect {size} rx="6" fill="#ffffff"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", background, *parts, "</svg>"]) + "\n"
