"""A program as a picture: one self-contained SVG, ranks downwards, time to the right, idle time left light.

title      1f1b, 4 ranks, 8 micro-batches: bubble 27.3 %
rank 0     [0][1][2][3]         [ 0  ][4][ 1  ] ...      idle 9, at most 4 in flight
...
axis       0    5    10   in forwards of a rank
legend     forward   backward
"""

from collections.abc import Iterator
from html import escape

from myriad.program.actions import COMPUTE, Action, Program
from myriad.program.checker import Report
from myriad.program.palette import KIND_NAMES, box_colour, ink_colour
from myriad.program.timeline import Span, Timeline

__all__ = ["describe", "draw_svg"]

_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 176, 76, 84
_FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
_INK, _SOFT, _IDLE = "#16202c", "#66717f", "#f1f3f6"
_CELLS_WITH_NUMBERS = 400
"""A picture with more of the shortest box side by side than this is drawn narrow, without numbers."""


def describe(program: Program) -> str:
    """``interleaved, 4 ranks x 2 stages, 8 micro-batches``."""
    plural = "" if program.num_ranks == 1 else "s"
    stages = f" x {program.virtual_stages} stages" if program.virtual_stages > 1 else ""
    batches = f"{program.num_micro_batches} micro-batch{'' if program.num_micro_batches == 1 else 'es'}"
    return f"{program.schedule}, {program.num_ranks} rank{plural}{stages}, {batches}"


def draw_svg(program: Program, times: Timeline, report: Report) -> str:
    """The picture of ``times`` (of this program), with what the checker found."""
    return _Picture(program, times, report).svg()


class _Picture:
    """Sizes in pixels, ``scale`` of them for one forward of a rank."""

    def __init__(self, program: Program, times: Timeline, report: Report) -> None:
        self.program, self.times, self.report = program, times, report
        cells = max(1.0, times.makespan * program.virtual_stages)
        narrow = cells > _CELLS_WITH_NUMBERS
        digits = len(str(program.num_micro_batches - 1))
        least = 2.0 if narrow else 6.0 + 5.5 * digits
        self.cell = min(30.0, max(least, 1100 / cells))
        self.scale = self.cell * program.virtual_stages
        self.row = 26 if program.num_ranks <= 32 else 14
        self.bar = self.row - 4
        self.plot_width = max(360.0, times.makespan * self.scale)
        self.plot_height = self.row * program.num_ranks
        self.font = min(12.0, self.bar - 5.0)

    def svg(self) -> str:
        width, height = _LEFT + self.plot_width + _RIGHT, _TOP + self.plot_height + _BOTTOM
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
            f'width="{width:.0f}" height="{height:.0f}" font-family="{escape(_FONT)}" role="img">'
        )
        background = f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>'
        parts = (self._title(), self._axis(), self._rows(), self._legend())
        lines = [head, background, *(line for part in parts for line in part), "</svg>"]
        return "\n".join(lines) + "\n"

    def _title(self) -> Iterator[str]:
        report = self.report
        title = f"{describe(self.program)}: bubble {report.bubble_ratio:.1%}"
        time = f"{_short(report.makespan)} forwards from the first action to the last"
        note = f"{time}; a backward takes two, transfers nothing"
        yield f"<title>{escape(title)}</title>"
        yield _text(16, 32, title, 18, _INK, weight=600)
        yield _text(16, 54, note, 12, _SOFT)

    def _rows(self) -> Iterator[str]:
        for rank, spans in enumerate(self.times.ranks):
            top = _TOP + rank * self.row
            middle = top + self.bar / 2 + 4
            yield _text(_LEFT - 10, middle, f"rank {rank}", 12, _INK, anchor="end")
            yield f'<rect x="{_LEFT}" y="{top}" width="{self._width()}" height="{self.bar}" fill="{_IDLE}"/>'
            for span in spans:
                if span.action.kind in COMPUTE:
                    yield from self._box(span, top)
            held, idle = self.report.peak_in_flight[rank], self.report.bubble[rank]
            words = f"idle {_short(idle)}, {_short(held)} in flight"
            yield _text(_LEFT + self.plot_width + 10, middle, words, 12, _SOFT)

    def _width(self) -> str:
        return f"{self.times.makespan * self.scale:.1f}"

    def _box(self, span: Span, top: int) -> Iterator[str]:
        action = span.action
        x, width = _LEFT + span.start * self.scale, span.duration * self.scale
        colour = box_colour(self.program, action)
        gap = 1.0 if self.cell >= 6 else 0.0
        yield (
            f'<rect x="{x + gap / 2:.1f}" y="{top}" width="{max(0.5, width - gap):.1f}" height="{self.bar}" '
            f'rx="{2 * gap:.0f}" fill="{colour}">{_hint(action)}</rect>'
        )
        label = str(action.micro_batch)
        font = min(self.font, (width - 2) / (0.62 * len(label)))
        if font >= 6:
            ink = ink_colour(self.program, action)
            yield _text(x + width / 2, top + self.bar / 2 + font * 0.36, label, font, ink, anchor="middle")

    def _axis(self) -> Iterator[str]:
        base = _TOP + self.plot_height
        step = _tick_step(self.times.makespan, self.plot_width)
        tick = 0.0
        while tick <= self.times.makespan + 1e-9:
            x = _LEFT + tick * self.scale
            yield f'<path d="M{x:.1f} {_TOP - 6}V{base + 4}" stroke="#dfe3e8" stroke-width="1"/>'
            yield _text(x, base + 18, _short(tick), 11, _SOFT, anchor="middle")
            tick += step
        yield _text(_LEFT + self.plot_width + 10, base + 18, "time in forwards of a rank", 11, _SOFT)

    def _legend(self) -> Iterator[str]:
        x, y = float(_LEFT), _TOP + self.plot_height + 40
        present = {action.kind for _, action in self.program}
        for kind, name in KIND_NAMES.items():
            if kind not in present:
                continue
            for virtual in range(self.program.virtual_stages):
                colour = box_colour(self.program, Action(kind, virtual * self.program.num_ranks))
                yield f'<rect x="{x:.0f}" y="{y}" width="14" height="14" rx="2" fill="{colour}"/>'
                x += 16
            yield _text(x + 4, y + 11, name, 12, _INK)
            x += 24 + 6.6 * len(name)
        if self.program.virtual_stages > 1:
            yield _text(_LEFT, y + 34, "light to dark: the rank's first to last stage", 11, _SOFT)


def _hint(action: Action) -> str:
    words = f"{KIND_NAMES[action.kind]}: stage {action.stage}, micro-batch {action.micro_batch}"
    return f"<title>{words}</title>"


def _text(
    x: float, y: float, words: str, size: float, colour: str, *, anchor: str = "start", weight: int = 400
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size:.1f}" fill="{colour}"'
    return f'<text {place} text-anchor="{anchor}" font-weight="{weight}">{escape(words)}</text>'


def _tick_step(makespan: float, width: float) -> float:
    """1, 2 or 5 times a power of ten, such that labels stand at least 40 pixels apart."""
    most = max(1.0, width / 40)
    power = 1.0
    while True:
        for factor in (1, 2, 5):
            if makespan / (factor * power) <= most:
                return factor * power
        power *= 10


def _short(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")
