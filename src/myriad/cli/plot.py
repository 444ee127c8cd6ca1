"""The loss as a picture: a few lines of braille for the terminal, an SVG file for everything else.

Both show the training loss faint and smoothed over it, and the validation losses as points. No dependency:
the picture of a loss is two axes and a line.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape

__all__ = ["Series", "lines_svg", "loss_svg", "smooth", "steps_svg", "terminal_plot"]

Series = Sequence[tuple[float, float]]
"""Points ``(step, loss)``, in order of step."""

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Braille dot of row 0 to 3, column 0 and 1."""


def smooth(points: Series, share: float = 0.03) -> list[tuple[float, float]]:
    """Mean over a window of ``share`` of all points: centred, shorter where the loss falls fast (the start),
    and reaching back only where it no longer does (the end)."""
    half = int(len(points) * share / 2)
    out = []
    for index, (step, _) in enumerate(points):
        before = min(half, index)
        window = points[index - before : index + before + 1]
        out.append((step, sum(loss for _, loss in window) / len(window)))
    return out


def terminal_plot(points: Series, *, width: int = 64, height: int = 10) -> list[str]:
    """Lines of text: the losses on the left, the curve in braille (2 x 4 dots a character), the steps
    below."""
    if len(points) < 2:
        return []
    low, high = _span([loss for _, loss in points])
    first, last = points[0][0], points[-1][0]
    cells = [[0] * width for _ in range(height)]
    previous: int | None = None
    for x, loss in enumerate(_resample(points, 2 * width)):
        y = round((high - loss) / (high - low) * (4 * height - 1))
        for dot in _between(y, previous):
            cells[dot // 4][x // 2] |= _DOTS[dot % 4][x % 2]
        previous = y
    rows = ["".join(chr(0x2800 + cell) for cell in row) for row in cells]
    labels = {0: f"{high:.2f}", height - 1: f"{low:.2f}"}
    lines = [f"{labels.get(number, ''):>6} ┤{row}" for number, row in enumerate(rows)]
    axis = f"step {first:.0f}" + f"{last:.0f}".rjust(width - len(f"step {first:.0f}"))
    return [*lines, " " * 8 + axis]


def _between(y: int, previous: int | None) -> range:
    """The dots that join this column to the one before."""
    start = y if previous is None or previous == y else previous + (1 if y > previous else -1)
    return range(min(y, start), max(y, start) + 1)


def _resample(points: Series, count: int) -> list[float]:
    """Linear interpolation at ``count`` equally spaced steps."""
    first, last = points[0][0], points[-1][0]
    out, index = [], 0
    for number in range(count):
        step = first + (last - first) * number / (count - 1)
        while index < len(points) - 2 and points[index + 1][0] < step:
            index += 1
        (x0, y0), (x1, y1) = points[index], points[index + 1]
        out.append(y0 + (y1 - y0) * min(1.0, max(0.0, (step - x0) / (x1 - x0))))
    return out


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    differs = high - low > 1e-12 * max(1.0, abs(low), abs(high))
    return (low, high) if differs else (low - 0.5, high + 0.5)


def loss_svg(training: Series, validation: Series, title: str) -> str:
    """A line chart, 720 x 400, readable on light and dark pages."""
    chart = _Chart(training, validation)
    return _document(
        title,
        [
            *chart.axes(),
            chart.line(training, "#9db7d5", 1.0, 0.6),
            chart.line(smooth(training), "#1f5fa8", 2.0, 1.0),
            *chart.points(validation, "#d1495b"),
            *_legend(bool(validation)),
        ],
    )


def _document(title: str, parts: Sequence[str]) -> str:
    head = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 400" font-family="system-ui, sans-serif" '
        'font-size="12">',
        '<rect width="720" height="400" rx="6" fill="#ffffff"/>',
        f'<text x="60" y="26" font-size="15" fill="#1a1a1a">{escape(title)}</text>',
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


_COLOURS = ("#1f5fa8", "#d1495b", "#3a8f5c", "#b07c1e", "#7a4fa3", "#555555")


def steps_svg(times: Series, title: str) -> str:
    """Seconds of each step, faint, and smoothed over them."""
    chart = _Chart(times, up="seconds")
    drawn = [chart.line(times, "#9db7d5", 1.0, 0.6), chart.line(smooth(times), "#1f5fa8", 2.0, 1.0)]
    legend = _entries([("#9db7d5", "a step"), ("#1f5fa8", "smoothed")])
    return _document(title, [*chart.axes(), *drawn, *legend])


def lines_svg(lines: Mapping[str, Series], title: str, across: str) -> str:
    """Several smoothed losses in one chart of the same style; ``across`` names the horizontal axis."""
    chart = _Chart(*lines.values(), across=across)
    curves = zip(lines.values(), _COLOURS, strict=False)
    return _document(
        title,
        [
            *chart.axes(),
            *(chart.line(smooth(points), colour, 2.0, 1.0) for points, colour in curves),
            *_entries(list(zip(_COLOURS, lines, strict=False))),
        ],
    )


def _legend(with_validation: bool) -> list[str]:
    entries = [("#9db7d5", "training"), ("#1f5fa8", "training, smoothed")]
    if with_validation:
        entries.append(("#d1495b", "validation"))
    return _entries(entries)


def _entries(entries: Sequence[tuple[str, str]]) -> list[str]:
    """A legend at the top right, as far left as its longest name needs."""
    left = min(540, 690 - 7 * max(len(name) for _, name in entries))
    return [
        f'<rect x="{left}" y="{50 + 18 * row}" width="14" height="4" fill="{colour}"/>'
        f'<text x="{left + 22}" y="{56 + 18 * row}" fill="#444">{escape(name)}</text>'
        for row, (colour, name) in enumerate(entries)
    ]


class _Chart:
    """Maps steps and losses to the picture's pixels."""

    left, right, top, bottom = 60.0, 700.0, 44.0, 352.0

    def __init__(self, *series: Series, across: str = "step", up: str = "loss (nats a token)") -> None:
        self._across, self._up = across, up
        points = [point for line in series for point in line if math.isfinite(point[1])] or [(0.0, 0.0)]
        self._steps = _span([step for step, _ in points])
        low, high = _span([loss for _, loss in points])
        margin = 0.04 * (high - low)
        self._losses = (low - margin, high + margin)

    def _x(self, step: float) -> float:
        low, high = self._steps
        return self.left + (step - low) / (high - low) * (self.right - self.left)

    def _y(self, loss: float) -> float:
        low, high = self._losses
        return self.bottom - (loss - low) / (high - low) * (self.bottom - self.top)

    def line(self, points: Series, colour: str, width: float, opacity: float) -> str:
        """The points, joined."""
        path = " ".join(f"{self._x(step):.1f},{self._y(loss):.1f}" for step, loss in points)
        style = f'stroke="{colour}" stroke-width="{width}" stroke-opacity="{opacity}"'
        return f'<polyline points="{path}" fill="none" {style} stroke-linejoin="round"/>'

    def points(self, points: Series, colour: str) -> list[str]:
        """Each point as a dot with its value on hover."""
        return [
            f'<circle cx="{self._x(step):.1f}" cy="{self._y(loss):.1f}" r="3.5" fill="{colour}">'
            f"<title>step {step:.0f}: {loss:.4f}</title></circle>"
            for step, loss in points
        ]

    def axes(self) -> list[str]:
        """Grid lines with their values, and what the axes are."""
        out = []
        for loss in _ticks(*self._losses):
            y = self._y(loss)
            grid = f'x1="{self.left}" x2="{self.right}" y1="{y:.1f}" y2="{y:.1f}"'
            out.append(f'<line {grid} stroke="#e6e6e6"/>')
            out.append(f'<text x="52" y="{y + 4:.1f}" text-anchor="end" fill="#444">{loss:g}</text>')
        for step in _ticks(*self._steps):
            x = self._x(step)
            out.append(f'<text x="{x:.1f}" y="370" text-anchor="middle" fill="#444">{step:g}</text>')
        out.append(f'<text x="380" y="390" text-anchor="middle" fill="#444">{escape(self._across)}</text>')
        out.append(
            '<text x="14" y="198" text-anchor="middle" fill="#444" transform="rotate(-90 14 198)">'
            f"{escape(self._up)}</text>"
        )
        return out


def _ticks(low: float, high: float) -> list[float]:
    """About six round values between two numbers: multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(rough))
    unit = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first = math.ceil(low / unit)
    return [round(number * unit, 10) for number in range(first, math.floor(high / unit) + 1)]
