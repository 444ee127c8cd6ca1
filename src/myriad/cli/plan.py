"""``myriad plan``: the best layouts of a job on a cluster, why, and what would help; before it is rented."""

import gc
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from myriad.cli.bars import count_bar
from myriad.cli.files import check_picture, write_picture
from myriad.cli.json_output import print_json
from myriad.cli.overrides import OverrideCommand
from myriad.errors import BadInputError

if TYPE_CHECKING:
    from rich.console import Console

    from myriad.cli.plan_question import Asked
    from myriad.planner.fabric_outlook import OnFabric
    from myriad.planner.rescore import Simulations
    from myriad.planner.space import Problem

__all__ = ["plan", "register"]


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command("plan", cls=OverrideCommand, options_metavar="[OPTIONS] [--KEY VALUE]...")(plan)


def plan(
    context: typer.Context,
    job: Annotated[
        str | None, typer.Argument(metavar="JOB", help="A job file, or a recipe's name.", show_default=False)
    ] = None,
    cluster: Annotated[
        str, typer.Option(metavar="CLUSTER", help="A cluster file, a recipe's name, or this-machine.")
    ] = "laptop",
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Measure this machine first, for some seconds: --cluster this-machine."
        ),
    ] = False,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="N|A..B",
            help="Number of accelerators: the cluster with more or fewer of its nodes. A range: a curve.",
        ),
    ] = None,
    objective: Annotated[
        Literal["time", "cost", "memory"],
        typer.Option(help="What to keep small: time; cost, with a range of --gpus; memory."),
    ] = "time",
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="Change the cluster: links.ib=200Gbps, nodes=64; again for more."
        ),
    ] = None,
    days: Annotated[
        float | None, typer.Option(metavar="DAYS", help="The fewest accelerators that are done in time.")
    ] = None,
    straggler: Annotated[
        list[str] | None,
        typer.Option(
            metavar="node=N:1.1x", help="A node known to be slower: it is placed where it hurts least."
        ),
    ] = None,
    fabric: Annotated[
        bool,
        typer.Option(
            "--fabric",
            help="Simulate the cluster's switches, too (p50 and p95 over draws of hashes); place by that.",
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.toml", help="Write the best plan: `myriad train` takes it.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.svg|png", help="Draw time against memory of what none beats.")
    ] = None,
    top: Annotated[int, typer.Option(metavar="K", min=1, help="Lines of the table.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Find the best layouts for a job on a cluster, and say why they are the best.

    All legal layouts are judged by a closed form, the first hundred by simulating the program that would run.

    Fits: probability of not running out of memory. MFU: model FLOPs of the peak.

    Exit code: 0 done, 2 bad input (also: nothing fits).
    """
    from rich.console import Console

    from myriad.cli.plan_question import Asked, Wanted

    console = None if as_json else Console()
    _check_files(out, picture)
    if measure:
        cluster = _this_machine(context, cluster)
    if job is None:
        unread: dict[str, object] = {
            "--gpus": gpus,
            "--what-if": what_if,
            "--days": days,
            "--straggler": straggler,
        }
        unread |= {"--picture": picture, "--fabric": fabric}
        _measure_alone(context, out, unread, measure=measure, as_json=as_json)
        return
    wanted = Wanted.read(context, job, cluster, gpus, what_if, straggler)
    if out is not None:
        from myriad.cli.plan_job import check_plan_file

        check_plan_file(out, wanted.job)
    if days is not None or wanted.is_range:
        of_one = {"--out": out, "--picture": picture, "--straggler": straggler, "--fabric": fabric}
        _check_many(days, of_one)
    asked = Asked.of(wanted, measure=measure)
    with _garbage_kept(), _default_told(context, cluster):
        if days is not None:
            answer = _fewest(asked, days, console)
        elif len(asked.sizes) > 1:
            answer = _curve(asked, objective, console)
        else:
            answer = _best(asked, objective, top, (out, picture), console, fabric=fabric)
    if as_json:
        print_json(answer)


def _check_files(out: Path | None, picture: Path | None) -> None:
    if out is not None and out.suffix != ".toml":
        raise BadInputError("--out", str(out), "a file name that ends in .toml")
    if picture is not None:
        check_picture("--picture", picture)


def _check_many(days: float | None, of_one: Mapping[str, object]) -> None:
    """Of several numbers of accelerators; ``of_one``: options that are of one."""
    if days is not None and not 0 < days < math.inf:
        raise BadInputError("--days", days, "more than 0")
    for option, given in of_one.items():
        if given:
            told_of = "of one number of accelerators: without --days, and --gpus is no range"
            raise BadInputError(option, str(given), told_of)


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """A plan makes millions of small objects and hardly a cycle; to look for some is a fifth of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _default_told(context: typer.Context, cluster: str) -> Iterator[None]:
    """Who names no cluster may not know which one nothing fits on."""
    try:
        yield
    except BadInputError as error:
        source = context.get_parameter_source("cluster")
        if error.key != "accelerators" or source is None or source.name != "DEFAULT":
            raise
        allowed = f"{error.allowed}; --cluster was not given, and is {cluster}"
        raise BadInputError(error.key, error.value, allowed) from None


def _this_machine(context: typer.Context, cluster: str) -> str:
    """What --measure plans for."""
    from myriad.train.cluster_file import CLUSTER_NAME

    given = context.get_parameter_source("cluster")
    if cluster != CLUSTER_NAME and given is not None and given.name == "COMMANDLINE":
        raise BadInputError("--cluster", cluster, f"{CLUSTER_NAME}, or without --measure")
    return CLUSTER_NAME


def _measure_alone(
    context: typer.Context, out: Path | None, unread: Mapping[str, object], *, measure: bool, as_json: bool
) -> None:
    from myriad.cli.measure import measure_to_file, tell_measured

    if not measure:
        raise BadInputError("JOB", None, "needed: a job file, or a recipe's name; or --measure alone")
    keys = [f"--{override.partition('=')[0]}" for override in OverrideCommand.of(context)]
    for option in [*(option for option, given in unread.items() if given), *keys]:
        raise BadInputError("JOB", None, f"needed: {option} is of a plan; --measure alone only measures")
    measured = tell_measured(*measure_to_file(out))
    typer.echo(json.dumps({"out": measured.splitlines()[-1]}) if as_json else measured)


def _best(
    asked: "Asked",
    objective: Literal["time", "cost", "memory"],
    top: int,
    files: tuple[Path | None, Path | None],
    console: "Console | None",
    *,
    fabric: bool,
) -> dict[str, Any]:
    from myriad.cli.plan_answer import tell
    from myriad.cli.plan_job import job_of, problem_of, write_plan
    from myriad.planner.questions import answer
    from myriad.planner.rescore import Simulations

    simulations, problem = Simulations(), problem_of(asked.job, asked.cluster)
    on_fabric = _fabric_of(problem, simulations) if fabric else None
    with count_bar("searching") as progress:
        found = answer(problem, objective=objective, simulations=simulations, progress=progress)
        before = None
        if asked.plain is not None:
            before = answer(problem.with_cluster(asked.plain), simulations=simulations, progress=progress)
        progress("explaining", 0, 0)
        told = tell(
            asked.job,
            found,
            before=before,
            written=asked.written,
            simulations=simulations,
            slower=asked.slower,
            top=top,
            on_fabric=on_fabric,
        )
    out, picture = files
    best = found.plans[0]
    job_of(asked.job, best.candidate)
    if out is not None:
        write_plan(out, asked.job, best, problem, told.placement)
    if picture is not None:
        write_picture("--picture", picture, told.picture())
    if console is not None:
        told.show(console, [str(path) for path in files if path is not None])
    return told.as_json()


def _fabric_of(problem: "Problem", simulations: "Simulations") -> "OnFabric":
    from myriad.planner.fabric_outlook import OnFabric

    return OnFabric(problem.cluster, simulations.seconds)


def _curve(asked: "Asked", objective: str, console: "Console | None") -> dict[str, Any]:
    from myriad.cli.plan_job import problem_of
    from myriad.cli.plan_show import figures, show_curve
    from myriad.planner.curve_points import curve_points
    from myriad.planner.questions import answer, best_of, sizes_between
    from myriad.planner.rescore import Simulations
    from myriad.recipes.cluster import scale_cluster

    points = curve_points(asked.job.model)
    also = [point.accelerators for point in points]
    sizes = sizes_between(asked.sizes[0], asked.sizes[-1], asked.cluster.accelerators_per_node, also)
    simulations, rows = Simulations(), []
    with count_bar("searching") as progress:
        for number, size in enumerate(sizes):
            progress(f"{size} accelerators", number, len(sizes))
            problem = problem_of(asked.job, scale_cluster(asked.cluster, size))
            rows.append((problem, best_of(problem, simulations)))
    steps = asked.job.train.steps
    if all(found is None for _, found in rows):
        try:
            answer(rows[-1][0], count=1, simulations=simulations)
        except BadInputError as error:
            reason = f"also on {sizes[-1]}: {error.allowed}"
            raise BadInputError("--gpus", f"{sizes[0]}..{sizes[-1]}", reason) from None
    if console is not None:
        show_curve(console, rows, points, steps)
    told = [
        {"accelerators": p.cluster.world, **(figures(p, f, steps).as_json() if f else {})} for p, f in rows
    ]
    cheapest = min((row for row in told if row.get("dollars")), key=lambda row: row["dollars"], default=None)
    if console is not None and objective == "cost" and cheapest is not None:
        console.print(f"cheapest: {cheapest['accelerators']} accelerators")
    published = [vars(point) for point in points if point.accelerators in sizes]
    return {"curve": told, "published": published, "cheapest": cheapest}


def _fewest(asked: "Asked", days: float, console: "Console | None") -> dict[str, Any]:
    from myriad.cli.plan_job import problem_of
    from myriad.cli.plan_show import figures, show_ranking
    from myriad.planner.questions import fewest_accelerators
    from myriad.planner.rescore import Simulations
    from myriad.recipes.cluster import scale_cluster

    steps, simulations = asked.job.train.steps, Simulations()
    with count_bar("searching") as progress:
        try:
            problem, found = fewest_accelerators(
                lambda size: problem_of(asked.job, scale_cluster(asked.cluster, size)),
                asked.cluster,
                days * 86400 / steps,
                simulations,
                progress,
            )
        except BadInputError as error:
            raise BadInputError("--days", days, error.allowed) from None
    if console is not None:
        world = problem.cluster.world
        title = f"{world:,} accelerator{'s' * (world > 1)}: {steps:,} steps within {days:g} days"
        show_ranking(console, problem, [("1", found)], steps, title=title)
    return {"days": days, **figures(problem, found, steps).as_json()}
