"""The picture of `myriad network place`: which node holds what, how far bytes go, how long it takes.

as numbered   leaf 0  ▪▪▪▪▪▪▪▪▪▪▪▪     a cell is a node, a row a set of switches; its colour is the part
              leaf 1  ▪▪▪▪▪▪▪▪▪▪▪▪     of the pipeline that it holds, or of several jobs the job
bytes         ▇▇▇▇▇▇▇▅▃                what leaves nodes, by the highest switch that it goes through
iteration     │ ├──╂────┤              p5, p50 and p95 over draws; the line: predicted without switches
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from html import escape

import numpy as np

from myriad.cli.svg import text
from myriad.units import format_number

__all__ = ["TIERS", "Drawn", "draw", "spell"]

_text = partial(text, ink="#16202c")

_WIDTH, _LEFT, _RIGHT = 860.0, 150.0, 830.0
TIERS = ("inside nodes", "one switch", "one pod", "above pods")
_TIER_COLOURS = ("#cfd8e3", "#7fb0e6", "#1f5fa8", "#b3403a")
_MOST_ROWS, _GRID = 48, 170.0


@dataclass(frozen=True)
class Drawn:
    """One arrangement."""

    name: str
    held: Sequence[int]
    """By node: what it holds, a number from 0; -1: nothing."""
    tier_bytes: Sequence[float]
    seconds: Sequence[Sequence[float]]
    """By job."""


def draw(
    title: str,
    arrangements: Sequence[Drawn],
    rows: Sequence[int],
    names: Sequence[str],
    jobs: Sequence[tuple[str, float]],
) -> str:
    """``rows``: of each node, from 0. ``names``: of what nodes hold. ``jobs``: with seconds as they
    are predicted without switches."""
    parts, top = [_text(24, 30, title, size=14)], 60.0
    parts.append(_text(24, 50, "a cell is a node, a row those under the same first-tier switches; they hold"))
    parts += _legend([(colour_of(i, len(names)), name) for i, name in enumerate(names)][:16], top)
    top += 26
    rows = _few(rows)
    for one in arrangements:
        drawn, top = _grid(one, rows, len(names), top)
        parts += drawn
    drawn, top = _bytes(arrangements, top + 14)
    parts += drawn
    for number, (job, plain) in enumerate(jobs):
        drawn, top = _seconds(arrangements, number, job, plain, top + 14)
        parts += drawn
    size = f'width="{_WIDTH:g}" height="{top + 10:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {top + 10:g}" {size} '
    head += 'font-family="system-ui, sans-serif" font-size="12" role="img">'
    title = f"<title>{escape(title)}</title>"
    return "\n".join([head, title, f'<rect {size} rx="6" fill="#ffffff"/>', *parts, "</svg>"]) + "\n"


def colour_of(number: int, count: int) -> str:
    """Round the circle."""
    return "#e6e9ed" if number < 0 else f"hsl({round(360 * number / max(count, 1) + 210) % 360} 52% 55%)"


def _few(rows: Sequence[int]) -> list[int]:
    """Rows that are too many are drawn as fewer, of as many nodes each."""
    if max(rows) < _MOST_ROWS:
        return list(rows)
    per_row = -(-len(rows) // _MOST_ROWS)
    return [node // per_row for node in range(len(rows))]


def _grid(one: Drawn, rows: Sequence[int], count: int, top: float) -> tuple[list[str], float]:
    """All cells of one colour are one path."""
    widest, high = max(np.bincount(np.array(rows))), max(3.5, min(14.0, _GRID / (max(rows) + 1)))
    across = min((_RIGHT - _LEFT) / widest, 3 * high)
    wide, tall = max(across * 0.9, 0.6), high * 0.82
    place, paths = [0] * (max(rows) + 1), defaultdict[int, str](str)
    for node, row in enumerate(rows):
        x, y = _LEFT + place[row] * across, top + row * high
        place[row] += 1
        paths[one.held[node]] += f"M{x:.1f} {y:.1f}h{wide:.2f}v{tall:.1f}h-{wide:.2f}z"
    parts = [_text(_LEFT - 10, top + 11, one.name, "end")]
    parts += [f'<path d="{path}" fill="{colour_of(held, count)}"/>' for held, path in sorted(paths.items())]
    return parts, top + (max(rows) + 1) * high + 12


def _bytes(arrangements: Sequence[Drawn], top: float) -> tuple[list[str], float]:
    parts = [_text(24, top, "bytes of an iteration that leave nodes, by the highest switch")]
    parts += _legend(list(zip(_TIER_COLOURS, TIERS, strict=True))[1:], top + 8)
    top += 30
    most = max(sum(one.tier_bytes[1:]) for one in arrangements) or 1.0
    for one in arrangements:
        x = _LEFT
        parts.append(_text(_LEFT - 10, top + 12, one.name, "end"))
        for name, colour, size in list(zip(TIERS, _TIER_COLOURS, one.tier_bytes, strict=True))[1:]:
            width = (_RIGHT - _LEFT - 90) * size / most
            parts.append(_box(x, top, width, 16, colour, f"{name}: {_size(size)}"))
            x += width
        parts.append(_text(x + 6, top + 12, _size(sum(one.tier_bytes[1:]))))
        top += 24
    return parts, top


def _seconds(
    arrangements: Sequence[Drawn], job: int, name: str, plain: float, top: float
) -> tuple[list[str], float]:
    parts = [_text(24, top, f"iteration of {name}: p5, p50 and p95; line: {spell(plain)}, without switches")]
    spread = [np.percentile(one.seconds[job], (5, 50, 95)) for one in arrangements]
    most = max(float(found[2]) for found in spread)
    low = min(plain, *(float(found[0]) for found in spread)) * 0.98
    scale = (_RIGHT - _LEFT - 150) / max(most - low, 1e-9)
    top += 10
    at = _LEFT + (plain - low) * scale
    tall = 24 * len(arrangements)
    parts.append(f'<path d="M{at:.1f} {top:.1f}v{tall}" stroke="#66717f" stroke-dasharray="3 3"/>')
    for one, (first, middle, last) in zip(arrangements, spread, strict=True):
        y, x, end = top + 12, _LEFT + (first - low) * scale, _LEFT + (last - low) * scale
        parts.append(_text(_LEFT - 10, y + 4, one.name, "end"))
        hint = f"p5 {spell(first)}, p50 {spell(middle)}, p95 {spell(last)}"
        half = _LEFT + (middle - low) * scale
        parts.append(_box(x, y - 5, max(end - x, 2.0), 10, "#9db7d5", hint))
        parts.append(_box(half - 1.5, y - 8, 3, 16, "#1f5fa8", hint))
        parts.append(_text(end + 8, y + 4, f"{spell(middle)}, p95 {spell(last)}"))
        top += 24
    return parts, top


def _size(num_bytes: float) -> str:
    unit, scale = next(
        (pair for pair in (("TB", 1e12), ("GB", 1e9)) if num_bytes >= pair[1] / 10), ("MB", 1e6)
    )
    return f"{format_number(num_bytes / scale)} {unit}"


def spell(seconds: float) -> str:
    """Of an iteration."""
    return f"{format_number(seconds, 4)} s" if seconds >= 0.1 else f"{format_number(seconds * 1e3, 4)} ms"


def _legend(entries: Sequence[tuple[str, str]], top: float) -> list[str]:
    parts, x = [], _LEFT
    for colour, name in entries:
        parts += [_box(x, top, 11, 11, colour, name), _text(x + 16, top + 10, name)]
        x += 32 + 6.6 * len(name)
    return parts


def _box(x: float, y: float, width: float, height: float, colour: str, hint: str) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" width="{width:.2f}" height="{height:g}"'
    return f'<rect {where} fill="{colour}"><title>{escape(hint)}</title></rect>'
