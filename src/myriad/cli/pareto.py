"""Time against memory as a picture: what no other layout beats in both, and the plan among it."""

import math
from collections.abc import Sequence
from html import escape
from itertools import pairwise

__all__ = ["Point", "pareto_svg", "pareto_text"]

Point = tuple[float, float, str]
"""Bytes, seconds, what it is."""

_LEFT, _RIGHT, _TOP, _BOTTOM = 70.0, 700.0, 50.0, 350.0
_GIB = 2.0**30


def pareto_svg(title: str, front: Sequence[Point], plan: Point, capacity_bytes: float) -> str:
    """Self-contained, 720 x 400, readable on light and dark pages; a layout's words show on hover."""
    points = [*front, plan]
    across = _Scale([x for x, _, _ in points] + [capacity_bytes], _LEFT, _RIGHT)
    up = _Scale([y for _, y, _ in points], _BOTTOM, _TOP)
    limit = across(capacity_bytes)
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 400" font-family="system-ui, sans-serif" '
        'font-size="12" role="img">',
        f"<title>{escape(title)}</title>",
        '<rect width="720" height="400" rx="6" fill="#ffffff"/>',
        _text(_LEFT, 26, title, size=15, ink="#1a1a1a"),
        *(line for x in across.ticks(_GIB) for line in _tick(across(x), f"{x / _GIB:g}")),
        *(_grid(up(y), f"{y:g}") for y in up.ticks(1.0)),
        _text(385, 390, "memory of an accelerator (GiB)", anchor="middle"),
        '<text x="16" y="200" fill="#444" text-anchor="middle" transform="rotate(-90 16 200)">'
        "seconds an iteration</text>",
        f'<path d="M{limit:.1f} {_TOP}V{_BOTTOM}" stroke="#d1495b" stroke-dasharray="4 3"/>',
        _text(limit - 4, _TOP + 12, "all there is", anchor="end", ink="#d1495b"),
        _stairs(front, across, up),
        *(_dot(across(x), up(y), words, "#1f5fa8", 3.0) for x, y, words in front),
        _dot(across(plan[0]), up(plan[1]), plan[2], "#d1495b", 5.5),
    ]
    return "\n".join([*lines, "</svg>"]) + "\n"


class _Scale:
    """Numbers to pixels, by their logarithms: layouts differ by factors."""

    def __init__(self, values: Sequence[float], start: float, stop: float) -> None:
        low, high = min(values), max(values)
        self.low, self.high = math.log(low * 0.95), math.log(high * 1.05)
        self.start, self.stop = start, stop

    def __call__(self, value: float) -> float:
        share = (math.log(value) - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)

    def ticks(self, unit: float) -> list[float]:
        """1, 2 and 5 times powers of ten, of a unit."""
        powers = range(-6, 9)
        every = [factor * 10.0**power * unit for power in powers for factor in (1, 1.5, 2, 3, 5, 7)]
        return [value for value in every if self.low <= math.log(value) <= self.high]


def _tick(x: float, words: str) -> tuple[str, str]:
    return f'<path d="M{x:.1f} {_TOP}V{_BOTTOM}" stroke="#eeeeee"/>', _text(x, 368, words, anchor="middle")


def _grid(y: float, words: str) -> str:
    line = f'<path d="M{_LEFT} {y:.1f}H{_RIGHT}" stroke="#e6e6e6"/>'
    return line + _text(_LEFT - 8, y + 4, words, anchor="end")


def _stairs(front: Sequence[Point], across: _Scale, up: _Scale) -> str:
    places = [(across(x), up(y)) for x, y, _ in front]
    path = f"M{places[0][0]:.1f} {places[0][1]:.1f}" if places else ""
    path += "".join(f"H{x:.1f}V{y:.1f}" for _, (x, y) in pairwise(places))
    return f'<path d="{path}" fill="none" stroke="#9db7d5" stroke-width="1.5"/>'


def _dot(x: float, y: float, words: str, colour: str, radius: float) -> str:
    hint = f"<title>{escape(words)}</title>"
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}">{hint}</circle>'


def _text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 12, ink: str = "#444") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" fill="{ink}">{escape(words)}</text>'


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
    labels = {0: f"{slowest:.3g} s", height - 1: f"{quickest:.3g} s"}
    rows = [f"{labels.get(number, ''):>9} │{''.join(row)}" for number, row in enumerate(cells)]
    low, high = min(x for x, _, _ in points) / _GIB, max(x for x, _, _ in points) / _GIB
    first, last = f"{low:.3g} GiB", f"{high:.3g} GiB"
    return [*rows, " " * 11 + first + last.rjust(width - len(first))]
