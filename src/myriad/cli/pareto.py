"""Time against memory as a picture: what no other layout beats in both, and the plan among it."""

import math
from collections.abc import Sequence
from html import escape
from itertools import pairwise

from myriad.cli.svg import text
from myriad.units import format_number

__all__ = ["Point", "pareto_svg", "pareto_text"]

Point = tuple[float, float, str]
"""Bytes, seconds, what it is."""

_LEFT, _RIGHT, _TOP, _BOTTOM = 70.0, 700.0, 84.0, 350.0
_GIB, _MIB = 2.0**30, 2.0**20
_BLUE, _RED, _PALE_RED = "#1f5fa8", "#d1495b", "#fbeef0"
_NEAR = 4.0
"""Times the most that a layout of the front needs, up to which the accelerator's memory is drawn: farther
off, it would squeeze all layouts into a corner."""


def pareto_svg(title: str, front: Sequence[Point], plan: Point, capacity_bytes: float) -> str:
    """Self-contained, 720 x 400, readable on light and dark pages; a layout's words show on hover."""
    points = [*front, plan]
    most = max(x for x, _, _ in points)
    is_near = capacity_bytes < _NEAR * most
    across = _Scale([x for x, _, _ in points] + ([capacity_bytes] if is_near else []), _LEFT, _RIGHT)
    up = _Scale([y for _, y, _ in points], _BOTTOM, _TOP)
    unit, name = (_GIB, "GiB") if most > 2 * _GIB else (_MIB, "MiB")
    words = f"the plan: {format_number(plan[1], 4)} s, {format_number(plan[0] / unit, 4)} {name}, {plan[2]}"
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 400" font-family="system-ui, sans-serif" '
        'font-size="12" role="img">',
        f"<title>{escape(title)}</title>",
        '<rect width="720" height="400" rx="6" fill="#ffffff"/>',
        text(_LEFT, 24, title, size=15, ink="#1a1a1a"),
        _dot(_LEFT + 6, 41, "", _BLUE, 3.0) + text(_LEFT + 17, 45, "layouts that none beats in both"),
        _dot(_LEFT + 6, 60, "", _RED, 5.5) + text(_LEFT + 17, 64, words),
        *(_limit(across(capacity_bytes), capacity_bytes) if is_near else [_far_limit(capacity_bytes)]),
        *(_tick(across(x), format_number(x / unit, 4)) for x in across.ticks(unit)),
        *(_grid(up(y), format_number(y, 4)) for y in up.ticks(1.0)),
        text(385, 390, f"memory of an accelerator ({name})", anchor="middle"),
        '<text x="16" y="217" fill="#444" text-anchor="middle" transform="rotate(-90 16 217)">'
        "seconds an iteration</text>",
        _stairs(front, across, up),
        *(_dot(across(x), up(y), words, _BLUE, 3.0) for x, y, words in front),
        _dot(across(plan[0]), up(plan[1]), plan[2], _RED, 5.5),
    ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _limit(x: float, capacity_bytes: float) -> list[str]:
    """Right of it nothing fits."""
    size = f'width="{_RIGHT - x:.1f}" height="{_BOTTOM - _TOP}"'
    return [
        f'<rect x="{x:.1f}" y="{_TOP}" {size} fill="{_PALE_RED}"/>',
        f'<path d="M{x:.1f} {_TOP}V{_BOTTOM}" stroke="{_RED}" stroke-dasharray="4 3"/>',
        text(
            x - 4,
            _TOP + 12,
            f"all there is: {format_number(capacity_bytes / _GIB, 4)} GiB",
            anchor="end",
            ink=_RED,
        ),
    ]


def _far_limit(capacity_bytes: float) -> str:
    words = f"all there is: {format_number(capacity_bytes / _GIB, 4)} GiB, far to the right \u2192"
    return text(_RIGHT, _TOP + 12, words, anchor="end", ink=_RED)


class _Scale:
    """Numbers to pixels, by their logarithms: layouts differ by factors."""

    def __init__(self, values: Sequence[float], start: float, stop: float) -> None:
        low, high = math.log(min(values)), math.log(max(values))
        margin = max(0.05 * (high - low), 0.001)
        self.low, self.high = low - margin, high + margin
        self.start, self.stop = start, stop

    def __call__(self, value: float) -> float:
        share = (math.log(value) - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)

    def ticks(self, unit: float) -> list[float]:
        """Four to ten round numbers of a unit: of each power of ten the same few, or in a narrow range equal
        steps."""
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
    line = f'<path d="M{x:.1f} {_TOP}V{_BOTTOM}" stroke="#e6e6e6"/>'
    return line + text(x, 368, words, anchor="middle")


def _grid(y: float, words: str) -> str:
    line = f'<path d="M{_LEFT} {y:.1f}H{_RIGHT}" stroke="#e6e6e6"/>'
    return line + text(_LEFT - 8, y + 4, words, anchor="end")


def _stairs(front: Sequence[Point], across: _Scale, up: _Scale) -> str:
    places = [(across(x), up(y)) for x, y, _ in front]
    path = f"M{places[0][0]:.1f} {places[0][1]:.1f}" if places else ""
    path += "".join(f"H{x:.1f}V{y:.1f}" for _, (x, y) in pairwise(places))
    return f'<path d="{path}" fill="none" stroke="#9db7d5" stroke-width="1.5"/>'


def _dot(x: float, y: float, words: str, colour: str, radius: float) -> str:
    hint = f"<title>{escape(words)}</title>" if words else ""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}">{hint}</circle>'


def pareto_text(front: Sequence[Point], plan: Point, *, width: int = 60, height: int = 10) -> list[str]:
    """The same in a terminal: ``·`` a layout that none beats, ``●`` the plan."""
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
