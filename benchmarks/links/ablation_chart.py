"""Horizontal bars in groups, with the range of each and a figure to compare with."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from myriad.reports.charts.svg import INK, SERIES, box, document, legend, rule, text

__all__ = ["Bar", "bars_svg"]

_LEFT, _WIDTH, _RIGHT, _TOP, _ROW, _HEAD = 250.0, 420.0, 90.0, 66.0, 22.0, 30.0
_OURS, _OTHER = SERIES[0], "#c9d3df"


@dataclass(frozen=True)
class Bar:
    """A percentage with its range."""

    name: str
    value: float
    low: float
    high: float
    beside: float | None = None
    """Another system's figure, drawn behind the bar."""


def bars_svg(title: str, groups: Mapping[str, Sequence[Bar]], beside: str) -> str:
    """Return the chart; ``beside`` names the system whose figures stand behind the bars."""
    bars = [bar for group in groups.values() for bar in group]
    largest = max(max(bar.high, bar.beside or 0.0) for bar in bars)
    scale = _WIDTH / (10 * (largest // 10 + 1))
    parts = [text(16, 28, title, size=16, ink=INK, weight=600)]
    parts += legend([(_OURS, "measured here, with its range"), (_OTHER, beside)], 16, 42)
    y = _TOP
    for name, group in groups.items():
        parts.append(text(16, y + 20, name, size=13, ink=INK, weight=600))
        y += _HEAD
        for bar in group:
            parts += _bar(bar, y, scale)
            y += _ROW
    return document(_LEFT + _WIDTH + _RIGHT, y + 14, title, parts)


def _bar(bar: Bar, y: float, scale: float) -> Iterator[str]:
    yield text(_LEFT - 8, y + 13, bar.name, "end", ink=INK)
    words = f"{bar.value:.1f} %"
    if bar.beside is not None:
        yield box(_LEFT, y, bar.beside * scale, 16, _OTHER)
        words += f" ({bar.beside:g})"
    yield box(_LEFT, y + 3, bar.value * scale, 10, _OURS)
    yield rule((_LEFT + bar.low * scale, y + 8), (_LEFT + bar.high * scale, y + 8), INK, width=1.5)
    yield text(_LEFT + max(bar.high, bar.beside or 0.0) * scale + 6, y + 13, words, size=11)
