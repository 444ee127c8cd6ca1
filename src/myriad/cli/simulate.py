"""``myriad simulate``: one iteration's program as a picture (``--program``), or on a cluster, predicted
(``--cluster``: `myriad.cli.forecast`), or weeks of them with faults (``--weeks``: `myriad.cli.weeks`)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from myriad.cli.files import check_picture, write_picture
from myriad.cli.overrides import OverrideCommand
from myriad.errors import BadInputError

if TYPE_CHECKING:
    from rich.text import Text

    from myriad.program.actions import Action, Program
    from myriad.program.checker import Report
    from myriad.program.timeline import Timeline

__all__ = ["register", "simulate"]

_WIDEST = 100_000
"""Columns of a picture that goes into a pipe, where nothing wraps."""

_FEW_COLOURS = {"forward": "blue", "backward": "green", "backward_input": "cyan", "backward_weight": "yellow"}
"""For terminals of 16 colours."""


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    metavar = "(--cluster CLUSTER [--weeks N] | --program) [OPTIONS] [--KEY VALUE]..."
    app.command("simulate", cls=OverrideCommand, options_metavar=metavar)(simulate)


def simulate(
    context: typer.Context,
    job: Annotated[
        str | None,
        typer.Argument(metavar="[JOB]", help="A job file, or a recipe's name; --weeks does without."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="CLUSTER", help="Predict on this cluster: a file, or a recipe's name."),
    ] = None,
    program: Annotated[
        bool,
        typer.Option("--program", help="Draw the pipeline program alone (a forward takes 1, a backward 2)."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg|png", help="Write the picture here, instead of to the terminal."),
    ] = None,
    spans: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write predicted spans as a run's folder has them: DIR/spans."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Every replica, also where all are alike.")] = False,
    straggler: Annotated[
        list[str] | None,
        typer.Option(
            metavar="node=N:Fx | rank=N:Fx",
            help="A node or rank (from 0) that computes F times as long; may be given several times.",
        ),
    ] = None,
    flap: Annotated[
        list[str] | None,
        typer.Option(
            metavar="node=N:Ss@Ts",
            help="A link of a node is down for S seconds, T seconds into the iteration; again for more.",
        ),
    ] = None,
    congested: Annotated[
        list[str] | None,
        typer.Option(
            metavar="node=N:F | switch=N:F",
            help="The way in and out of a node, or of all under a switch, has this share of its rate.",
        ),
    ] = None,
    timers: Annotated[
        str | None,
        typer.Option(
            metavar="TxR[:adaptive]", help="NCCL_IB_TIMEOUT and NCCL_IB_RETRY_CNT, for --flap; off: 20x7."
        ),
    ] = None,
    fabric: Annotated[
        bool,
        typer.Option(
            "--fabric", help="Also on the cluster's switches: p50 and p95 over draws of their hashes."
        ),
    ] = False,
    jitter: Annotated[
        float, typer.Option(help="Standard deviation of each compute's time, as a share of it; 0: none.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the jitter; of the first of several runs.")] = 1,
    weeks: Annotated[
        float | None,
        typer.Option(metavar="N", help="So many weeks with faults, instead of one iteration."),
    ] = None,
    mix: Annotated[
        str | None,
        typer.Option(metavar="MIX", help="Of faults: llama3 (default), byterobust, megascale, or a file."),
    ] = None,
    spares: Annotated[
        int | None,
        typer.Option(metavar="N", help="Spare nodes that stand by (with --weeks); 16 if not given."),
    ] = None,
    runs: Annotated[
        int | None, typer.Option(metavar="N", help="With other faults each (with --weeks); 20 if not given.")
    ] = None,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="Which time or rate is worth what (with --weeks; a minute).")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print figures, and with --program every box, as one JSON object.")
    ] = False,
) -> None:
    """Show one iteration of a job before it runs: predicted on a cluster, or the program alone.

    With --cluster: time, MFU, memory, and what each pipeline rank waits for.

    With --program: the program that the pipeline ranks run, checked, with its bubble (time in which a rank
    computes nothing, in forwards of a rank) and the most micro-batches in flight.
    """
    if out is not None:
        check_picture("--out", out)
    overrides = OverrideCommand.of(context)
    of_one: dict[str, object] = {"spans": spans, "full": full, "straggler": straggler, "jitter": jitter}
    of_one |= {"flap": flap, "congested": congested, "timers": timers, "fabric": fabric}
    if weeks is not None:
        from myriad.cli.weeks import WantedWeeks, simulate_weeks

        _refuse(of_one | {"program": program}, "--weeks is about many iterations")
        if cluster is None:
            raise BadInputError("--cluster", None, "--weeks needs a cluster: a file, or a recipe's name")
        given = (
            16 if spares is None else spares,
            20 if runs is None else runs,
            seed,
            sensitivity,
            out,
            as_json,
        )
        simulate_weeks(WantedWeeks(weeks, job, overrides, cluster, mix or "llama3", *given))
        return
    _refuse({"mix": mix, "spares": spares, "runs": runs, "sensitivity": sensitivity}, "needs --weeks N")
    if job is None:
        raise BadInputError("JOB", None, "a job file, or a recipe's name")
    if cluster is not None and not program:
        from myriad.cli.forecast import Wanted, forecast
        from myriad.cli.forecast_network import WantedNetwork

        network = WantedNetwork(tuple(flap or ()), tuple(congested or ()), timers)
        of_all = (out, spans, full, straggler or [], jitter, seed, network, fabric, as_json)
        forecast(Wanted(job, overrides, cluster, *of_all))
        return
    if not program or cluster is not None:
        raise BadInputError("--program", program, "either --cluster CLUSTER, to predict, or --program")
    _refuse(of_one, "needs --cluster CLUSTER instead of --program")
    _show(job, overrides, out, as_json)


def _refuse(options: Mapping[str, object], allowed: str) -> None:
    for option, given in options.items():
        if given not in (None, False, 0.0):
            raise BadInputError(f"--{option}", str(given), allowed)


def _show(job_name: str, overrides: list[str], out: Path | None, as_json: bool) -> None:
    from myriad.job import load_job
    from myriad.program.build import build_program
    from myriad.program.checker import check
    from myriad.program.timeline import timeline

    job = load_job(job_name, overrides)
    program = build_program(
        job.layout, job.overlap, job.num_micro_batches, tied=job.model.tied, training=True
    )
    report, times = check(program), timeline(program)
    if out is not None:
        from myriad.program.draw import draw_svg

        write_picture("--out", out, draw_svg(program, times, report))
    if as_json:
        typer.echo(json.dumps(_as_json(program, times, report, out)))
    elif out is None:
        _print(program, times, report)
    else:
        typer.echo(f"{_summary(program, report)}\n{out}")


def _summary(program: "Program", report: "Report") -> str:
    from myriad.program.draw import describe

    return f"{describe(program)}: bubble {report.bubble_ratio:.1%}, {report.makespan:g} forwards in all"


def _as_json(program: "Program", times: "Timeline", report: "Report", out: Path | None) -> dict[str, Any]:
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


def _print(program: "Program", times: "Timeline", report: "Report") -> None:
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

    from myriad.program.palette import box_colour, ink_colour

    if action is None:
        return Text(text)
    if few_colours:
        return Text(text, style=f"black on {_FEW_COLOURS[str(action.kind)]}")
    return Text(text, style=f"{ink_colour(program, action)} on {box_colour(program, action)}")


def _legend(program: "Program", *, few_colours: bool) -> "Text":
    from rich.text import Text

    from myriad.program.actions import Action
    from myriad.program.palette import KIND_NAMES
    from myriad.program.text import LETTERS

    legend = Text()
    for kind, name in KIND_NAMES.items():
        if any(action.kind is kind for _, action in program):
            legend.append_text(
                _coloured(program, f" {LETTERS[kind]} ", Action(kind, 0), few_colours=few_colours)
            )
            legend.append(f" {name}   ")
    return legend
