"""The picture of `myriad simulate --weeks`: what each policy's time goes to, and what each change is worth.

Myriad            ▇▇▇▇▇▅▅▃▃            2.4 %     bars: share of the wall time that is no training
ByteRobust-like   ▇▇▇▇▇▇▇▇▇▇▇▅▅▅▃      4.4 %

faults a day      ◄▇▇▇▇▇│▇▇▇►                    bars: points to the left and right of Myriad's mean
"""

from collections.abc import Sequence
from html import escape

from myriad.cli.ledger_bar import COLOURS
from myriad.resilience.account.ledger import KINDS
from myriad.resilience.weeks.study import Effect, Outcome

__all__ = ["draw"]

_LOSSES = tuple(kind for kind in KINDS if kind != "training")
_WIDTH, _LEFT, _RIGHT, _ROW, _BAR = 860.0, 210.0, 760.0, 26.0, 16.0
_LESS, _MORE = "#b3403a", "#3a8f5c"


def draw(headline: str, outcomes: Sequence[Outcome], effects: Sequence[Effect]) -> str:
    """One SVG, complete in itself."""
    parts = [_text(24, 30, headline, size=14), _text(24, 58, "not training, share of the wall time")]
    top, widest = 70.0, max(1 - one.shares["training"] for one in outcomes) or 1.0
    for one in outcomes:
        parts += _losses(one, top, (_RIGHT - _LEFT) / widest)
        top += _ROW
    parts += _legend(outcomes, top + 12)
    top += 44
    if effects:
        parts.append(_text(24, top, "Myriad as it is, one thing changed: points of effective training time"))
        drawn, top = _tornado(effects, outcomes[0].mean, top + 12)
        parts += drawn
    size = f'width="{_WIDTH:g}" height="{top + 12:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {top + 12:g}" {size} '
    head += 'font-family="system-ui, sans-serif" font-size="12">'
    return "\n".join([head, f'<rect {size} rx="6" fill="#ffffff"/>', *parts, "</svg>"]) + "\n"


def _losses(one: Outcome, top: float, scale: float) -> list[str]:
    shares, x = one.shares, _LEFT
    parts = [_text(_LEFT - 8, top + 12, one.title, "end")]
    for kind in _LOSSES:
        width = shares[kind] * scale
        parts.append(_box(x, top, width, COLOURS[kind], f"{one.title}: {kind} {shares[kind]:.2%}"))
        x += width
    low, high = one.interval
    said = f"{one.mean:.1%}"
    parts.append(_text(x + 6, top + 12, said))
    parts.append(f"<title>{escape(f'{one.title}: {said}, p5 {low:.1%}, p95 {high:.1%}')}</title>")
    return ["<g>", *parts, "</g>"]


def _legend(outcomes: Sequence[Outcome], top: float) -> list[str]:
    shown = [kind for kind in _LOSSES if any(one.shares[kind] for one in outcomes)]
    parts, x = [], 24.0
    for kind in shown:
        parts += [_box(x, top, 12, COLOURS[kind], kind, height=12), _text(x + 17, top + 10, kind)]
        x += 34 + 7 * len(kind)
    return parts


def _tornado(effects: Sequence[Effect], base: float, top: float) -> tuple[list[str], float]:
    """Largest first; the zero line stands where the largest loss and the largest gain both fit."""
    names = list(dict.fromkeys(one.name for one in effects))
    of = {name: [one for one in effects if one.name == name] for name in names}
    names.sort(key=lambda name: -max(abs(one.ratio - base) for one in of[name]))
    least = min(0.0, *(one.ratio - base for one in effects))
    most = max(0.0, *(one.ratio - base for one in effects))
    scale = (_RIGHT - _LEFT - 80) / ((most - least) or 1.0)
    zero = _LEFT + 40 - least * scale
    parts = []
    for name in names:
        parts.append(_text(_LEFT - 8, top + 12, name.replace("_", " "), "end"))
        for one in of[name]:
            points = one.ratio - base
            x, width = zero + min(0.0, points) * scale, abs(points) * scale
            hint = f"{name} {one.change}: {100 * points:+.2f} points"
            parts.append(_box(x, top, width, _MORE if points > 0 else _LESS, hint))
            if abs(points) >= 0.0005:
                at, anchor = (x - 4, "end") if points < 0 else (x + width + 4, "start")
                parts.append(_text(at, top + 12, one.change, anchor, "#66717f"))
        top += _ROW - 6
    line = f'<line x1="{zero:.1f}" y1="{top:.1f}" x2="{zero:.1f}" '
    parts.append(f'{line}y2="{top - len(names) * (_ROW - 6):.1f}" stroke="#16202c"/>')
    return parts, top


def _box(x: float, y: float, width: float, colour: str, hint: str, *, height: float = _BAR) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" width="{width:.2f}" height="{height:g}"'
    return f'<rect {where} fill="{colour}"><title>{escape(hint)}</title></rect>'


def _text(
    x: float, y: float, text: str, anchor: str = "start", colour: str = "#16202c", *, size: int = 12
) -> str:
    style = f'text-anchor="{anchor}" fill="{colour}" font-size="{size}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
