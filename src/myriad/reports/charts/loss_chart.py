"""Loss curves and step times: an SVG for pages and files, a few lines of braille for the terminal.

The SVG shows the training loss faint, the smoothed loss over it, and the validation losses as points.
"""

import math
from collections.abc import Mapping, Sequence

from myriad.reports.charts.svg import INK, SERIES, document, dot, legend, polyline, round_ticks, rule, text
from myriad.system.jsonl import Record

__all__ = [
    "Series",
    "lines_svg",
    "loss_series",
    "loss_svg",
    "overlay_plot",
    "phase_marks",
    "smooth",
    "spark_svg",
    "steps_svg",
    "terminal_plot",
    "thinned",
    "validation_series",
]

Series = Sequence[tuple[float, float]]
"""Points ``(step, loss)``, in order of step."""

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Braille dots of rows 0 to 3, columns 0 and 1."""
_FAINT = "#9db7d5"
"""Colour of values that are not smoothed."""


def loss_series(metrics: Sequence[Record], events: Sequence[Record]) -> tuple[Series, Series]:
    """Return the training and the validation losses by step."""
    training = [(float(line["step"]), line["loss"]) for line in metrics if line.get("loss") is not None]
    return training, validation_series(events, "loss")


def validation_series(events: Sequence[Record], field: str) -> Series:
    """Return a field of the validations by step."""
    by_step = {
        event["step"]: event[field]
        for event in events
        if event.get("event") == "validation" and event.get(field) is not None and "step" in event
    }
    return [(float(step), loss) for step, loss in sorted(by_step.items())]


def smooth(points: Series, share: float = 0.03) -> list[tuple[float, float]]:
    """Return means over a window of ``share`` of all points. The window is centred and shorter at the start,
    where the loss falls fast; at the end it only reaches back."""
    half = int(len(points) * share / 2)
    out = []
    for index, (step, _) in enumerate(points):
        before = min(half, index)
        window = points[index - before : index + before + 1]
        out.append((step, sum(loss for _, loss in window) / len(window)))
    return out


def thinned(points: Series, most: int = 2000) -> Series:
    """Return at most about ``most`` points, evenly chosen, with the last one."""
    every = -(-len(points) // most)
    return points if every <= 1 else [*points[:-1:every], points[-1]]


def terminal_plot(points: Series, *, width: int = 64, height: int = 10) -> list[str]:
    """Return lines of text: the losses on the left, the curve in braille (2 x 4 dots a character), the steps
    below."""
    if len(points) < 2:
        return []
    low, high = _span([loss for _, loss in points])
    first, last = points[0][0], points[-1][0]
    cells = [[0] * width for _ in range(height)]
    previous: int | None = None
    for x, loss in enumerate(_resample(points, 2 * width)):
        y = round((high - loss) / (high - low) * (4 * height - 1))
        for row in _between(y, previous):
            cells[row // 4][x // 2] |= _DOTS[row % 4][x % 2]
        previous = y
    rows = ["".join(chr(0x2800 + cell) for cell in row) for row in cells]
    labels = {0: f"{high:.2f}", height - 1: f"{low:.2f}"}
    lines = [f"{labels.get(number, ''):>6} ┤{row}" for number, row in enumerate(rows)]
    axis = f"step {first:.0f}" + f"{last:.0f}".rjust(width - len(f"step {first:.0f}"))
    return [*lines, " " * 8 + axis]


def overlay_plot(
    curves: Sequence[Series], *, width: int = 64, height: int = 12, unit: str = "step"
) -> list[list[tuple[str, int | None]]]:
    """Return lines of text that show several curves in one frame, as in `terminal_plot`.

    A line is a list of parts ``(text, curve)``, for colours; ``None``: frame and labels. Curve 0 is marked
    with "A" at the height of its last value, to the right of the frame, curve 1 with "B", and so on."""
    low, high = _span([value for curve in curves for _, value in curve])
    first, last = min(curve[0][0] for curve in curves), max(curve[-1][0] for curve in curves)
    cells: list[list[tuple[int, int | None]]] = [[(0, None)] * width for _ in range(height)]
    ends: list[list[int]] = [[] for _ in range(height)]
    for index, curve in enumerate(curves):
        previous: int | None = None
        for x, value in _columns(curve, first, last, 2 * width):
            y = round((high - value) / (high - low) * (4 * height - 1))
            for row in _between(y, previous):
                dots = cells[row // 4][x // 2][0] | _DOTS[row % 4][x % 2]
                cells[row // 4][x // 2] = dots, index
            previous = y
        ends[(previous or 0) // 4].append(index)
    labels = {0: f"{high:.4g}", height - 1: f"{low:.4g}"}
    lines: list[list[tuple[str, int | None]]] = []
    for number, row_cells in enumerate(cells):
        drawn = [(chr(0x2800 + dots), owner) for dots, owner in row_cells]
        marks: list[tuple[str, int | None]] = [(f" {chr(ord('A') + index)}", index) for index in ends[number]]
        lines.append([(f"{labels.get(number, ''):>8} ┤", None), *drawn, *marks])
    begin = f"{unit} {first:,.0f}"
    return [*lines, [(" " * 10 + begin + f"{last:,.0f}".rjust(width - len(begin)), None)]]


def _columns(curve: Series, first: float, last: float, count: int) -> list[tuple[int, float]]:
    """Return the columns of dots that a curve covers, with its values."""
    scale = (count - 1) / (last - first) if last > first else 0.0
    begin, end = (round((x - first) * scale) for x in (curve[0][0], curve[-1][0]))
    if begin == end:
        return [(begin, curve[-1][1])]
    return list(zip(range(begin, end + 1), _resample(curve, end - begin + 1), strict=True))


def _between(y: int, previous: int | None) -> range:
    """Return the dots that join this column to the one before."""
    start = y if previous is None or previous == y else previous + (1 if y > previous else -1)
    return range(min(y, start), max(y, start) + 1)


def _resample(points: Series, count: int) -> list[float]:
    """Interpolate linearly at ``count`` equally spaced steps."""
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


Marks = Sequence[tuple[float, str]]
"""Steps with a text, in order of step."""


def phase_marks(events: Sequence[Record]) -> Marks:
    """Return the first step and the name of each phase of the job."""
    names = {
        event["step"]: event["name"]
        for event in events
        if event.get("event") == "phase" and not {"step", "name"} - event.keys()
    }
    return sorted((float(step), str(name)) for step, name in names.items())


def loss_svg(
    training: Series, validation: Series, title: str, average: Series = (), marks: Marks = ()
) -> str:
    """Draw training and validation losses by step, with vertical lines at ``marks``. ``average``: validation
    losses of the parameters' moving average."""
    chart = _Chart(training, validation, average)
    return _chart_document(
        title,
        [
            *chart.axes(),
            *chart.marks(marks),
            chart.line(training, _FAINT, 1.0, 0.6),
            chart.line(smooth(training), SERIES[0], 2.0, 1.0),
            *chart.points(validation, SERIES[1]),
            *chart.points(average, SERIES[2]),
            *_legend(with_validation=bool(validation), with_average=bool(average)),
        ],
    )


