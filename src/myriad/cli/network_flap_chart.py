"""The picture of `myriad network flap`: by down time, whether the job ends and how long all wait.

1 │     ╭────    abort probability            s │      ╱
  │    ╱         dashed: adaptive               │   ╭─╯   mean wait of those
0 │───╯          of timers                      │ ──╯     that survive
  └─────────                                    └─────────
   0.1   1  10 s                                 0.1   1  10 s
"""

from collections.abc import Sequence
from functools import partial
from math import isfinite, log10

import numpy as np

from myriad.cli.svg import text
from myriad.network.flaps import Habits
from myriad.network.retransmission import Timers, lost_probability, mean_wait_seconds

__all__ = ["draw"]

_text = partial(text, ink="#333")

_COLOURS = ("#1f5fa8", "#b07c1e", "#3a8f5c", "#7a4fa3", "#b3403a", "#2a8a99", "#6b6b6b")
_TOP, _BOTTOM = 66.0, 316.0
_PANELS = ((56.0, 416.0), (486.0, 846.0))
_SHORTEST, _LONGEST = 0.1, 60.0
_TICKS = (0.1, 0.3, 1, 3, 10, 30)
_WAITS = (0.1, 1, 10, 100)
_POINTS = 160


def draw(timers: Sequence[Timers], habits: Habits) -> str:
    """One SVG, complete in itself."""
    down = np.geomspace(_SHORTEST, _LONGEST, _POINTS)
    parts = [_text(24, 28, "A link goes down and comes up again", size=15)]
    parts += _frame(
        0, "probability that the job ends", [(f"{share:.0%}", share) for share in (0, 0.25, 0.5, 0.75, 1)]
    )
    parts += _frame(1, "all ranks wait for", [(f"{one:g} s", _height(one)) for one in _WAITS])
    timeouts = sorted({one.timeout for one in timers})
    for number, one in enumerate(timers):
        colour = _COLOURS[timeouts.index(one.timeout) % len(_COLOURS)]
        lost = lost_probability(one, down, habits.num_queue_pairs)
        waits = mean_wait_seconds(one, down, habits.num_queue_pairs)
        parts.append(_line(0, list(zip(down, lost, strict=True)), colour, one.adaptive))
        survived = [(d, _height(w)) for d, w, p in zip(down, waits, lost, strict=True) if p < 0.99]
        parts.append(_line(1, survived, colour, one.adaptive))
        parts += _entry(number, colour, one)
    if isfinite(habits.driver_seconds):
        parts += _driver(habits.driver_seconds)
    height = _BOTTOM + 66 + 20 * -(-len(timers) // 3)
    size = f'width="872" height="{height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 872 {height:g}" {size} '
    head += 'font-family="system-ui, sans-serif" font-size="12">'
    return "\n".join([head, f'<rect {size} rx="6" fill="#ffffff"/>', *parts, "</svg>"]) + "\n"


def _x(panel: int, seconds: float) -> float:
    left, right = _PANELS[panel]
    return left + (right - left) * log10(seconds / _SHORTEST) / log10(_LONGEST / _SHORTEST)


def _y(share: float) -> float:
    return _BOTTOM - share * (_BOTTOM - _TOP)


def _height(wait: float) -> float:
    """A wait's place, by its logarithm."""
    return min(1.0, max(0.0, log10(max(wait, 1e-9) / _WAITS[0]) / log10(_WAITS[-1] / _WAITS[0])))


def _frame(panel: int, title: str, marks: Sequence[tuple[str, float]]) -> list[str]:
    left, right = _PANELS[panel]
    parts = [_text(left, _TOP - 14, title)]
    for words, share in marks:
        parts.append(f'<path d="M{left:.1f} {_y(share):.1f}H{right:.1f}" stroke="#e6e6e6"/>')
        parts.append(_text(left - 6, _y(share) + 4, words, "end"))
    parts += [_text(_x(panel, tick), _BOTTOM + 18, f"{tick:g}", "middle") for tick in _TICKS]
    return [*parts, _text((left + right) / 2, _BOTTOM + 36, "link down for (s)", "middle")]


def _driver(seconds: float) -> list[str]:
    if not _SHORTEST < seconds < _LONGEST:
        return []
    parts = []
    for panel in (0, 1):
        x = _x(panel, seconds)
        parts.append(f'<path d="M{x:.1f} {_TOP}V{_BOTTOM}" stroke="#b3403a" stroke-dasharray="2 3"/>')
    hint = _text(_x(0, seconds) + 5, _BOTTOM - 8, "the driver ends the ranks", ink="#b3403a")
    return [*parts, hint.replace("<text ", '<text stroke="#fff" stroke-width="4" paint-order="stroke" ')]


def _line(panel: int, points: Sequence[tuple[float, float]], colour: str, dashed: bool) -> str:
    places = " ".join(f"{_x(panel, seconds):.1f},{_y(share):.1f}" for seconds, share in points)
    style = 'stroke-dasharray="6 3"' if dashed else ""
    return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2" {style}/>'


def _entry(number: int, colour: str, timers: Timers) -> list[str]:
    row, column = divmod(number, 3)
    x, y = 56 + 264 * column, _BOTTOM + 62 + 20 * row
    dashes = 'stroke-dasharray="6 3"' if timers.adaptive else ""
    words = f"timeout {timers.timeout}, {timers.retries} retries" + (", adaptive" if timers.adaptive else "")
    line = f'<path d="M{x} {y - 4:.1f}h22" stroke="{colour}" stroke-width="2" {dashes}/>'
    return [line, _text(x + 28, y, words)]
