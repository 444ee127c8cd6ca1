"""The picture of `myriad network tune`: the numbers behind two of its settings.

slowest flow │      ╭──●           lost hours │╲              ●: the chosen value
             │  ╭───╯                         │ ╲        ╱    ○: NCCL's default
             └─────────  queue pairs          └──●──────○──  timeout
"""

from collections.abc import Sequence

from myriad.planner.fabric.nccl_tuning import DEFAULT_TIMEOUT, TuningEvidence
from myriad.reports.charts.svg import INK, PAPER, SERIES, document, dot, polyline, rule, text
from myriad.units import format_number

__all__ = ["draw"]

_TOP, _BOTTOM = 84.0, 300.0
_PANELS = ((64.0, 396.0), (500.0, 832.0))
_LINE, _ASKED = SERIES[:2]
_STEPS = 4


def draw(cluster: str, found: TuningEvidence) -> str:
    """Draw the slowest flow by queue pairs, and the lost hours by timeout."""
    title = f"What settings for {cluster} are chosen by"
    parts = [text(24, 30, title, size=15, ink=INK)]
    panel = 0
    if found.slowest:
        caption = "slowest flow of rings between switches, share of its rate"
        parts += _panel(panel, caption, "queue pairs for each connection", found.slowest, 1.0)
        parts += _marks(panel, found.slowest, 1.0, asked=found.num_queue_pairs, own=1)
        panel = 1
    most = _round_up(max(hours for _, hours in found.hours))
    parts += _panel(panel, "hours a month lost to links that flap", "NCCL_IB_TIMEOUT", found.hours, most)
    parts += _marks(panel, found.hours, most, asked=found.timeout, own=DEFAULT_TIMEOUT)
    width = _PANELS[panel][1] + 28
    parts += _legend()
    return document(width, 386, title, parts)


def _round_up(value: float) -> float:
    """Round up to a number whose quarters are easy to read."""
    scale = 1.0
    while scale < value:
        scale *= 10
    while scale > 10 * value:
        scale /= 10
    return next(share * scale for share in (0.1, 0.2, 0.4, 0.8, 1.0) if share * scale >= value)


def _place(panel: int, points: Sequence[tuple[int, float]], number: int, most: float) -> tuple[float, float]:
    """Return the place of a point; points are equally far apart."""
    left, right = _PANELS[panel]
    step = (right - left) / max(1, len(points) - 1)
    return left + number * step, _BOTTOM - points[number][1] / most * (_BOTTOM - _TOP)


def _panel(panel: int, title: str, under: str, points: Sequence[tuple[int, float]], most: float) -> list[str]:
    left, right = _PANELS[panel]
    parts = [text(left - 40, _TOP - 22, title)]
    for step in range(_STEPS + 1):
        y = _BOTTOM - step / _STEPS * (_BOTTOM - _TOP)
        parts.append(rule((left, y), (right, y)))
        parts.append(text(left - 10, y + 4, f"{most * step / _STEPS:g}", "end"))
    places = [_place(panel, points, number, most) for number in range(len(points))]
    parts.append(polyline(places, _LINE))
    parts += [
        text(x, _BOTTOM + 20, f"{at}", "middle") for (x, _), (at, _) in zip(places, points, strict=True)
    ]
    return [*parts, text((left + right) / 2, _BOTTOM + 40, under, "middle")]


def _marks(
    panel: int, points: Sequence[tuple[int, float]], most: float, *, asked: int, own: int
) -> list[str]:
    """Mark NCCL's default, and over it the chosen value."""
    parts = []
    for wanted, fill in ((own, PAPER), (asked, _ASKED)):
        for number, (at, value) in enumerate(points):
            if at == wanted:
                x, y = _place(panel, points, number, most)
                ring = _LINE if fill == PAPER else _ASKED
                parts.append(dot(x, y, 5, fill, f"{at}: {format_number(value)}", ring=ring))
    return parts


def _legend() -> list[str]:
    y = _BOTTOM + 68
    chosen = dot(70, y - 4, 5, _ASKED, ring=_ASKED)
    default = dot(200, y - 4, 5, PAPER, ring=_LINE)
    return [chosen, text(82, y, "chosen"), default, text(212, y, "NCCL's default")]
