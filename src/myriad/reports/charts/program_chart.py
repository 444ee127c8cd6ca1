"""A pipeline program over time: ranks downwards, time to the right, idle time light.

title      1f1b, 4 ranks, 8 micro-batches: bubble 27.3 %
rank 0     [0][1][2][3]         [ 0  ][4][ 1  ] ...      idle 9, at most 4 in flight
...
axis       0    5    10   in forwards of a rank
legend     forward   backward
"""

from collections.abc import Iterator

from myriad.program.actions import COMPUTE, Action, Program
from myriad.program.checker import ProgramCost
from myriad.program.timeline import ActionSpan, Timeline
from myriad.reports.charts.action_colours import KIND_NAMES, box_colour, ink_colour
from myriad.reports.charts.svg import IDLE, INK, box, document, round_step, rule, text

__all__ = ["describe", "draw_svg"]

_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 176, 76, 84
_CELLS_WITH_NUMBERS = 400
"""Largest number of shortest boxes side by side that are drawn with numbers; a larger picture is narrow,
without numbers."""


def describe(program: Program) -> str:
    """Return a description such as ``interleaved, 4 ranks x 2 stages, 8 micro-batches``."""
    plural = "" if program.num_ranks == 1 else "s"
    stages = f" x {program.virtual_stages} stages" if program.virtual_stages > 1 else ""
    batches = f"{program.num_micro_batches} micro-batch{'' if program.num_micro_batches == 1 else 'es'}"
    return f"{program.schedule}, {program.num_ranks} rank{plural}{stages}, {batches}"


def draw_svg(program: Program, times: Timeline, report: ProgramCost) -> str:
    """Draw a program's timeline, with the bubble and the micro-batches in flight that the checker reports."""
    return _Picture(program, times, report).svg()


class _Picture:
    """The picture, in pixels; ``scale`` pixels are one forward of a rank."""

    def __init__(self, program: Program, times: Timeline, report: ProgramCost) -> None:
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
        title = f"{describe(self.program)}: bubble {self.report.bubble_ratio:.1%}"
        parts = (self._title(title), self._axis(), self._rows(), self._legend())
        return document(round(width), round(height), title, (line for part in parts for line in part))

    def _title(self, title: str) -> Iterator[str]:
        time = f"{_short(self.report.makespan)} forwards from the first action to the last"
        note = f"{time}; a backward takes two, transfers take none"
        yield text(16, 32, title, size=17, ink=INK, weight=600)
        yield text(16, 54, note)

    def _rows(self) -> Iterator[str]:
        for rank, spans in enumerate(self.times.ranks):
            top = _TOP + rank * self.row
            middle = top + self.bar / 2 + 4
            yield text(_LEFT - 10, middle, f"rank {rank}", "end", ink=INK)
            yield box(_LEFT, top, self.times.makespan * self.scale, self.bar, IDLE)
            for span in spans:
                if span.action.kind in COMPUTE:
                    yield from self._box(span, top)
            held, idle = self.report.peak_in_flight[rank], self.report.bubble[rank]
            words = f"idle {_short(idle)}, {_short(held)} in flight"
            yield text(_LEFT + self.plot_width + 10, middle, words)

    def _box(self, span: ActionSpan, top: int) -> Iterator[str]:
        action = span.action
        x, width = _LEFT + span.start * self.scale, span.duration * self.scale
        colour = box_colour(self.program, action)
        gap = 1.0 if self.cell >= 6 else 0.0
        inside = max(0.5, width - gap)
        yield box(x + gap / 2, top, inside, self.bar, colour, _hint(action), rounding=2 * gap)
        label = str(action.micro_batch)
        font = min(self.font, (width - 2) / (0.62 * len(label)))
        if font >= 6:
            ink = ink_colour(self.program, action)
            yield text(x + width / 2, top + self.bar / 2 + font * 0.36, label, "middle", size=font, ink=ink)

    def _axis(self) -> Iterator[str]:
        base = _TOP + self.plot_height
        step = round_step(max(1.0, self.times.makespan / max(1.0, self.plot_width / 40)))
        tick = 0.0
        while tick <= self.times.makespan + 1e-9:
            x = _LEFT + tick * self.scale
            yield rule((x, _TOP - 6), (x, base + 4))
            yield text(x, base + 18, _short(tick), "middle", size=11)
            tick += step
        yield text(_LEFT + self.plot_width + 10, base + 18, "time in forwards of a rank", size=11)

    def _legend(self) -> Iterator[str]:
        x, y = float(_LEFT), _TOP + self.plot_height + 40
        present = {action.kind for _, action in self.program}
        for kind, name in KIND_NAMES.items():
            if kind not in present:
                continue
            for virtual in range(self.program.virtual_stages):
                colour = box_colour(self.program, Action(kind, virtual * self.program.num_ranks))
                yield box(x, y, 14, 14, colour, rounding=2)
                x += 16
            yield text(x + 4, y + 11, name)
            x += 24 + 6.6 * len(name)
        if self.program.virtual_stages > 1:
            yield text(_LEFT, y + 34, "light to dark: the rank's first to last stage", size=11)


def _hint(action: Action) -> str:
    return f"{KIND_NAMES[action.kind]}: stage {action.stage}, micro-batch {action.micro_batch}"


def _short(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")
