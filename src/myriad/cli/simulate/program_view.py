"""``myriad simulate --program``: the program of the pipeline ranks, checked and drawn over time, and its
conditions on GPUs for freedom from deadlock. With tensor parallelism it also shows the communication inside
each forward and backward, and the compute that it overlaps with.

The terminal shows each rank as a row of cells, side by side. A box is one cell; idle time is a cell without
an action. From wide to narrow, a cell shows ``F3`` (kind and micro-batch), ``3``, or the kind's letter. In
the narrowest form each column shows the action at its middle. The picture has ranks downwards and time to the
right:

    title      1f1b, 4 ranks, 8 micro-batches: bubble 27.3 %
    rank 0     [0][1][2][3]         [ 0  ][4][ 1  ] ...      idle 9, at most 4 in flight
    ...
    axis       0    5    10   in forwards of a rank
    legend     forward   backward
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from myriad.cli.json_output import print_json
from myriad.cli.output_files import write_picture
from myriad.program.actions import COMPUTE, Action, Kind, Program
from myriad.program.checker import ProgramCost
from myriad.program.timeline import ActionSpan, Timeline
from myriad.reports.charts.colours import KIND_NAMES, box_colour, ink_colour
from myriad.reports.charts.svg import IDLE, INK, box, document, round_step, rule, text

if TYPE_CHECKING:
    from rich.text import Text

    from myriad.job import Job
    from myriad.program.device_needs import DeviceNeeds

__all__ = ["draw_svg", "show_program", "text_rows"]

_WIDEST = 100_000
"""Width in columns of a picture that is written to a pipe, which does not wrap lines."""

_FEW_COLOURS = {
    "forward": "blue",
    "backward": "green",
    "backward_input": "cyan",
    "backward_weight": "yellow",
    "paired_forward": "magenta",
    "paired_backward": "white",
}
"""Colours for terminals with 16 colours."""


def show_program(job_name: str, overrides: Sequence[str], out: Path | None, *, as_json: bool) -> None:
    """Print the program of one iteration, or write its picture. Raises `BadInputError`."""
    from myriad.job import load_job
    from myriad.program.build import build_program
    from myriad.program.checker import check
    from myriad.program.timeline import timeline

    job = load_job(job_name, overrides)
    program = build_program(
        job.layout,
        job.overlap,
        job.num_micro_batches,
        tied=job.model.shares_embedding,
        training=True,
        orthogonalizes=job.optimizer.orthogonalizes,
    )
    report, times, needs = check(program), timeline(program), _device_needs(job)
    if out is not None:
        write_picture("--out", out, draw_svg(program, times, report))
    if as_json:
        devices = None if needs is None else needs.as_json()
        print_json(_as_json(program, times, report, out) | {"tensor": _tensor(job), "devices": devices})
    elif out is None:
        _print(program, times, report)
        for line in _tensor_lines(_tensor(job)):
            typer.echo(line)
        for line in needs.lines() if needs is not None else ():
            typer.echo(line)
    else:
        typer.echo(f"{_summary(program, report)}\n{out}")


def _summary(program: Program, report: ProgramCost) -> str:
    return f"{_describe(program)}: bubble {report.bubble_ratio:.1%}, {report.makespan:g} forwards in all"


def _as_json(program: Program, times: Timeline, report: ProgramCost, out: Path | None) -> dict[str, Any]:
    boxes = [
        {
            "rank": rank,
            "kind": str(span.action.kind),
            "stage": span.action.stage,
            "micro_batch": span.action.micro_batch,
            "start": span.start,
            "duration": span.duration,
        }
        for rank, spans in enumerate(times.ranks)
        for span in spans
        if span.action.kind in COMPUTE
    ]
    return {
        "schedule": program.schedule,
        "ranks": program.num_ranks,
        "virtual_stages": program.virtual_stages,
        "micro_batches": program.num_micro_batches,
        "unit": "forward of a rank",
        "makespan": report.makespan,
        "bubble_ratio": report.bubble_ratio,
        "bubble": report.bubble,
        "peak_in_flight": report.peak_in_flight,
        "out": None if out is None else str(out),
        "boxes": boxes,
    }


def _device_needs(job: "Job") -> "DeviceNeeds | None":
    """Return the program's conditions on GPUs for freedom from deadlock; ``None`` for pp = 1."""
    from myriad.job.job_values import device_job_of
    from myriad.program.device_needs import find_needs

    return find_needs(device_job_of(job)) if job.layout.pp > 1 else None


def _tensor(job: "Job") -> dict[str, Any] | None:
    """Return the overlap of tensor-parallel communication, and the number of pieces on a CPU; ``None`` for tp
    = 1."""
    from myriad.model.overlap_parts import num_parts, num_slices

    layout, model, overlap = job.layout, job.model, job.overlap
    if layout.tp == 1:
        return None
    value_bytes = 2 if job.train.precision == "bfloat16" else 4
    cut: dict[str, float] = {"chunks": overlap.tensor_chunks, "message_bytes": overlap.tensor_message}
    share, position_bytes = model.sequence // layout.tp, float(model.hidden * value_bytes)
    parts = num_parts(layout.micro_batch, share, position_bytes, **cut, on_cpu=True)
    slices = num_slices(layout.micro_batch * share, position_bytes, **cut)
    kind = overlap.tensor or "off"
    pieces = {"turns": {"parts": int(parts)}, "slices": {"slices": int(slices)}}
    return {"ranks": layout.tp, "kind": kind, **pieces.get(kind, {})}


