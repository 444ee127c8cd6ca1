"""The picture of `myriad network place`: the groups on the nodes, the bytes by tier, the seconds of an
iteration.

as numbered   leaf 0  ▪▪▪▪▪▪▪▪▪▪▪▪     a cell is a node, a row a set of switches; its colour is the part
              leaf 1  ▪▪▪▪▪▪▪▪▪▪▪▪     of the pipeline that it holds, or of several jobs the job
bytes         ▇▇▇▇▇▇▇▅▃                bytes between nodes, by the highest switch that they cross
iteration     │ ├──╂────┤              p5, p50 and p95 over draws; the line: predicted without switches
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from myriad.forecasts.compared_placements import TIERS, ComparedPlacements, format_iteration
from myriad.network.node_placement import TopologyDomains
from myriad.reports.charts.svg import INK, SOFT, box, document, legend, rule, text
from myriad.units import format_number

__all__ = ["placement_picture"]

_WIDTH, _LEFT, _RIGHT = 860.0, 150.0, 830.0
_TIER_COLOURS = ("#cfd8e3", "#7fb0e6", "#1f5fa8", "#b3403a")
_MOST_ROWS, _GRID = 48, 170.0


@dataclass(frozen=True)
class _Drawn:
    """One placement of the picture."""

    name: str
    held: Sequence[int]
    """Group on each node, from 0; -1: idle."""
    tier_bytes: Sequence[float]
    seconds: Sequence[Sequence[float]]
    """Iteration seconds by job and draw."""


def placement_picture(placed: ComparedPlacements) -> str:
    """Draw the placements, the bytes by tier and the spread of iterations."""
    near = TopologyDomains(placed.fabric)
    drawn = [
        _Drawn(
            row[0].arrangement.name,
            placed.group_of_nodes(number),
            [float(sum(one.tier_bytes[tier] for one in row)) for tier in range(len(TIERS))],
            [[float(s) for s in one.seconds] for one in row],
        )
        for number, row in enumerate(placed.verdicts)
    ]
    rows = [int(one) for one in near.set_of]
    jobs = list(zip(placed.titles, placed.plain_seconds, strict=True))
    return _draw(placed.headline(), drawn, rows, placed.node_groups(), jobs)


def _draw(
    title: str,
    arrangements: Sequence[_Drawn],
    rows: Sequence[int],
    names: Sequence[str],
    jobs: Sequence[tuple[str, float]],
) -> str:
    """Draw the picture. ``rows``: the row of each node. ``names``: the groups that nodes hold. ``jobs``:
    their names and seconds predicted without switches."""
    parts, top = [text(24, 30, title, size=15, ink=INK)], 60.0
    parts.append(
        text(
            24,
            50,
            "a cell is a node, a row the nodes under the same first-tier switches; colour: what a node holds",
        )
    )
    parts += legend([(colour_of(i, len(names)), name) for i, name in enumerate(names)][:16], _LEFT, top)
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
    return document(_WIDTH, top + 10, title, parts)


def colour_of(number: int, count: int) -> str:
    """Return one of ``count`` hues around the colour circle; -1: idle."""
    return "#e6e9ed" if number < 0 else f"hsl({round(360 * number / max(count, 1) + 210) % 360} 52% 55%)"


def _few(rows: Sequence[int]) -> list[int]:
    """Merge rows where there are too many; all rows then have the same number of nodes."""
    if max(rows) < _MOST_ROWS:
        return list(rows)
    per_row = -(-len(rows) // _MOST_ROWS)
    return [node // per_row for node in range(len(rows))]


def _grid(one: _Drawn, rows: Sequence[int], count: int, top: float) -> tuple[list[str], float]:
    """Draw the nodes of one placement; all cells of one colour are one path."""
    widest, high = max(np.bincount(np.array(rows))), max(3.5, min(14.0, _GRID / (max(rows) + 1)))
    across = min((_RIGHT - _LEFT) / widest, 3 * high)
    wide, tall = max(across * 0.9, 0.6), high * 0.82
    place, paths = [0] * (max(rows) + 1), defaultdict[int, str](str)
    for node, row in enumerate(rows):
        x, y = _LEFT + place[row] * across, top + row * high
        place[row] += 1
        paths[one.held[node]] += f"M{x:.1f} {y:.1f}h{wide:.2f}v{tall:.1f}h-{wide:.2f}z"
    parts = [text(_LEFT - 10, top + 11, one.name, "end")]
    parts += [f'<path d="{path}" fill="{colour_of(held, count)}"/>' for held, path in sorted(paths.items())]
    return parts, top + (max(rows) + 1) * high + 12


def _bytes(arrangements: Sequence[_Drawn], top: float) -> tuple[list[str], float]:
    parts = [text(24, top, "bytes of an iteration that leave nodes, by the highest switch")]
    parts += legend(list(zip(_TIER_COLOURS, TIERS, strict=True))[1:], _LEFT, top + 8)
    top += 30
    most = max(sum(one.tier_bytes[1:]) for one in arrangements) or 1.0
    for one in arrangements:
        x = _LEFT
        parts.append(text(_LEFT - 10, top + 12, one.name, "end"))
        for name, colour, size in list(zip(TIERS, _TIER_COLOURS, one.tier_bytes, strict=True))[1:]:
            width = (_RIGHT - _LEFT - 90) * size / most
            parts.append(box(x, top, width, 16, colour, f"{name}: {_size(size)}"))
            x += width
        parts.append(text(x + 6, top + 12, _size(sum(one.tier_bytes[1:]))))
        top += 24
    return parts, top


def _seconds(
    arrangements: Sequence[_Drawn], job: int, name: str, plain: float, top: float
) -> tuple[list[str], float]:
    parts = [
        text(
            24,
            top,
            f"iteration of {name}: p5, p50 and p95; line: {format_iteration(plain)}, without switches",
        )
    ]
    spread = [np.percentile(one.seconds[job], (5, 50, 95)) for one in arrangements]
    most = max(float(found[2]) for found in spread)
    low = min(plain, *(float(found[0]) for found in spread)) * 0.98
    scale = (_RIGHT - _LEFT - 150) / max(most - low, 1e-9)
    top += 10
    at = _LEFT + (plain - low) * scale
    tall = 24 * len(arrangements)
    parts.append(rule((at, top), (at, top + tall), SOFT, dashes="3 3"))
    for one, (first, middle, last) in zip(arrangements, spread, strict=True):
        y, x, end = top + 12, _LEFT + (first - low) * scale, _LEFT + (last - low) * scale
        parts.append(text(_LEFT - 10, y + 4, one.name, "end"))
        hint = f"p5 {format_iteration(first)}, p50 {format_iteration(middle)}, p95 {format_iteration(last)}"
        half = _LEFT + (middle - low) * scale
        parts.append(box(x, y - 5, max(end - x, 2.0), 10, "#9db7d5", hint))
        parts.append(box(half - 1.5, y - 8, 3, 16, "#1f5fa8", hint))
        parts.append(text(end + 8, y + 4, f"{format_iteration(middle)}, p95 {format_iteration(last)}"))
        top += 24
    return parts, top


def _size(num_bytes: float) -> str:
    unit, scale = next(
        (pair for pair in (("TB", 1e12), ("GB", 1e9)) if num_bytes >= pair[1] / 10), ("MB", 1e6)
    )
    return f"{format_number(num_bytes / scale)} {unit}"
