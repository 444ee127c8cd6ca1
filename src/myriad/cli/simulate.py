"""``myriad simulate``: what was asked for, and whether it goes together.

--program                       one iteration's program as a picture        `myriad.cli.simulate_program`
--cluster CLUSTER               one iteration on a cluster, predicted       `myriad.cli.forecast`
--cluster CLUSTER --weeks N     weeks of them with faults                   `myriad.cli.weeks`
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from myriad.cli.files import check_picture
from myriad.cli.overrides import OverrideCommand
from myriad.errors import BadInputError

__all__ = ["register", "simulate"]


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
            "--fabric", help="Simulate the cluster's switches, too: p50 and p95 over draws of their hashes."
        ),
    ] = False,
    jitter: Annotated[
        float, typer.Option(help="Standard deviation of each compute's time, as a share of it; 0: none.")
    ] = 0.0,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Seed of the jitter, or of the first of several runs.")
    ] = 1,
    weeks: Annotated[
        float | None,
        typer.Option(metavar="N", help="Number of weeks with faults to simulate, instead of one iteration."),
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
            metavar="N", help="Number of simulated runs, each with other faults (with --weeks). Default: 20."
        ),
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
    of_weeks = {"mix": mix, "spares": spares, "runs": runs, "sensitivity": sensitivity}
    if weeks is not None:
        from myriad.cli.weeks import WantedWeeks, simulate_weeks

        _refuse(of_one | {"program": program}, "--weeks is about many iterations")
        if cluster is None:
            raise BadInputError("--cluster", None, "--weeks needs a cluster: a file, or a recipe's name")
        wanted = WantedWeeks(weeks, job, overrides, cluster, seed, sensitivity, out, as_json)
        simulate_weeks(wanted.with_given(mix, spares, runs))
        return
    _refuse(of_weeks, "needs --weeks N")
    if job is None:
        raise BadInputError("JOB", None, "a job file, or a recipe's name")
    if program == (cluster is not None):
        raise BadInputError("--program", program, "either --cluster CLUSTER, to predict, or --program")
    if cluster is None:
        from myriad.cli.simulate_program import show_program

        _refuse(of_one, "needs --cluster CLUSTER instead of --program")
        show_program(job, overrides, out, as_json=as_json)
        return
    from myriad.cli.forecast import Wanted, forecast
    from myriad.cli.forecast_network import WantedNetwork

    network = WantedNetwork(tuple(flap or ()), tuple(congested or ()), timers)
    of_all = (out, spans, full, straggler or [], jitter, seed, network, fabric, as_json)
    forecast(Wanted(job, overrides, cluster, *of_all))


def _refuse(options: Mapping[str, object], allowed: str) -> None:
    for option, given in options.items():
        if given not in (None, False, 0.0):
            raise BadInputError(f"--{option}", str(given), allowed)
