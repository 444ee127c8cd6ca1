"""``myriad plan``: the best layouts of a job on a cluster, the reasons, and possible improvements.

``--out FILE.toml`` writes the best plan as a job file, ``--framework X --out FILE.sh`` as a script that
starts it there. Both overwrite only an older plan of the same job.
"""

import gc
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from myriad.cli.job_key_options import OverrideCommand
from myriad.cli.json_output import print_json
from myriad.cli.output_files import check_picture, read_earlier, write_output, write_picture
from myriad.cli.plan.calibrate import calibrate_cluster
from myriad.cli.progress_bar import count_bar
from myriad.errors import BadInputError

if TYPE_CHECKING:
    from rich.console import Console

    from myriad.forecasts.plan_answer import ExplainedPlan
    from myriad.forecasts.plan_request import PlanProblem, PlanRequest

__all__ = ["plan", "register"]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("plan", cls=OverrideCommand, options_metavar="[OPTIONS] [--KEY VALUE]...")(plan)


def plan(
    context: typer.Context,
    job: Annotated[
        str | None, typer.Argument(metavar="JOB", help="Job file or recipe.", show_default=False)
    ] = None,
    cluster: Annotated[
        str,
        typer.Option(
            metavar="CLUSTER",
            help="Cluster file, recipe, this-machine, or a number of accelerators in their usual servers: "
            "256xb200.",
        ),
    ] = "laptop",
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure this machine first (seconds to a minute); implies --cluster this-machine.",
        ),
    ] = False,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="TABLE.csv",
            help="Fit rates of --cluster to iterations that ran on it, in the general form of "
            "myriad validate, and write --out as a cluster file; without JOB.",
        ),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="N|A..B",
            help="Number of accelerators; a range A..B plans a curve. Default: all of the cluster.",
        ),
    ] = None,
    objective: Annotated[
        Literal["time", "cost", "memory"],
        typer.Option(help="What to minimise; cost needs a range of --gpus."),
    ] = "time",
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="Change the cluster, e.g. links.ib=200Gbps or nodes=64; repeatable."
        ),
    ] = None,
    days: Annotated[
        float | None,
        typer.Option(
            metavar="DAYS", help="Find the fewest accelerators that finish the job's steps in this many days."
        ),
    ] = None,
    straggler: Annotated[
        list[str] | None,
        typer.Option(
            metavar="node=N:1.1x",
            help="A node that is 1.1x slower than the others; the plan places it where it costs least.",
        ),
    ] = None,
    fabric: Annotated[
        bool,
        typer.Option(
            "--fabric",
            help="Simulate the switches as well (p50 and p95 over hash seeds), and order the nodes by that.",
        ),
    ] = False,
    framework: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Plan for another framework, e.g. megatron-core, torch-fsdp or a TOML file: its overlap, "
            "kernels, ZeRO and schedules. Default: myriad.",
        ),
    ] = None,
    expert_load_from: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="Count the loads of experts that this run measured (expert_loads in its metrics.jsonl): for "
            "each layout the mean load of the busiest rank, instead of layout.expert_load.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.toml|sh",
            help="Write the best plan as a job file for `myriad train`; with --framework, as a shell script "
            "that starts it there.",
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.svg|png",
            help="Draw time against memory of the layouts that no other beats in both.",
        ),
    ] = None,
    top: Annotated[int, typer.Option(metavar="K", min=1, help="Number of layouts in the table.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Find the fastest layouts for a job on a cluster, and explain them.

    Scores every legal layout with a closed-form model, then simulates the program of the best hundred.

    fits: probability that the layout does not run out of memory. MFU: model FLOPs as a share of the peak.

    Exit code: 0 done, 2 bad input, or no layout fits.
    """
    from rich.console import Console

    from myriad.forecasts.plan_request import PlanProblem, PlanRequest

    console = None if as_json else Console()
    _check_files(out, picture, is_script=job is not None and framework not in (None, "myriad"))
    if measure:
        cluster = _this_machine(context, cluster)
    of_plan: dict[str, object] = {
        "--gpus": gpus,
        "--objective": objective != "time",
        "--what-if": what_if,
        "--days": days,
        "--straggler": straggler,
        "--picture": picture,
        "--fabric": fabric,
        "--expert-load-from": expert_load_from,
        "--top": top != 10,
    }
    if calibrate is not None:
        if option := _first_given(context, {"JOB": job, "--measure": measure, **of_plan}):
            raise BadInputError("--calibrate", str(calibrate), f"without {option}: it only writes --out")
        calibrate_cluster(calibrate, _given_cluster(context, cluster), framework, out, as_json=as_json)
        return
    if job is None:
        if not measure:
            alone = "or give --measure or --calibrate alone"
            raise BadInputError("JOB", None, f"needed: a job file or a recipe; {alone}")
        if option := _first_given(context, {**of_plan, "--framework": framework}):
            allowed = f"needed: {option} belongs to a plan; --measure alone only measures"
            raise BadInputError("JOB", None, allowed)
        _measure_alone(out, as_json=as_json)
        return
    keys = OverrideCommand.of(context)
    request = PlanRequest.read(
        job, keys, cluster, gpus, what_if, straggler, framework, expert_load_from=expert_load_from
    )
    if out is not None:
        _check_plan_file(out, request)
    if days is not None or request.is_range:
        of_one = {"--out": out, "--picture": picture, "--straggler": straggler, "--fabric": fabric}
        _check_many(days, of_one)
    _check_objective(objective, days, is_range=request.is_range)
    question = PlanProblem.of(request, _cluster_file(request.cluster, measure=measure))
    with _without_garbage_collection(), _name_default_cluster(context, cluster):
        if days is not None:
            answer = _fewest(question, days, console)
        elif len(question.sizes) > 1:
            answer = _curve(question, objective, console)
        else:
            answer = _best(question, objective, top, (out, picture), console, fabric=fabric)
    if as_json:
        print_json(answer)


def _check_files(out: Path | None, picture: Path | None, *, is_script: bool) -> None:
    suffix = ".sh" if is_script else ".toml"
    if out is not None and out.suffix != suffix:
        why = ": a script for the framework" if is_script else ""
        raise BadInputError("--out", str(out), f"a file name that ends in {suffix}{why}")
    if picture is not None:
        check_picture("--picture", picture)


def _check_many(days: float | None, of_one: Mapping[str, object]) -> None:
    """Refuse options that need one number of accelerators; ``of_one``: those options."""
    if days is not None and not 0 < days < math.inf:
        raise BadInputError("--days", days, "a finite number above 0")
    for option, given in of_one.items():
        if given:
            reason = "needs one number of accelerators: leave out --days and a range of --gpus"
            raise BadInputError(option, str(given), reason)


def _check_objective(objective: str, days: float | None, *, is_range: bool) -> None:
    """Refuse an objective that would not change the answer."""
    if objective != "time" and days is not None:
        raise BadInputError("--objective", objective, "time with --days, which finds the fewest accelerators")
    if objective == "cost" and not is_range:
        allowed = "time, or with a range of --gpus: on one number of accelerators the fastest costs the least"
        raise BadInputError("--objective", objective, allowed)
    if objective == "memory" and is_range:
        raise BadInputError("--objective", objective, "time or cost with a range of --gpus")


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Turn the garbage collector off. A plan creates millions of objects and few cycles, and collection takes
    a fifth of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _name_default_cluster(context: typer.Context, cluster: str) -> Iterator[None]:
    """Name the default cluster in an error about too few accelerators, because the user did not name it."""
    try:
        yield
    except BadInputError as error:
        source = context.get_parameter_source("cluster")
        if error.key != "accelerators" or source is None or source.name != "DEFAULT":
            raise
        allowed = f"{error.allowed}; --cluster was not given, and is {cluster}"
        raise BadInputError(error.key, error.value, allowed) from None


def _this_machine(context: typer.Context, cluster: str) -> str:
    """Return the name of this machine's cluster; refuse --measure with another cluster."""
    from myriad.train.calibration.cluster_file import CLUSTER_NAME

    given = context.get_parameter_source("cluster")
    if cluster != CLUSTER_NAME and given is not None and given.name == "COMMANDLINE":
        raise BadInputError("--cluster", cluster, f"{CLUSTER_NAME}, or without --measure")
    return CLUSTER_NAME


def _given_cluster(context: typer.Context, cluster: str) -> str:
    """Return the path or name of the cluster's file; refuse the default."""
    from myriad.cli.measured_cluster import cluster_path

    given = context.get_parameter_source("cluster")
    if given is None or given.name != "COMMANDLINE":
        raise BadInputError("--cluster", None, "needed with --calibrate: the cluster on which the rows ran")
    return cluster_path(cluster)


def _cluster_file(cluster: str, *, measure: bool) -> str:
    """Return the path or name of the cluster's file; measure this machine first where that is needed."""
    from myriad.cli.measured_cluster import cluster_path, measure_to_file

    return str(measure_to_file()[1]) if measure else cluster_path(cluster)


def _first_given(context: typer.Context, options: Mapping[str, object]) -> str | None:
    """Return the first of some options, or of the job's keys, that is given; ``None``: none is."""
    keys = (f"--{override.partition('=')[0]}" for override in OverrideCommand.of(context))
    return next((option for option, given in options.items() if given), next(keys, None))


def _measure_alone(out: Path | None, *, as_json: bool) -> None:
    from myriad.cli.measured_cluster import format_measured, measure_to_file

    measured = format_measured(*measure_to_file(out))
    typer.echo(json.dumps({"out": measured.splitlines()[-1]}) if as_json else measured)


def _best(
    question: "PlanProblem",
    objective: Literal["time", "cost", "memory"],
    top: int,
    files: tuple[Path | None, Path | None],
    console: "Console | None",
    *,
    fabric: bool,
) -> dict[str, Any]:
    """Plan on one number of accelerators; write ``files`` (plan, picture); print."""
    from myriad.cli.plan.plan_tables import show_plan
    from myriad.forecasts.plan_answer import plan_and_explain
    from myriad.reports.charts.pareto_chart import plan_picture

    with count_bar("searching") as progress:
        found = plan_and_explain(question, objective, top=top, on_switches=fabric, progress=progress)
    out, picture = files
    if out is not None:
        write_output("--out", out, _plan_text(question, found))
    if picture is not None:
        write_picture("--picture", picture, plan_picture(found))
    if console is not None:
        show_plan(console, found, [str(path) for path in files if path is not None])
    return found.as_json()


def _curve(question: "PlanProblem", objective: str, console: "Console | None") -> dict[str, Any]:
    """Plan on each number of accelerators of a range; print."""
    from myriad.cli.plan.plan_tables import show_curve
    from myriad.forecasts.plan_curve import plan_curve

    with count_bar("searching") as progress:
        curve = plan_curve(question, progress)
    if console is not None:
        show_curve(console, curve)
        if objective == "cost" and (cheapest := curve.cheapest) is not None:
            console.print(f"cheapest: {cheapest['accelerators']} accelerators")
    return curve.as_json()


def _fewest(question: "PlanProblem", days: float, console: "Console | None") -> dict[str, Any]:
    """Find the fewest accelerators that finish within ``days``; print."""
    from myriad.cli.plan.plan_tables import show_ranking, show_warnings
    from myriad.forecasts.plan_answer import plan_warnings
    from myriad.forecasts.plan_curve import fewest_for_days
    from myriad.forecasts.plan_figures import plan_figures
    from myriad.forecasts.planned_job import planned_steps
    from myriad.planner import SimulationCache

    steps = planned_steps(question.job)
    with count_bar("searching") as progress:
        problem, found = fewest_for_days(question, days, progress)
    warnings = plan_warnings(problem, found, SimulationCache())
    if console is not None:
        world = problem.cluster.world
        title = f"{world:,} accelerator{'s' * (world > 1)}: {steps:,} steps within {days:g} days"
        show_warnings(console, warnings)
        show_ranking(console, problem, [("1", found)], steps, title=title)
    figures = plan_figures(problem, found, steps).as_json()
    return {"days": days, **figures, "warnings": [one.as_json() for one in warnings]}


def _plan_text(question: "PlanProblem", found: "ExplainedPlan") -> str:
    """Return the text of a plan's file: a job, or a script for another framework. Raises `BadInputError`."""
    from myriad.forecasts.launch.launch_script import launch_text
    from myriad.forecasts.planned_job import job_of, plan_head, plan_text

    job, best, problem = question.job, found.best, found.problem
    if question.framework is None:
        return plan_text(job, best, problem, found.placement)
    head = plan_head(job, best, problem)
    return launch_text(job_of(job, best.candidate), question.framework, problem.cluster, head)


def _check_plan_file(path: Path, request: "PlanRequest") -> None:
    """Raise `BadInputError` for a file that is not a plan, or is another job's plan, and for a model that the
    framework cannot be given."""
    from myriad.forecasts.launch.launch_script import SCRIPT_HEAD, check_launch
    from myriad.forecasts.planned_job import PLAN_HEAD
    from myriad.job import load_job

    job = request.job
    if request.framework is not None:
        check_launch(job, request.framework)
    is_script = request.framework is not None
    starts = f"{SCRIPT_HEAD}{PLAN_HEAD}" if is_script else PLAN_HEAD
    text = read_earlier("--out", path, starts, "a plan that `myriad plan` wrote")
    if not text:
        return
    if is_script:
        if not text.startswith(f"{starts} of the job {job.name!r} "):
            raise BadInputError("--out", str(path), "it is the plan of another job: give another name")
        return
    other = load_job(str(path))
    if (other.name, other.model) != (job.name, job.model):
        allowed = f"it is the plan of another job ({other.name}, not {job.name}): give another name"
        raise BadInputError("--out", str(path), allowed)
