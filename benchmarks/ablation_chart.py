"""Horizontal bars in groups, with the range of each and a figure to compare with: one self-contained SVG."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Bar", "bars_svg"]

_LEFT, _WIDTH, _RIGHT, _TOP, _ROW, _HEAD = 250.0, 420.0, 90.0, 66.0, 22.0, 30.0
_INK, _SOFT, _OURS, _OTHER = "#16202c", "#66717f", "#2f6db5", "#c9d3df"


@dataclass(frozen=True)
class Bar:
    """A percentage with its range."""

    name: str
    value: float
    low: float
    high: float
    beside: float | None = None
    """Of others, drawn behind."""


def bars_svg(title: str, groups: Mapping[str, Sequence[Bar]], beside: str) -> str:
    """``beside`` says whose figures those are that stand behind."""
    bars = [bar for group in groups.values() for bar in group]
    largest = max(max(bar.high, bar.beside or 0.0) for bar in bars)
    scale = _WIDTH / (10 * (largest // 10 + 1))
    height = _TOP + _HEAD * len(groups) + _ROW * len(bars) + 14
    width = _LEFT + _WIDTH + _RIGHT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" font-family="system-ui, sans-serif" role="img">',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
        _text(16, 28, title, 16, weight=600),
        _rect(16, 42, 12, 12, _OURS) + _text(34, 52, "measured here, with its range", 12, _SOFT),
        _rect(236, 42, 12, 12, _OTHER) + _text(254, 52, beside, 12, _SOFT),
    ]
    y = _TOP
    for name, group in groups.items():
        lines.append(_text(16, y + 20, name, 13, weight=600))
        y += _HEAD
        for bar in group:
            lines += _bar(bar, y, scale)
            y += _ROW
    return "\n".join([*lines, "</svg>"]) + "\n"


def _bar(bar: Bar, y: float, scale: float) -> Iterator[str]:
    yield _text(_LEFT - 8, y + 13, bar.name, 12, anchor="end")
    words = f"{bar.value:.1f} %"
    if bar.beside is not None:
        yield _rect(_LEFT, y, bar.beside * scale, 16, _OTHER)
        words += f" ({bar.beside:g})"
    yield _rect(_LEFT, y + 3, bar.value * scale, 10, _OURS)
    low, high = (_LEFT + x * scale for x in (bar.low, bar.high))
    yield f'<path d="M{low:.1f} {y + 8:.0f}H{high:.1f}" stroke="{_INK}" stroke-width="1.5"/>'
    end = max(bar.high, bar.beside or 0.0)
    yield _text(_LEFT + end * scale + 6, y + 13, words, 11, _SOFT)


def _rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.0f}" width="{width:.1f}" height="{height:.0f}" fill="{colour}"/>'


def _text(
    x: float, y: float, words: str, size: int, colour: str = _INK, *, anchor: str = "start", weight: int = 400
) -> str:
    look = f'font-size="{size}" fill="{colour}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.0f}" {look}>{escape(words)}</text>'