def _tensor_lines(tensor: dict[str, Any] | None) -> list[str]:
    """Return lines that show a forward and a backward of tensor-parallel rank 0."""
    if tensor is None:
        return []
    head = f"inside each forward and backward, {tensor['ranks']} tensor-parallel ranks:"
    says = {
        "off": "each gather and scatter is waited for (overlap.tensor = off)",
        "auto": "turns, slices or neither, as measured at the start (overlap.tensor = auto)",
        "turns": f"{tensor.get('parts')} parts of the micro-batch take turns (overlap.tensor = turns)",
        "slices": "R.S is slice S of rank R, on GPUs one of each (overlap.tensor = slices)",
    }
    lines = [f"{head} {says[tensor['kind']]}"]
    if tensor["kind"] != "slices":
        return lines
    ranks, slices = tensor["ranks"], tensor["slices"]
    labels = [f"{rank}.{number + 1}" for number in range(slices) for rank in range(1, ranks)]
    width = max(map(len, labels))
    cut, own = "".join(f"|{label:<{width}}" for label in labels), "|" + "own".ljust(slices * (width + 1) - 1)
    for name, computes, travels in (
        ("gather", own + cut, cut),
        ("scatter", cut + own, " " * (width + 1) + cut),
    ):
        lines += [f"  {name:<8} computes {computes}|", f"  {'':<8} travels  {travels}|"]
    return lines


def _print(program: Program, times: Timeline, report: ProgramCost) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    few = console.color_system == "standard"
    heads = [f"rank {rank} " for rank in range(program.num_ranks)]
    tails = [
        f" idle {idle:g}, {held:g} in flight"
        for idle, held in zip(report.bubble, report.peak_in_flight, strict=True)
    ]
    around = max(map(len, heads)) + max(map(len, tails))
    columns = max(20, console.width - around) if console.is_terminal else _WIDEST
    rows = text_rows(program, times, columns)
    console.print(Text(_summary(program, report), style="bold"), soft_wrap=True)
    for head, cells, tail in zip(heads, rows, tails, strict=True):
        line = Text(head.rjust(max(map(len, heads))))
        for cell in cells:
            line.append_text(_coloured(program, cell.text, cell.action, few_colours=few))
        console.print(line + Text(tail, style="dim"), soft_wrap=True)
    console.print(_legend(program, few_colours=few), soft_wrap=True)


def _coloured(program: Program, text: str, action: Action | None, *, few_colours: bool) -> "Text":
    from rich.text import Text

    if action is None:
        return Text(text)
    if few_colours:
        return Text(text, style=f"black on {_FEW_COLOURS[str(action.kind)]}")
    return Text(text, style=f"{ink_colour(program, action)} on {box_colour(program, action)}")


def _legend(program: Program, *, few_colours: bool) -> "Text":
    from rich.text import Text

    legend = Text()
    for kind, name in KIND_NAMES.items():
        if any(action.kind is kind for _, action in program):
            legend.append_text(
                _coloured(program, f" {_LETTERS[kind]} ", Action(kind, 0), few_colours=few_colours)
            )
            legend.append(f" {name}   ")
    return legend


_LETTERS = {
    Kind.FORWARD: "F",
    Kind.BACKWARD: "B",
    Kind.BACKWARD_INPUT: "I",
    Kind.BACKWARD_WEIGHT: "W",
    Kind.PAIRED_FORWARD: "f",
    Kind.PAIRED_BACKWARD: "b",
}
"""Letter of each kind, for output without colour."""


@dataclass(frozen=True, slots=True)
class _Cell:
    """The characters of one action, or of idle time if ``action`` is None."""

    text: str
    action: Action | None


def text_rows(program: Program, times: Timeline, most_columns: int) -> list[list[_Cell]]:
    """Return one row per rank. All rows have equal length, at most ``most_columns``."""
    unit = 1 / program.virtual_stages
    num_units = round(times.makespan / unit)
    digits = len(str(program.num_micro_batches - 1))
    width = min(digits + 2, most_columns // max(1, num_units))
    if width < 1:
        return [_sampled_row(spans, times.makespan, max(1, most_columns)) for spans in times.ranks]
    return [_exact_row(spans, unit, num_units, width, digits) for spans in times.ranks]


def _exact_row(
    spans: tuple[ActionSpan, ...], unit: float, num_units: int, width: int, digits: int
) -> list[_Cell]:
    cells, reached = [], 0
    for span in spans:
        if span.action.kind not in COMPUTE:
            continue
        start, length = round(span.start / unit), round(span.duration / unit)
        if start > reached:
            cells.append(_Cell(" " * width * (start - reached), None))
        cells.append(_Cell(_label(span.action, width, digits).ljust(width * length), span.action))
        reached = start + length
    if num_units > reached:
        cells.append(_Cell(" " * width * (num_units - reached), None))
    return cells


def _label(action: Action, width: int, digits: int) -> str:
    letter = _LETTERS[action.kind]
    if width > digits:
        return f"{letter}{action.micro_batch}"
    return str(action.micro_batch) if width == digits else letter


def _sampled_row(spans: tuple[ActionSpan, ...], makespan: float, columns: int) -> list[_Cell]:
    """Return a row in which each column shows the action at the column's middle."""
    computes = [span for span in spans if span.action.kind in COMPUTE]
    cells, index = [], 0
    for column in range(columns):
        time = (column + 0.5) * makespan / columns
        while index < len(computes) and computes[index].end <= time:
            index += 1
        inside = index < len(computes) and computes[index].start <= time
        action = computes[index].action if inside else None
        cells.append(_Cell(_LETTERS[action.kind] if action else " ", action))
    return cells


_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 176, 76, 84
_CELLS_WITH_NUMBERS = 400
"""Largest number of shortest boxes side by side that are drawn with numbers; a larger picture is narrow,
without numbers."""


def _describe(program: Program) -> str:
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
        title = f"{_describe(self.program)}: bubble {self.report.bubble_ratio:.1%}"
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
