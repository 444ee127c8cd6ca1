"""The picture of `myriad network flap`: abort probability and mean wait by down time.

1 │     ╭────    abort probability            s │      ╱
  │    ╱         dashed: adaptive               │   ╭─╯   mean wait of those
0 │───╯          of timers                      │ ──╯     that survive
  └─────────                                    └─────────
   0.1   1  10 s                                 0.1   1  10 s
"""

from collections.abc import Sequence
from math import isfinite, log10

import numpy as np

from myriad.network.link_flaps import FlapScenario, Timers, lost_probability, mean_wait_seconds
from myriad.reports.charts.svg import INK, SERIES, document, polyline, rule, text

__all__ = ["draw"]

_TOP, _BOTTOM = 66.0, 316.0
_PANELS = ((56.0, 416.0), (486.0, 846.0))
_SHORTEST, _LONGEST = 0.1, 60.0
_TICKS = (0.1, 0.3, 1, 3, 10, 30)
_WAITS = (0.1, 1, 10, 100)
_POINTS = 160
_TITLE = "A link goes down and comes up again"
_LIMIT = "#b3403a"


def draw(timers: Sequence[Timers], habits: FlapScenario) -> str:
    """Draw abort probability and mean wait by down time, a line for each setting of the timers."""
    down = np.geomspace(_SHORTEST, _LONGEST, _POINTS)
    parts = [text(24, 28, _TITLE, size=15, ink=INK)]
    parts += _frame(
        0, "probability that the job ends", [(f"{share:.0%}", share) for share in (0, 0.25, 0.5, 0.75, 1)]
    )
    parts += _frame(1, "mean wait of all ranks", [(f"{one:g} s", _height(one)) for one in _WAITS])
    timeouts = sorted({one.timeout for one in timers})
    for number, one in enumerate(timers):
        colour = SERIES[timeouts.index(one.timeout) % len(SERIES)]
        lost = lost_probability(one, down, habits.num_queue_pairs)
        waits = mean_wait_seconds(one, down, habits.num_queue_pairs)
        parts.append(_line(0, list(zip(down, lost, strict=True)), colour, one.adaptive))
        survived = [(d, _height(w)) for d, w, p in zip(down, waits, lost, strict=True) if p < 0.99]
        parts.append(_line(1, survived, colour, one.adaptive))
        parts += _entry(number, colour, one)
    if isfinite(habits.driver_seconds):
        parts += _driver(habits.driver_seconds)
    height = _BOTTOM + 66 + 20 * -(-len(timers) // 3)
    return document(872, height, _TITLE, parts)


def _x(panel: int, seconds: float) -> float:
    left, right = _PANELS[panel]
    return left + (right - left) * log10(seconds / _SHORTEST) / log10(_LONGEST / _SHORTEST)


def _y(share: float) -> float:
    return _BOTTOM - share * (_BOTTOM - _TOP)


def _height(wait: float) -> float:
    """Return the height of a wait on the logarithmic axis, 0 to 1."""
    return min(1.0, max(0.0, log10(max(wait, 1e-9) / _WAITS[0]) / log10(_WAITS[-1] / _WAITS[0])))


def _frame(panel: int, title: str, marks: Sequence[tuple[str, float]]) -> list[str]:
    left, right = _PANELS[panel]
    parts = [text(left, _TOP - 14, title)]
    for words, share in marks:
        parts.append(rule((left, _y(share)), (right, _y(share))))
        parts.append(text(left - 6, _y(share) + 4, words, "end"))
    parts += [text(_x(panel, tick), _BOTTOM + 18, f"{tick:g}", "middle") for tick in _TICKS]
    return [*parts, text((left + right) / 2, _BOTTOM + 36, "link down for (s)", "middle")]


def _driver(seconds: float) -> list[str]:
    if not _SHORTEST < seconds < _LONGEST:
        return []
    parts = []
    for panel in (0, 1):
        x = _x(panel, seconds)
        parts.append(rule((x, _TOP), (x, _BOTTOM), _LIMIT, dashes="2 3"))
    words = "the driver restarts the ranks"
    return [*parts, text(_x(0, seconds) + 5, _BOTTOM - 8, words, ink=_LIMIT, halo=True)]


def _line(panel: int, points: Sequence[tuple[float, float]], colour: str, dashed: bool) -> str:
    places = [(_x(panel, seconds), _y(share)) for seconds, share in points]
    return polyline(places, colour, dashes="6 3" if dashed else "")


def _entry(number: int, colour: str, timers: Timers) -> list[str]:
    row, column = divmod(number, 3)
    x, y = 56 + 264 * column, _BOTTOM + 62 + 20 * row
    dashes = "6 3" if timers.adaptive else ""
    words = f"timeout {timers.timeout}, {timers.retries} retries" + (", adaptive" if timers.adaptive else "")
    line = rule((x, y - 4), (x + 22, y - 4), colour, width=2, dashes=dashes)
    return [line, text(x + 28, y, words)]