def _chart_document(title: str, parts: Sequence[str]) -> str:
    return document(720, 400, title, [text(60, 26, title, size=15, ink=INK), *parts])


def steps_svg(times: Series, title: str, up: str = "seconds", across: str = "step") -> str:
    """Draw a figure of each step, faint, and smoothed over it. ``up`` and ``across`` name the axes."""
    chart = _Chart(times, up=up, across=across)
    drawn = [chart.line(times, _FAINT, 1.0, 0.6), chart.line(smooth(times), SERIES[0], 2.0, 1.0)]
    legend = _entries([(_FAINT, "a step"), (SERIES[0], "smoothed")])
    return _chart_document(title, [*chart.axes(), *drawn, *legend])


def spark_svg(points: Sequence[tuple[float, float, float]], title: str) -> str:
    """Draw values ``(step, value, standard error)`` in the size of a line of text, with one standard error
    above and below."""
    width, height, edge = 220.0, 34.0, 4.0
    low, high = _span([value + sign * error for _, value, error in points for sign in (-1, 1)])
    first, last = _span([step for step, *_ in points])

    def place(step: float, value: float) -> tuple[float, float]:
        x = edge + (step - first) / (last - first) * (width - 2 * edge)
        return x, edge + (high - value) / (high - low) * (height - 2 * edge)

    errors = [
        rule(place(step, value - error), place(step, value + error), _FAINT) for step, value, error in points
    ]
    dots = [
        dot(*place(step, value), 2, SERIES[0], f"step {step:.0f}: {value:.4g} ± {error:.2g}")
        for step, value, error in points
    ]
    line = polyline([place(step, value) for step, value, _ in points], SERIES[0], width=1.5)
    return document(width, height, title, [*errors, line, *dots])


def lines_svg(lines: Mapping[str, Series], title: str, across: str) -> str:
    """Draw several smoothed losses in one chart; ``across`` names the horizontal axis."""
    chart = _Chart(*lines.values(), across=across)
    curves = zip(lines.values(), SERIES, strict=False)
    return _chart_document(
        title,
        [
            *chart.axes(),
            *(chart.line(smooth(points), colour, 2.0, 1.0) for points, colour in curves),
            *_entries(list(zip(SERIES, lines, strict=False))),
        ],
    )


def _legend(*, with_validation: bool, with_average: bool) -> list[str]:
    entries = [(_FAINT, "training"), (SERIES[0], "training, smoothed")]
    if with_validation:
        entries.append((SERIES[1], "validation"))
    if with_average:
        entries.append((SERIES[2], "validation, moving average"))
    return _entries(entries)


def _entries(entries: Sequence[tuple[str, str]]) -> list[str]:
    """Return a legend at the top right, as far left as its longest name needs."""
    left = min(540, 690 - 7 * max(len(name) for _, name in entries))
    rows = [legend([entry], left, 47 + 18 * row, mark=4) for row, entry in enumerate(entries)]
    return [part for row in rows for part in row]


class _Chart:
    """Maps steps and losses to the picture's pixels, and draws its axes."""

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
        """Return the points, joined."""
        places = [(self._x(step), self._y(loss)) for step, loss in points]
        return polyline(places, colour, width=width, opacity=opacity)

    def points(self, points: Series, colour: str) -> list[str]:
        """Return each point as a dot with its value on hover."""
        return [
            dot(self._x(step), self._y(loss), 3.5, colour, f"step {step:.0f}: {loss:.4f}")
            for step, loss in points
        ]

    def marks(self, marks: Marks) -> list[str]:
        """Return a vertical line for each mark, with its text at the top."""
        out = []
        for step, name in marks:
            x = self._x(step)
            out += [rule((x, self.top), (x, self.bottom)), text(x + 4, self.bottom - 6, name)]
        return out

    def axes(self) -> list[str]:
        """Return grid lines with their values, and the names of the axes."""
        out = []
        for loss in round_ticks(*self._losses):
            y = self._y(loss)
            out += [rule((self.left, y), (self.right, y)), text(52, y + 4, f"{loss:g}", "end")]
        for step in round_ticks(*self._steps):
            out.append(text(self._x(step), 370, f"{step:g}", "middle"))
        out.append(text(380, 390, self._across, "middle"))
        return [*out, text(14, 198, self._up, "middle", upright=True)]
