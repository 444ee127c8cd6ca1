"""The pictures of `myriad network ecmp`: the slowest flow by number of flows, and by remedy on a fabric."""

from collections.abc import Mapping, Sequence

from myriad.network.ecmp_remedies import EcmpRow
from myriad.reports.charts.svg import INK, PAPER, SERIES, box, document, dot, legend, polyline, rule, text

__all__ = ["draw_bars", "draw_curves"]

_LEFT, _RIGHT, _TOP, _BOTTOM = 60.0, 700.0, 64.0, 350.0
_BAR_LEFT, _BAR_RIGHT, _ROW = 320.0, 640.0, 26.0


def draw_curves(
    title: str, lines: Mapping[str, Sequence[tuple[float, float]]], asked: tuple[float, float]
) -> str:
    """Draw the slowest flow's expected share of its rate by number of flows; ``asked``: the marked point."""
    most = max(x for line in lines.values() for x, _ in line)

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + x / most * (_RIGHT - _LEFT), _BOTTOM - y * (_BOTTOM - _TOP)

    parts = [text(_LEFT, 28, title, size=15, ink=INK)]
    for tenth in range(0, 11, 2):
        _, y = place(0, tenth / 10)
        parts.append(rule((_LEFT, y), (_RIGHT, y)))
        parts.append(text(_LEFT - 8, y + 4, f"{tenth / 10:.1f}", anchor="end"))
    for quarter in range(5):
        x, _ = place(most * quarter / 4, 0)
        parts.append(text(x, _BOTTOM + 18, f"{most * quarter / 4:.0f}", anchor="middle"))
    for number, line in enumerate(lines.values()):
        parts.append(polyline([place(x, y) for x, y in line], SERIES[number % len(SERIES)]))
    parts += legend(zip(SERIES, lines, strict=False), _LEFT + 10, 40, mark=4)
    x, y = place(*asked)
    hint = f"{asked[0]:.0f} flows: {asked[1]:.2f}"
    parts.append(dot(x, y, 4.5, SERIES[0], hint))
    parts.append(text((_LEFT + _RIGHT) / 2, _BOTTOM + 38, "flows that go up at once", anchor="middle"))
    parts.append(text(16, 207, "slowest flow, share of its rate", "middle", upright=True))
    return document(720, 400, title, parts)


def draw_bars(title: str, rows: Sequence[EcmpRow]) -> str:
    """Draw a bar for the median draw and a whisker from the 5th to the 95th percentile."""
    parts = [text(24, 28, title, size=15, ink=INK)]
    parts.append(text(24, 50, "slowest flow, share of its rate: median draw, 5th to 95th percentile"))
    scale, top = _BAR_RIGHT - _BAR_LEFT, 66.0
    for row in rows:
        middle, colour = top + 8, SERIES[1 if row.is_asked else 0]
        parts.append(text(_BAR_LEFT - 8, middle + 4, row.name, anchor="end"))
        hint = f"{row.name}: {row.slowest_ratio:.2f}, {row.held_up_ratio:.0%} of the flows slowed"
        parts.append(box(_BAR_LEFT, top, row.slowest_ratio * scale, 16, colour, hint))
        low, high = (_BAR_LEFT + share * scale for share in (row.low_ratio, row.high_ratio))
        for ink, width in ((PAPER, 4.0), (INK, 1.5)):
            parts.append(rule((low, middle), (high, middle), ink, width=width))
        parts.append(text(max(high, _BAR_LEFT) + 8, middle + 4, f"{row.slowest_ratio:.2f}"))
        top += _ROW
    return document(720, top + 16, title, parts)
