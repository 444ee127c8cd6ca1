"""``myriad network flap``: what links that go down for seconds do to a job, and which timers to set."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from myriad.cli.bars import count_bar
from myriad.cli.files import check_picture, write_picture
from myriad.cli.json_output import print_json
from myriad.errors import BadInputError

if TYPE_CHECKING:
    from myriad.cli.network_flap_show import Answer
    from myriad.network.flaps import Fate, Habits
    from myriad.network.retransmission import Timers
    from myriad.planner.cluster import Cluster

__all__ = ["Care", "Rates", "answer", "habits_of", "register"]

_CLEARLY = 0.99
_FLAPS_PER_MONTH = 0.01
"""Of a link, assumed: nobody has published how often links flap by number of links."""
_DEAD_PER_MONTH = 0.00057
"""Of links between NICs and switches 0.057 % fail each month (HPN, SIGCOMM 2024, section 2)."""
_QUEUE_PAIRS = 16
"""Through a NIC's link, assumed: two neighbours in a ring, eight channels each."""


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command("flap")(flap)


def flap(
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="[JOB]", help="A job, whose iteration a flap lengthens: a file, or a recipe's name."
        ),
    ] = None,
    cluster: Annotated[
        str, typer.Option(metavar="CLUSTER", help="A cluster file, or a recipe's name.")
    ] = "megascale-12288xa100",
    down: Annotated[
        str,
        typer.Option(
            metavar="TIMES",
            help="For how long links are down: lognormal:MEDIAN:SIGMA in seconds, or a list such as 0.5,2,8.",
        ),
    ] = "lognormal:2:1",
    flaps: Annotated[float, typer.Option(help="Flaps of one link a month (assumed).")] = _FLAPS_PER_MONTH,
    dead: Annotated[
        float,
        typer.Option(help="Failures of one link a month after which it stays down (HPN, SIGCOMM 2024)."),
    ] = _DEAD_PER_MONTH,
    links: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10_000_000,
            help="Links without another way around. Off: one for each port of a NIC.",
        ),
    ] = None,
    queue_pairs: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Queue pairs of the job that send through one link.")
    ] = _QUEUE_PAIRS,
    timeout: Annotated[str, typer.Option(metavar="N,N..", help="Further timeouts to show.")] = "14,18,20",
    retries: Annotated[int, typer.Option(min=1, max=7, help="Resends of the timeouts to show.")] = 7,
    longer: Annotated[
        str, typer.Option(metavar="A,B", help="A NIC's timers over nominal, at least and at most.")
    ] = "1,4",
    adaptive: Annotated[
        bool, typer.Option("--adaptive/--no-adaptive", help="Whether NICs can resend adaptively.")
    ] = True,
    driver: Annotated[
        bool,
        typer.Option("--driver/--no-driver", help="Whether `myriad train` looks after links."),
    ] = True,
    patience: Annotated[
        float | None,
        typer.Option(help="resilience.patience of the job: it waits 3 s x that for a link; off: the JOB's."),
    ] = None,
    restart: Annotated[
        float | None,
        typer.Option(help="Seconds from an error until the job is where it was; off: as --weeks assumes."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg|png", help="Draw aborts and waits by down time."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what links that go down and up again do to a job, and which timers to set.

    A flap is survived if a queue pair resends after the link is up and before its retries are used up; all
    ranks wait until then. Long timeouts survive longer flaps, and notice a peer that is gone later.

    Nothing is drawn and nothing is run: probabilities have closed forms (`network/retransmission.py`).
    """
    from myriad.cli.network_flap_show import as_json_object, show
    from myriad.network.retransmission import Timers

    if out is not None:
        check_picture("--out", out)
    timers = Timers(18, retries, adaptive, longer=_two(longer))
    timeouts = _timeouts(timeout)
    with count_bar("predicting an iteration") as progress:
        found_cluster, seconds, own_patience = _read(job, cluster)
        habits = habits_of(
            found_cluster,
            down,
            Rates(flaps, dead, links, queue_pairs),
            Care(driver, own_patience if patience is None else patience, restart),
        )
        progress("comparing timeouts", 0, 0)
        found = answer(habits, timers, timeouts)
    if out is not None:
        from myriad.cli.network_flap_chart import draw

        write_picture("--out", out, draw([one.timers for one in found.shown], habits))
    if as_json:
        print_json(as_json_object(found, found_cluster.name, seconds, out))
    else:
        show(found, found_cluster.name, seconds, out)


@dataclass(frozen=True)
class Rates:
    """Of links."""

    flaps_per_month: float = _FLAPS_PER_MONTH
    dead_per_month: float = _DEAD_PER_MONTH
    num_links: int | None = None
    num_queue_pairs: int = _QUEUE_PAIRS


@dataclass(frozen=True)
class Care:
    """Of the job."""

    driver: bool
    patience: float
    restart_seconds: float | None


def habits_of(cluster: "Cluster", down: str, rates: Rates, care: Care) -> "Habits":
    """Raises `BadInputError`."""
    from myriad.network.flaps import DownTimes, Habits
    from myriad.resilience.decide.health import TOLERATED_SECONDS
    from myriad.resilience.weeks.times import load_times

    for name, value, least, most in (
        ("--flaps", rates.flaps_per_month, 0, 1_000_000),
        ("--dead", rates.dead_per_month, 0, 1_000_000),
        ("--patience", care.patience, 0.001, 1_000_000),
        ("--restart", care.restart_seconds or 0.0, 0, 10_000_000),
    ):
        if not least <= value <= most:
            raise BadInputError(name, value, f"{least:g} to {most:,}")
    if cluster.nodes == 1 and rates.num_links is None:
        allowed = "more than one node, or --links: inside a node no cable goes down"
        raise BadInputError(f"{cluster.name}: nodes", 1, allowed)
    restart = load_times().restart_seconds if care.restart_seconds is None else care.restart_seconds
    return Habits(
        down=DownTimes.parse(down),
        num_links=rates.num_links or cluster.nodes * cluster.ports_per_node,
        flaps_per_month=rates.flaps_per_month,
        dead_per_month=rates.dead_per_month,
        num_queue_pairs=rates.num_queue_pairs,
        restart_seconds=restart,
        driver_seconds=TOLERATED_SECONDS * care.patience if care.driver else inf,
    )


def answer(habits: "Habits", like: "Timers", timeouts: Sequence[int]) -> "Answer":
    """The best timers, and some others."""
    from dataclasses import replace

    from myriad.cli.network_flap_show import Answer
    from myriad.network.flaps import advise, fate

    plain = replace(like, adaptive=False)
    best_plain = advise(plain, habits)
    best = min(best_plain, advise(like, habits), key=lambda one: one.hours_per_month)
    rows = {fate(replace(one, timeout=number), habits) for number in timeouts for one in (plain, like)}
    shown = sorted({*rows, best, best_plain}, key=lambda one: (one.timers.timeout, one.timers.adaptive))
    return Answer(habits, best, best_plain, tuple(shown), _patient(habits, like, best))


def _patient(habits: "Habits", like: "Timers", best: "Fate") -> "Fate | None":
    from dataclasses import replace

    from myriad.network.flaps import advise, fate

    timers = advise(like, replace(habits, driver_seconds=inf)).timers
    waiting = fate(timers, replace(habits, driver_seconds=timers.patience_seconds))
    better = waiting.hours_per_month < best.hours_per_month * _CLEARLY
    return waiting if better and timers.patience_seconds > habits.driver_seconds else None


def _read(job: str | None, name: str) -> "tuple[Cluster, float | None, float]":
    """The cluster, seconds of an iteration of the job and its patience."""
    from myriad.recipes.cluster import load_cluster

    cluster = load_cluster(name)
    if job is None:
        return cluster, None, 1.0
    from myriad.cli.forecast import predict_step

    loaded, seconds = predict_step(job, (), cluster)
    return cluster, seconds, loaded.resilience.patience


def _two(text: str) -> tuple[float, float]:
    try:
        least, most = (float(one) for one in text.split(","))
    except ValueError:
        least, most = 0.0, 0.0
    if not 0.1 <= least <= most <= 100:
        raise BadInputError("--longer", text, "two numbers such as 1,4: at least and at most, 0.1 to 100")
    return least, most


def _timeouts(text: str) -> list[int]:
    from myriad.network.retransmission import MOST_TIMEOUT

    try:
        numbers = [int(one) for one in text.split(",")]
    except ValueError:
        numbers = [0]
    if not all(1 <= number <= MOST_TIMEOUT for number in numbers):
        raise BadInputError("--timeout", text, f"numbers from 1 to {MOST_TIMEOUT} such as 14,18,20")
    return numbers
