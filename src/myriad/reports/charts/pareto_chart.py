"""Time against memory: the Pareto front of the layouts, and the plan."""

import math
from collections.abc import Sequence
from itertools import pairwise

from myriad.forecasts.plan_answer import ExplainedPlan, FrontPoint
from myriad.reports.charts.svg import INK, SERIES, box, document, dot, polyline, rule, text
from myriad.units import format_number

__all__ = ["pareto_svg", "pareto_text", "plan_picture"]


_LEFT, _RIGHT, _TOP, _BOTTOM = 70.0, 700.0, 84.0, 350.0
_GIB, _MIB = 2.0**30, 2.0**20
_BLUE, _RED = SERIES[:2]
_PALE_RED = "#fbeef0"
_NEAR = 4.0
"""Largest ratio of the drawn accelerator memory to the memory of the layouts on the front: a line farther
away would squeeze all layouts into a corner."""


def plan_picture(found: ExplainedPlan) -> str:
    """Draw time against memory of a plan and of the layouts on the Pareto front."""
    accelerator = found.problem.cluster.accelerator
    title = f"{found.job.name} on {found.problem.cluster.world} x {accelerator.name}"
    plan = found.point(found.best.candidate)
    return pareto_svg(title, found.front(), plan, float(accelerator.memory_bytes))


def pareto_svg(title: str, front: Sequence[FrontPoint], plan: FrontPoint, capacity_bytes: float) -> str:
    """Draw seconds against bytes on logarithmic axes; a layout's description shows on hover."""
    points = [*front, plan]
    most = max(x for x, _, _ in points)
    is_near = capacity_bytes < _NEAR * most
    across = _Scale([x for x, _, _ in points] + ([capacity_bytes] if is_near else []), _LEFT, _RIGHT)
    up = _Scale([y for _, y, _ in points], _BOTTOM, _TOP)
    unit, name = (_GIB, "GiB") if most > 2 * _GIB else (_MIB, "MiB")
    words = f"the plan: {format_number(plan[1], 4)} s, {format_number(plan[0] / unit, 4)} {name}, {plan[2]}"
    lines = [
        text(_LEFT, 24, title, size=15, ink=INK),
        dot(_LEFT + 6, 41, 3.0, _BLUE) + text(_LEFT + 17, 45, "layouts that none beats in both"),
        dot(_LEFT + 6, 60, 5.5, _RED) + text(_LEFT + 17, 64, words),
        *(_limit(across(capacity_bytes), capacity_bytes) if is_near else [_far_limit(capacity_bytes)]),
        *(_tick(across(x), format_number(x / unit, 4)) for x in across.ticks(unit)),
        *(_grid(up(y), format_number(y, 4)) for y in up.ticks(1.0)),
        text(385, 390, f"memory of an accelerator ({name})", anchor="middle"),
        text(16, 217, "seconds an iteration", "middle", upright=True),
        _stairs(front, across, up),
        *(dot(across(x), up(y), 3.0, _BLUE, words) for x, y, words in front),
        dot(across(plan[0]), up(plan[1]), 5.5, _RED, plan[2]),
    ]
    return document(720, 400, title, lines)


def _limit(x: float, capacity_bytes: float) -> list[str]:
    """Mark the accelerator's memory: no layout to its right fits."""
    return [
        box(x, _TOP, _RIGHT - x, _BOTTOM - _TOP, _PALE_RED),
        rule((x, _TOP), (x, _BOTTOM), _RED, dashes="4 3"),
        text(
            x - 4,
            _TOP + 12,
            f"capacity: {format_number(capacity_bytes / _GIB, 4)} GiB",
            anchor="end",
            ink=_RED,
        ),
    ]


def _far_limit(capacity_bytes: float) -> str:
    words = f"capacity: {format_number(capacity_bytes / _GIB, 4)} GiB, far to the right \u2192"
    return text(_RIGHT, _TOP + 12, words, anchor="end", ink=_RED)


class _Scale:
    """Maps numbers to pixels by their logarithms, because layouts differ by factors."""

    def __init__(self, values: Sequence[float], start: float, stop: float) -> None:
        low, high = math.log(min(values)), math.log(max(values))
        margin = max(0.05 * (high - low), 0.001)
        self.low, self.high = low - margin, high + margin
        self.start, self.stop = start, stop

    def __call__(self, value: float) -> float:
        share = (math.log(value) - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)

    def ticks(self, unit: float) -> list[float]:
        """Return four to ten round numbers of a unit: the same few of each power of ten, or equal steps in a
        narrow range."""
        for factors in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
            every = [factor * 10.0**power * unit for power in range(-9, 10) for factor in factors]
            found = [value for value in every if self.low <= math.log(value) <= self.high]
            if len(found) >= 4:
                return found
        low, high = math.exp(self.low) / unit, math.exp(self.high) / unit
        power = 10.0 ** math.floor(math.log10(high - low))
        step = next(power / part for part in (1, 2, 5, 10) if (high - low) * part / power >= 4)
        first, last = math.ceil(low / step), math.floor(high / step)
        return [number * step * unit for number in range(first, last + 1)]


def _tick(x: float, words: str) -> str:
    return rule((x, _TOP), (x, _BOTTOM)) + text(x, 368, words, anchor="middle")


def _grid(y: float, words: str) -> str:
    return rule((_LEFT, y), (_RIGHT, y)) + text(_LEFT - 8, y + 4, words, anchor="end")


def _stairs(front: Sequence[FrontPoint], across: _Scale, up: _Scale) -> str:
    places = [(across(x), up(y)) for x, y, _ in front]
    corners = [point for (_, y), (x, below) in pairwise(places) for point in ((x, y), (x, below))]
    return polyline([*places[:1], *corners], "#9db7d5", width=1.5)


def pareto_text(
    front: Sequence[FrontPoint], plan: FrontPoint, *, width: int = 60, height: int = 10
) -> list[str]:
    """Draw the front and the plan as text: ``·`` a layout on the Pareto front, ``●`` the plan."""
    points = [*front, plan]
    across = _Scale([x for x, _, _ in points], 0, width - 1)
    up = _Scale([y for _, y, _ in points], height - 1, 0)
    cells = [[" "] * width for _ in range(height)]
    for x, y, _ in front:
        cells[round(up(y))][round(across(x))] = "·"
    cells[round(up(plan[1]))][round(across(plan[0]))] = "●"
    slowest, quickest = max(y for _, y, _ in points), min(y for _, y, _ in points)
    labels = {0: f"{format_number(slowest)} s", height - 1: f"{format_number(quickest)} s"}
    rows = [f"{labels.get(number, ''):>9} │{''.join(row)}" for number, row in enumerate(cells)]
    low, high = min(x for x, _, _ in points) / _GIB, max(x for x, _, _ in points) / _GIB
    first, last = f"{format_number(low)} GiB", f"{format_number(high)} GiB"
    return [*rows, " " * 11 + first + last.rjust(width - len(first))]
