"""The picture of `myriad simulate --weeks`: the lost time of each policy by class, and the effect of each
change.

Myriad            ▇▇▇▇▇▅▅▃▃            2.4 %     bars: share of the wall time without training
ByteRobust-like   ▇▇▇▇▇▇▇▇▇▇▇▅▅▅▃      4.4 %

faults a day      ◄▇▇▇▇▇│▇▇▇►                    bars: points to the left and right of Myriad's mean
"""

from collections.abc import Sequence
from html import escape

from myriad.forecasts.fleet.fleet_study import PolicyOutcome, SensitivityEffect
from myriad.reports.charts.ledger_chart import COLOURS
from myriad.reports.charts.svg import INK, box, document, legend, rule, text
from myriad.supervise.accounting.ledger import KINDS

__all__ = ["draw"]

_LOSSES = tuple(kind for kind in KINDS if kind != "training")
_WIDTH, _LEFT, _RIGHT, _ROW, _BAR = 860.0, 210.0, 760.0, 26.0, 16.0
_LESS, _MORE = "#b3403a", "#3a8f5c"


def draw(headline: str, outcomes: Sequence[PolicyOutcome], effects: Sequence[SensitivityEffect]) -> str:
    """Draw the lost time of each policy, and the effect of each change."""
    parts = [
        text(24, 30, headline, size=15, ink=INK),
        text(24, 58, "lost time, as a share of the wall time"),
    ]
    top, widest = 70.0, max(1 - one.shares["training"] for one in outcomes) or 1.0
    for one in outcomes:
        parts += _losses(one, top, (_RIGHT - _LEFT) / widest)
        top += _ROW
    parts += _legend(outcomes, top + 12)
    top += 44
    if effects:
        parts.append(
            text(
                24,
                top,
                "Myriad with one thing changed: difference in effective training time, in percentage points",
            )
        )
        drawn, top = _tornado(effects, outcomes[0].mean, top + 12)
        parts += drawn
    return document(_WIDTH, top + 12, headline, parts)


def _losses(one: PolicyOutcome, top: float, scale: float) -> list[str]:
    shares, x = one.shares, _LEFT
    parts = [text(_LEFT - 8, top + 12, one.title, "end")]
    for kind in _LOSSES:
        width = shares[kind] * scale
        parts.append(box(x, top, width, _BAR, COLOURS[kind], f"{one.title}: {kind} {shares[kind]:.2%}"))
        x += width
    low, high = one.interval
    said = f"{one.mean:.1%}"
    parts.append(text(x + 6, top + 12, said))
    parts.append(f"<title>{escape(f'{one.title}: {said}, p5 {low:.1%}, p95 {high:.1%}')}</title>")
    return ["<g>", *parts, "</g>"]


def _legend(outcomes: Sequence[PolicyOutcome], top: float) -> list[str]:
    shown = [kind for kind in _LOSSES if any(one.shares[kind] for one in outcomes)]
    return legend([(COLOURS[kind], kind) for kind in shown], 24.0, top)


def _tornado(effects: Sequence[SensitivityEffect], base: float, top: float) -> tuple[list[str], float]:
    """Draw the effects, largest first; the zero line is placed so that losses and gains both fit."""
    names = list(dict.fromkeys(one.name for one in effects))
    of = {name: [one for one in effects if one.name == name] for name in names}
    names.sort(key=lambda name: -max(abs(one.ratio - base) for one in of[name]))
    least = min(0.0, *(one.ratio - base for one in effects))
    most = max(0.0, *(one.ratio - base for one in effects))
    scale = (_RIGHT - _LEFT - 80) / ((most - least) or 1.0)
    zero = _LEFT + 40 - least * scale
    parts = []
    for name in names:
        parts.append(text(_LEFT - 8, top + 12, name.replace("_", " "), "end"))
        for one in of[name]:
            points = one.ratio - base
            x, width = zero + min(0.0, points) * scale, abs(points) * scale
            hint = f"{name} {one.change}: {100 * points:+.2f} points"
            parts.append(box(x, top, width, _BAR, _MORE if points > 0 else _LESS, hint))
            if abs(points) >= 0.0005:
                at, anchor = (x - 4, "end") if points < 0 else (x + width + 4, "start")
                parts.append(text(at, top + 12, one.change, anchor))
        top += _ROW - 6
    parts.append(rule((zero, top), (zero, top - len(names) * (_ROW - 6)), INK))
    return parts, top
