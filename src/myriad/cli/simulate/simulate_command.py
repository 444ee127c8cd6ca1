"""``myriad simulate``: the verb, which checks its options, and the prediction of one iteration.

--program                       one iteration's program as a picture        `program_view`
--cluster CLUSTER               one iteration on a cluster, predicted       here
--cluster CLUSTER --weeks N     weeks with faults                           `weeks_command`
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from myriad.cli.job_key_options import OverrideCommand
from myriad.cli.json_output import print_json
from myriad.cli.output_files import check_picture, write_picture
from myriad.cli.progress_bar import count_bar
from myriad.errors import BadInputError
from myriad.system.whole_file import write_whole

if TYPE_CHECKING:
    from myriad.forecasts.iteration_forecast import IterationForecast
    from myriad.forecasts.network_effect import NetworkEventRequest

__all__ = ["register", "simulate"]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    metavar = "(--cluster CLUSTER [--weeks N] | --program) [OPTIONS] [--KEY VALUE]..."
    app.command("simulate", cls=OverrideCommand, options_metavar=metavar)(simulate)


def simulate(
    context: typer.Context,
    job: Annotated[
        str | None,
        typer.Argument(metavar="[JOB]", help="Job file or recipe; optional with --weeks."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="CLUSTER",
            help="Predict on this cluster: a file, a recipe, or a number of accelerators such as 256xb200.",
        ),
    ] = None,
    program: Annotated[
        bool,
        typer.Option("--program", help="Show only the pipeline program (a forward takes 1, a backward 2)."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg|png", help="Write the picture to this file."),
    ] = None,
    spans: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Write predicted spans to DIR/spans, in the format of a run folder."
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Simulate every replica, even where all are alike.")
    ] = False,
    straggler: Annotated[
        list[str] | None,
        typer.Option(
            metavar="node=N:Fx | rank=N:Fx",
            help="Node or rank (from 0) whose compute takes F times as long; repeatable.",
        ),
    ] = None,
    flap: Annotated[
        list[str] | None,
        typer.Option(
            metavar="node=N:Ss@Ts",
            help="A link of node N goes down T seconds into the iteration, for S seconds; repeatable.",
        ),
    ] = None,
    congested: Annotated[
        list[str] | None,
        typer.Option(
            metavar="node=N:F | switch=N:F",
            help="A node's links, or those of all nodes under a switch, run at this fraction of their rate; "
            "repeatable.",
        ),
    ] = None,
    timers: Annotated[
        str | None,
        typer.Option(
            metavar="TxR[:adaptive]", help="NCCL_IB_TIMEOUT and NCCL_IB_RETRY_CNT for --flap. Default: 20x7."
        ),
    ] = None,
    fabric: Annotated[
        bool,
        typer.Option(
            "--fabric", help="Simulate the switches as well: p50 and p95 over draws of their hash seeds."
        ),
    ] = False,
    expert_load_from: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="Count the mean load of the busiest rank that this run measured (expert_loads in its "
            "metrics.jsonl), instead of layout.expert_load.",
        ),
    ] = None,
    jitter: Annotated[
        float, typer.Option(help="Standard deviation of each compute time, as a fraction of it.")
    ] = 0.0,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Seed of the jitter, or of the first simulated run.")
    ] = 1,
    weeks: Annotated[
        float | None,
        typer.Option(metavar="N", help="Simulate this many weeks with faults instead of one iteration."),
    ] = None,
    mix: Annotated[
        str | None,
        typer.Option(
            metavar="MIX", help="Mix of faults: llama3 (default), byterobust, megascale, or a file."
        ),
    ] = None,
    spares: Annotated[
        int | None,
        typer.Option(metavar="N", help="Number of idle spare nodes (with --weeks). Default: 16."),
    ] = None,
    runs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Number of simulated runs, each with different faults (with --weeks). Default: 20.",
        ),
    ] = None,
    sensitivity: Annotated[
        bool,
        typer.Option(
            "--sensitivity",
            help="Show the effect of changing each time or rate (with --weeks; takes a minute).",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; with --program it lists every action.")
    ] = False,
) -> None:
    """Predict one iteration of a job on a cluster, or show its pipeline program.

    --cluster: time, MFU, memory, and what each pipeline rank waits for.

    --program: the checked program of the pipeline ranks, with the bubble (idle time, in forwards of a rank)
    and the most micro-batches in flight.

    --cluster with --weeks: the effective training time over weeks with faults, for several recovery policies.
    """
    if out is not None:
        check_picture("--out", out)
    overrides = OverrideCommand.of(context)
    of_one: dict[str, object] = {"spans": spans, "full": full, "straggler": straggler, "jitter": jitter}
    of_one |= {"flap": flap, "congested": congested, "timers": timers, "fabric": fabric}
    of_one["expert-load-from"] = expert_load_from
    of_weeks = {"mix": mix, "spares": spares, "runs": runs, "sensitivity": sensitivity}
    if weeks is not None:
        from myriad.cli.simulate.weeks_command import WeeksRequest, simulate_weeks

        _refuse(of_one | {"program": program}, "--weeks is about many iterations")
        if cluster is None:
            raise BadInputError("--cluster", None, "--weeks needs a cluster: a file, or a recipe's name")
        wanted = WeeksRequest(weeks, job, overrides, cluster, seed, sensitivity, out, as_json)
        simulate_weeks(wanted.with_given(mix, spares, runs))
        return
    _refuse(of_weeks, "needs --weeks N")
    if job is None:
        raise BadInputError("JOB", None, "a job file, or a recipe's name")
    if program == (cluster is not None):
        raise BadInputError("--program", program, "give either --cluster CLUSTER to predict, or --program")
    if cluster is None:
        from myriad.cli.simulate.program_view import show_program

        _refuse(of_one, "needs --cluster CLUSTER instead of --program")
        show_program(job, overrides, out, as_json=as_json)
        return
    from myriad.forecasts.network_effect import NetworkEventRequest

    network = NetworkEventRequest(tuple(flap or ()), tuple(congested or ()), timers)
    of_all = (out, spans, full, straggler or [], jitter, seed, network, fabric, as_json, expert_load_from)
    _simulate_iteration(_IterationOptions(job, overrides, cluster, *of_all))


def _refuse(options: Mapping[str, object], allowed: str) -> None:
    for option, given in options.items():
        if given not in (None, False, 0.0):
            raise BadInputError(f"--{option}", given, allowed)


@dataclass(frozen=True)
class _IterationOptions:
    """The options of ``myriad simulate --cluster``."""

    job: str
    overrides: Sequence[str]
    cluster: str
    out: Path | None
    spans: Path | None
    full: bool
    stragglers: Sequence[str]
    jitter: float
    seed: int
    network: "NetworkEventRequest"
    fabric: bool
    as_json: bool
    expert_load_from: str | None


def _simulate_iteration(options: _IterationOptions) -> None:
    """Predict an iteration, write the files, print the figures. Raises `BadInputError`."""
    from myriad.cli.measured_cluster import cluster_path
    from myriad.forecasts.iteration_forecast import IterationRequest, check_jitter, check_world, fabric_line
    from myriad.forecasts.measured_loads import MeasuredLoads
    from myriad.job import load_job
    from myriad.recipes.cluster import load_cluster

    check_jitter(options.jitter)
    job = load_job(options.job, options.overrides)
    cluster = load_cluster(cluster_path(options.cluster))
    check_world(job, cluster)
    if options.spans is not None:
        _check_folder(options.spans)
    loads = None
    if options.expert_load_from is not None:
        loads = MeasuredLoads.read(options.expert_load_from, job, options.overrides)
        job = loads.of_job(job)
    question = IterationRequest(
        job, cluster, options.full, options.stragglers, options.jitter, options.seed, options.network
    )
    with count_bar("simulating an iteration") as show:
        found, on_fabric = question.forecast(), None
        if loads is not None:
            busier = question.with_expert_load(loads.high(job.layout.ep)).forecast()
            found = replace(found, loads=loads, at_high_load=busier.summary)
        if options.fabric:
            on_fabric = question.fabric_outlook(partial(show, "simulating draws of the hash seeds"))
    written = _write(options, found)
    if options.as_json:
        fabric = {} if on_fabric is None else {"fabric": on_fabric.as_json()}
        print_json(found.as_json() | {"written": [str(path) for path in written]} | fabric)
    else:
        _print_iteration(found, [] if on_fabric is None else [fabric_line(on_fabric)], written)


def _check_folder(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInputError("--spans", str(folder), "must be a new or empty folder")


def _write(options: _IterationOptions, found: "IterationForecast") -> list[Path]:
    from myriad.job import dump_toml
    from myriad.reports.charts.span_chart import ChartLane, Panel, draw_spans
    from myriad.telemetry.span_io.span_files import write_spans

    written = []
    if options.out is not None:
        lanes = [ChartLane(f"rank {rank}", spans) for rank, spans in found.spans.items()]
        panel = Panel("one iteration, predicted", 0.0, found.summary.seconds, lanes)
        write_picture("--out", options.out, draw_spans(found.headline, [panel]))
        written.append(options.out)
    if options.spans is not None:
        folder = options.spans / "spans"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_spans(folder / "step-1.parquet", found.spans, step=1)
            write_whole(options.spans / "job.toml", dump_toml(found.job))
        except OSError as error:
            raise BadInputError(
                "--spans", str(options.spans), f"cannot be written: {error.strerror}"
            ) from None
        written.append(options.spans)
    return written


def _print_iteration(
    found: "IterationForecast", fabric_lines: Sequence[str], written: Sequence[Path]
) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)

    def show(line: str, style: str = "") -> None:
        console.print(Text(line, style=style), soft_wrap=True)

    show(found.headline, "bold")
    show(found.rate_line)
    head, *rows = found.table()
    show(head, "bold")
    for row in rows:
        show(row)
    if found.num_hidden_ranks:
        show(f"and {found.num_hidden_ranks:,} more: --json has all")
    for warning in found.warnings:
        show(warning.line, "yellow")
    for line in found.notes():
        show(line, "dim")
    for line in (*found.network_lines(), *fabric_lines, *map(str, written)):
        show(line)
