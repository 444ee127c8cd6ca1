"""The chart kit: elements of self-contained SVG in one style.

Every chart of Myriad is built from these functions and ends in `document`. An SVG has no link, script or
style sheet, so that it can be mailed, put into a page, or made into a PNG. Colours that belong to the theme
also have a class, which a page can restyle:

    svg.chart .paper { fill: none }         background
    svg.chart .ink { fill: white }          titles and names
    svg.chart .soft { fill: silver }        values and axes
    svg.chart .grid { stroke: dimgray }     grid lines
"""

import math
from collections.abc import Iterable
from html import escape

__all__ = [
    "FONT",
    "GRID",
    "IDLE",
    "INK",
    "PAPER",
    "SERIES",
    "SOFT",
    "Point",
    "box",
    "document",
    "dot",
    "legend",
    "log_ticks",
    "polyline",
    "round_step",
    "round_ticks",
    "rule",
    "text",
]

FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
INK, SOFT, GRID, PAPER, IDLE = "#16202c", "#5a6572", "#e2e6eb", "#ffffff", "#f1f3f6"
SERIES = (
    "#1f5fa8",
    "#d1495b",
    "#3a8f5c",
    "#b07c1e",
    "#7a4fa3",
    "#2a8a99",
    "#6b6b6b",
    "#c06a9b",
)
"""Colours of series, in the order in which a chart uses them."""
_CLASSES = {INK: "ink", SOFT: "soft", GRID: "grid"}

Point = tuple[float, float]
"""Horizontal and vertical place in pixels."""


def document(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """Return a whole SVG: ``parts`` on a background, with ``title`` for screen readers."""
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" font-family="{FONT}" font-size="12" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect class="paper" width="{width:g}" height="{height:g}" rx="6" fill="{PAPER}"/>',
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


def text(
    x: float,
    y: float,
    words: str,
    anchor: str = "start",
    *,
    size: float = 12,
    ink: str = SOFT,
    weight: int = 400,
    upright: bool = False,
    halo: bool = False,
) -> str:
    """Return a line of text whose ``anchor`` (start, middle, end) is at ``x``.

    ``upright``: write from bottom to top; ``halo``: draw an outline that keeps text readable on lines."""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size:g}"'
    style = f'{_class(ink)} fill="{ink}"'
    style += f' font-weight="{weight}"' if weight != 400 else ""
    style += f' transform="rotate(-90 {x:g} {y:g})"' if upright else ""
    style += f' stroke="{PAPER}" stroke-width="4" paint-order="stroke"' if halo else ""
    return f"<text {place}{style}>{escape(words)}</text>"


def box(
    x: float, y: float, width: float, height: float, colour: str, hint: str = "", *, rounding: float = 0
) -> str:
    """Return a filled rectangle; ``hint`` shows when the pointer is on it."""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.2f}" height="{height:g}"'
    corners = f' rx="{rounding:g}"' if rounding else ""
    return _with_hint(f'rect {place}{corners} fill="{colour}"', hint)


def dot(
    x: float, y: float, radius: float, colour: str, hint: str = "", *, ring: str = "", opacity: float = 1
) -> str:
    """Return a filled circle; ``ring``: the colour of its outline."""
    style = f'fill="{colour}"'
    style += f' stroke="{ring}" stroke-width="2"' if ring else ""
    style += f' fill-opacity="{opacity:g}"' if opacity < 1 else ""
    return _with_hint(f'circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" {style}', hint)


def polyline(
    points: Iterable[Point], colour: str, *, width: float = 2, opacity: float = 1, dashes: str = ""
) -> str:
    """Return a line through points; ``dashes``: lengths of strokes and gaps, such as ``"6 3"``."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    style = f'stroke="{colour}" stroke-width="{width:g}" stroke-linejoin="round"'
    style += f' stroke-opacity="{opacity:g}"' if opacity < 1 else ""
    style += f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<polyline points="{path}" fill="none" {style}/>'


def rule(start: Point, stop: Point, colour: str = GRID, *, width: float = 1, dashes: str = "") -> str:
    """Return a straight line: a grid line, an axis, a limit."""
    style = f'stroke="{colour}" stroke-width="{width:g}"'
    style += f' stroke-dasharray="{dashes}"' if dashes else ""
    path = f"M{start[0]:.1f} {start[1]:.1f}L{stop[0]:.1f} {stop[1]:.1f}"
    return f'<path d="{path}"{_class(colour)} {style}/>'


def legend(entries: Iterable[tuple[str, str]], x: float, y: float, *, mark: float = 11) -> list[str]:
    """Return colours and their names in one row; ``y``: the top of the marks, ``mark``: their height."""
    parts = []
    for colour, name in entries:
        parts += [box(x, y + (11 - mark) / 2, 14 if mark < 8 else 11, mark, colour)]
        parts += [text(x + 18, y + 10, name)]
        x += 36 + 6.6 * len(name)
    return parts


def round_ticks(low: float, high: float, count: float = 6) -> list[float]:
    """Return about ``count`` values between two numbers: multiples of 1, 2 or 5 times a power of ten."""
    step = round_step((high - low) / count)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [round(number * step, 10) for number in range(first, last + 1)]


def log_ticks(low: float, high: float, factors: Iterable[float] = (1, 2, 5)) -> list[float]:
    """Return the values between two positive numbers that are a factor times a power of ten."""
    factors, powers = tuple(factors), range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = (round(factor * 10.0**power, 9) for power in powers for factor in factors)
    return [tick for tick in ticks if low <= tick <= high]


def round_step(least: float) -> float:
    """Return the smallest 1, 2 or 5 times a power of ten that is at least ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _class(colour: str) -> str:
    name = _CLASSES.get(colour)
    return f' class="{name}"' if name else ""


def _with_hint(element: str, hint: str) -> str:
    tag = element.partition(" ")[0]
    return f"<{element}><title>{escape(hint)}</title></{tag}>" if hint else f"<{element}/>"
