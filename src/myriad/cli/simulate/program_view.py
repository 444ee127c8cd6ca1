"""``myriad simulate --program``: the program of the pipeline ranks, checked and drawn over time, and its
conditions on GPUs for freedom from deadlock. With tensor parallelism it also shows the communication inside
each forward and backward, and the compute that it overlaps with."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from myriad.cli.json_output import print_json
from myriad.cli.output_files import write_picture

if TYPE_CHECKING:
    from rich.text import Text

    from myriad.job import Job
    from myriad.program.actions import Action, Program
    from myriad.program.checker import ProgramCost
    from myriad.program.device_needs import DeviceNeeds
    from myriad.program.timeline import Timeline

__all__ = ["show_program"]

_WIDEST = 100_000
"""Width in columns of a picture that is written to a pipe, which does not wrap lines."""

_FEW_COLOURS = {"forward": "blue", "backward": "green", "backward_input": "cyan", "backward_weight": "yellow"}
"""Colours for terminals with 16 colours."""


def show_program(job_name: str, overrides: Sequence[str], out: Path | None, *, as_json: bool) -> None:
    """Print the program of one iteration, or write its picture. Raises `BadInputError`."""
    from myriad.job import load_job
    from myriad.program.build import build_program
    from myriad.program.checker import check
    from myriad.program.timeline import timeline

    job = load_job(job_name, overrides)
    program = build_program(
        job.layout, job.overlap, job.num_micro_batches, tied=job.model.tied, training=True
    )
    report, times, needs = check(program), timeline(program), _device_needs(job)
    if out is not None:
        from myriad.reports.charts.program_chart import draw_svg

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


def _summary(program: "Program", report: "ProgramCost") -> str:
    from myriad.reports.charts.program_chart import describe

    return f"{describe(program)}: bubble {report.bubble_ratio:.1%}, {report.makespan:g} forwards in all"


def _as_json(
    program: "Program", times: "Timeline", report: "ProgramCost", out: Path | None
) -> dict[str, Any]:
    from myriad.program.actions import COMPUTE

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


def _print(program: "Program", times: "Timeline", report: "ProgramCost") -> None:
    from rich.console import Console
    from rich.text import Text

    from myriad.program.text import text_rows

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


def _coloured(program: "Program", text: str, action: "Action | None", *, few_colours: bool) -> "Text":
    from rich.text import Text

    from myriad.reports.charts.action_colours import box_colour, ink_colour

    if action is None:
        return Text(text)
    if few_colours:
        return Text(text, style=f"black on {_FEW_COLOURS[str(action.kind)]}")
    return Text(text, style=f"{ink_colour(program, action)} on {box_colour(program, action)}")


def _legend(program: "Program", *, few_colours: bool) -> "Text":
    from rich.text import Text

    from myriad.program.actions import Action
    from myriad.program.text import LETTERS
    from myriad.reports.charts.action_colours import KIND_NAMES

    legend = Text()
    for kind, name in KIND_NAMES.items():
        if any(action.kind is kind for _, action in program):
            legend.append_text(
                _coloured(program, f" {LETTERS[kind]} ", Action(kind, 0), few_colours=few_colours)
            )
            legend.append(f" {name}   ")
    return legend
