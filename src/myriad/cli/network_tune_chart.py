"""The picture of `myriad network tune`: what two of its lines are chosen by.

slowest flow │      ╭──●           lost hours │╲              ●: what is asked for
             │  ╭───╯                         │ ╲        ╱    ○: NCCL's own
             └─────────  queue pairs          └──●──────○──  timeout
"""

from collections.abc import Sequence
from functools import partial
from html import escape

from myriad.cli.svg import text
from myriad.planner.tuning import DEFAULT_TIMEOUT
from myriad.planner.tuning_grounds import Grounds
from myriad.units import format_number

__all__ = ["draw"]

_text = partial(text, ink="#333")
_TOP, _BOTTOM = 84.0, 300.0
_PANELS = ((64.0, 396.0), (500.0, 832.0))
_INK, _ASKED = "#1f5fa8", "#d1495b"
_STEPS = 4


def draw(cluster: str, found: Grounds) -> str:
    """One SVG, complete in itself."""
    title = f"What settings for {cluster} are chosen by"
    parts = [_text(24, 30, title, size=15)]
    panel = 0
    if found.slowest:
        told = "slowest flow of rings between switches, share of its rate"
        parts += _panel(panel, told, "queue pairs for each connection", found.slowest, 1.0)
        parts += _marks(panel, found.slowest, 1.0, asked=found.num_queue_pairs, own=1)
        panel = 1
    most = _round_up(max(hours for _, hours in found.hours))
    parts += _panel(panel, "hours a month lost to links that flap", "NCCL_IB_TIMEOUT", found.hours, most)
    parts += _marks(panel, found.hours, most, asked=found.timeout, own=DEFAULT_TIMEOUT)
    width = _PANELS[panel][1] + 28
    parts += _legend()
    size = f'width="{width:g}" height="386"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} 386" {size} '
    head += 'font-family="system-ui, sans-serif" font-size="12" role="img">'
    about = f"<title>{escape(title)}</title>"
    return "\n".join([head, about, f'<rect {size} rx="6" fill="#ffffff"/>', *parts, "</svg>"]) + "\n"


def _round_up(value: float) -> float:
    """To a number of which a quarter is easily read."""
    scale = 1.0
    while scale < value:
        scale *= 10
    while scale > 10 * value:
        scale /= 10
    return next(share * scale for share in (0.1, 0.2, 0.4, 0.8, 1.0) if share * scale >= value)


def _place(panel: int, points: Sequence[tuple[int, float]], number: int, most: float) -> tuple[float, float]:
    """Of a point: as far apart as any two are."""
    left, right = _PANELS[panel]
    step = (right - left) / max(1, len(points) - 1)
    return left + number * step, _BOTTOM - points[number][1] / most * (_BOTTOM - _TOP)


def _panel(panel: int, title: str, under: str, points: Sequence[tuple[int, float]], most: float) -> list[str]:
    left, right = _PANELS[panel]
    parts = [_text(left - 40, _TOP - 22, title)]
    for step in range(_STEPS + 1):
        y = _BOTTOM - step / _STEPS * (_BOTTOM - _TOP)
        parts.append(f'<path d="M{left:.1f} {y:.1f}H{right:.1f}" stroke="#e6e6e6"/>')
        parts.append(_text(left - 10, y + 4, f"{most * step / _STEPS:g}", "end"))
    places = [_place(panel, points, number, most) for number in range(len(points))]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts.append(f'<polyline points="{line}" fill="none" stroke="{_INK}" stroke-width="2"/>')
    parts += [
        _text(x, _BOTTOM + 20, f"{at}", "middle") for (x, _), (at, _) in zip(places, points, strict=True)
    ]
    return [*parts, _text((left + right) / 2, _BOTTOM + 40, under, "middle")]


def _marks(
    panel: int, points: Sequence[tuple[int, float]], most: float, *, asked: int, own: int
) -> list[str]:
    """NCCL's own below what is asked for, where they are one."""
    parts = []
    for wanted, fill in ((own, "#ffffff"), (asked, _ASKED)):
        for number, (at, value) in enumerate(points):
            if at == wanted:
                x, y = _place(panel, points, number, most)
                hint = f"<title>{escape(f'{at}: {format_number(value)}')}</title>"
                ink = _INK if fill == "#ffffff" else _ASKED
                circle = (
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{fill}" stroke="{ink}" stroke-width="2">'
                )
                parts.append(f"{circle}{hint}</circle>")
    return parts


def _legend() -> list[str]:
    y = _BOTTOM + 68
    asked = f'<circle cx="70" cy="{y - 4:.1f}" r="5" fill="{_ASKED}" stroke="{_ASKED}" stroke-width="2"/>'
    own = f'<circle cx="200" cy="{y - 4:.1f}" r="5" fill="#ffffff" stroke="{_INK}" stroke-width="2"/>'
    return [asked, _text(82, y, "asked for"), own, _text(212, y, "NCCL's own")]
