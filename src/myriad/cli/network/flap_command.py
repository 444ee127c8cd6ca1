"""``myriad network flap``: the effect on a job of links that go down for seconds, and the NIC timers to
set."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from myriad.cli.json_output import print_json
from myriad.cli.output_files import check_picture, write_picture
from myriad.cli.progress_bar import count_bar
from myriad.cli.shared_options import ClusterFile, HasDriver
from myriad.errors import BadInputError
from myriad.forecasts.flap_answer import DEAD_PER_MONTH, FLAPS_PER_MONTH, QUEUE_PAIRS

if TYPE_CHECKING:
    from myriad.forecasts.flap_answer import ComparedTimers
    from myriad.planner import Cluster

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("flap")(flap)


def flap(
    job: Annotated[
        str | None,
        typer.Argument(metavar="[JOB]", help="Job file or recipe, to show the effect on its iteration."),
    ] = None,
    cluster: ClusterFile = "megascale-12288xa100",
    down: Annotated[
        str,
        typer.Option(
            metavar="TIMES",
            help="Down times in seconds: lognormal:MEDIAN:SIGMA, or a list such as 0.5,2,8.",
        ),
    ] = "lognormal:2:1",
    flaps: Annotated[
        float, typer.Option(help="Flaps of one link a month (an assumption).")
    ] = FLAPS_PER_MONTH,
    dead: Annotated[
        float,
        typer.Option(help="Permanent failures of one link a month (HPN, SIGCOMM 2024)."),
    ] = DEAD_PER_MONTH,
    links: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10_000_000,
            help="Number of links without an alternative path. Default: the NIC ports of the cluster.",
        ),
    ] = None,
    queue_pairs: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Queue pairs of the job that send through one link.")
    ] = QUEUE_PAIRS,
    timeout: Annotated[str, typer.Option(metavar="N,N..", help="Timeouts to compare.")] = "14,18,20",
    retries: Annotated[int, typer.Option(min=1, max=7, help="Retries of these timeouts.")] = 7,
    longer: Annotated[
        str,
        typer.Option(
            metavar="A,B", help="Shortest and longest real timer of a NIC, as multiples of the nominal one."
        ),
    ] = "1,4",
    adaptive: Annotated[
        bool, typer.Option("--adaptive/--no-adaptive", help="Whether NICs support adaptive retransmission.")
    ] = True,
    driver: HasDriver = True,
    patience: Annotated[
        float | None,
        typer.Option(
            help="resilience.timeout_scale: the driver waits 3 s x this for a link. Default: the JOB's."
        ),
    ] = None,
    restart: Annotated[
        float | None,
        typer.Option(
            help="Seconds from an error until the job has caught up. Default: as for simulate --weeks."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg|png", help="Draw aborts and waits by down time."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Predict what flapping links do to a job, and which NIC timers to set.

    A job survives a flap if its queue pairs resend after the link is up again and before their retries are
    used up; all ranks wait until then. Longer timeouts survive longer flaps, but detect a dead peer later.

    Nothing is simulated or run: the probabilities have closed forms.
    """
    from myriad.forecasts.flap_answer import (
        JobTolerance,
        LinkRates,
        compare_timers,
        link_habits,
        timers_as_json,
    )
    from myriad.network.link_flaps import Timers

    if out is not None:
        check_picture("--out", out)
    timers = Timers(18, retries, adaptive, longer=_two(longer))
    timeouts = _timeouts(timeout)
    with count_bar("predicting an iteration") as progress:
        found_cluster, seconds, own_patience = _read(job, cluster)
        habits = link_habits(
            found_cluster,
            down,
            LinkRates(flaps, dead, links, queue_pairs),
            JobTolerance(driver, own_patience if patience is None else patience, restart),
        )
        progress("comparing timeouts", 0, 0)
        found = compare_timers(habits, timers, timeouts)
    if out is not None:
        from myriad.reports.charts.flap_chart import draw

        write_picture("--out", out, draw([one.timers for one in found.shown], habits))
    if as_json:
        print_json(timers_as_json(found, found_cluster.name, seconds, out))
    else:
        _show(found, found_cluster.name, seconds, out)


def _read(job: str | None, name: str) -> "tuple[Cluster, float | None, float]":
    """Return the cluster, the seconds of the job's iteration, and its timeout scale."""
    from myriad.recipes.cluster import load_cluster

    cluster = load_cluster(name)
    if job is None:
        return cluster, None, 1.0
    from myriad.forecasts.iteration_forecast import predict_iteration
    from myriad.job import load_job

    loaded = load_job(job)
    return cluster, predict_iteration(loaded, cluster), loaded.resilience.timeout_scale


def _two(text: str) -> tuple[float, float]:
    try:
        least, most = (float(one) for one in text.split(","))
    except ValueError:
        least, most = 0.0, 0.0
    if not 0.1 <= least <= most <= 100:
        raise BadInputError("--longer", text, "two numbers such as 1,4: at least and at most, 0.1 to 100")
    return least, most


def _timeouts(text: str) -> list[int]:
    from myriad.network.link_flaps import MAX_TIMEOUT

    try:
        numbers = [int(one) for one in text.split(",")]
    except ValueError:
        numbers = [0]
    if not all(1 <= number <= MAX_TIMEOUT for number in numbers):
        raise BadInputError("--timeout", text, f"numbers from 1 to {MAX_TIMEOUT} such as 14,18,20")
    return numbers


def _show(found: "ComparedTimers", cluster: str, seconds: float | None, out: Path | None) -> None:
    """Print the table of timers, its notes, and the settings."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from myriad.forecasts.flap_answer import COLUMNS, advice, cells, headline, notes

    console = Console(highlight=False)
    console.print(Text(headline(found, cluster), style="bold"), soft_wrap=True)
    table = Table(box=None)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "timeout" else "right", no_wrap=True)
    for one in found.shown:
        table.add_row(*cells(one), style="bold" if one == found.best else "")
    console.print(table)
    for line in notes(found, seconds):
        console.print(Text(line, style="dim"), soft_wrap=True)
    console.print(Text("set", style="bold"))
    for setting, why in advice(found):
        console.print(Text(f"  {setting}"), soft_wrap=True)
        console.print(Text(f"      {why}", style="dim"), soft_wrap=True)
    if out is not None:
        console.print(str(out), soft_wrap=True)
