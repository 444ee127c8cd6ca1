"""``myriad parity``: train the same job in several layouts and report where they differ.

Parity sets the job keys that a comparison needs (`_fixed_keys`). A key given on the command line is used, or
refused by name where parity needs another value. Changes to keys of the job file are printed.
"""

import json
import re
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from myriad.cli.job_key_options import OverrideCommand
from myriad.cli.shared_options import Oversubscribes
from myriad.errors import BadInputError
from myriad.system.spin_control import spinning_controlled
from myriad.units import format_ranges

if TYPE_CHECKING:
    from rich.console import Console

    from myriad.job import Job
    from myriad.run import Run
    from myriad.train.checkpoint_tools.compare_runs import RunComparison, Tolerance

__all__ = ["parity", "register"]

_PRECISIONS = ("float32", "bfloat16", "float16")
_STEADY_EPSILON = 1e-6
_MOST_STEPS = 20
_TOLERANCES = {"bfloat16": (1e-3, 3e-2), "float16": (5e-4, 5e-3)}
"""Tolerances of losses and parameters, for up to `_MOST_STEPS` steps."""


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("parity", cls=OverrideCommand, options_metavar="--layout L --layout L [OPTIONS]")(parity)


def parity(
    context: typer.Context,
    job: Annotated[str, typer.Argument(metavar="JOB", help="Job file or recipe.")],
    layout: Annotated[
        list[str] | None,
        typer.Option(
            metavar="K=V,K=V",
            help='A layout such as "tp=2,pp=2,zero=2"; give at least two. The first is the reference.',
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Number of steps to train.", min=1)] = 20,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Largest relative difference that counts as equal. Default: 1e-5 in float32; in bfloat16 "
            "1e-3 of losses and 3e-2 of parameters, in float16 5e-4 and 5e-3, for up to 20 steps.",
            min=0,
        ),
    ] = None,
    keep_every: Annotated[
        int,
        typer.Option(
            help="Steps between comparisons of parameters; the last step is always compared.", min=1
        ),
    ] = 1,
    replay_routing: Annotated[
        bool,
        typer.Option(
            help="Give every token the experts that it got in the first layout, for models with experts: "
            "rounding may choose others where scores are equal."
        ),
    ] = False,
    folder: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Keep the runs in this folder. Default: remove them afterwards."),
    ] = None,
    oversubscribe: Oversubscribes = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train a job in two or more layouts and compare all losses and parameters.

    Computes in float32 unless --train.precision says otherwise, with an optimizer.epsilon of at least 1e-6:
    with a smaller one, Adam moves elements whose gradient is only rounding noise by the full learning rate,
    and layouts differ.

    Prints the largest relative difference, or the first step and the first tensor that differ. For a model
    with experts, prints also how many of the chosen experts differ.

    Exit code: 0 the layouts agree, 1 they differ or a step could not be compared, 2 bad input.
    """
    from rich.console import Console

    from myriad.launchers.local import check_local

    layouts = layout or []
    if len(layouts) < 2:
        raise BadInputError("--layout", len(layouts), "give at least two")
    overrides = OverrideCommand.of(context)
    jobs = [_job(job, text, overrides, steps, keep_every) for text in layouts]
    if replay_routing and jobs[0].model.experts is None:
        raise BadInputError("--replay-routing", "true", "needs model.experts")
    precision = jobs[0].train.precision
    allowed = _tolerance(precision, steps, tolerance)
    for resolved in jobs:
        check_local(resolved, oversubscribe=oversubscribe)
    console = None if as_json else Console()
    if console is not None:
        console.print(f"compared in {precision}: {allowed} (relative)")
        console.print(*_changes(job, overrides, steps, keep_every), sep="\n", end="")
    with tempfile.TemporaryDirectory() as temporary:
        where = Path(folder or temporary).absolute()
        runs: list[Run] = []
        for number, (resolved, text) in enumerate(zip(jobs, layouts, strict=True)):
            replayed = where / "layout-0" / "routing" if replay_routing and number else None
            runs.append(_train(resolved, where / f"layout-{number}", text, console, replayed))
        found = _compare(runs, allowed)
    if console is None:
        typer.echo(json.dumps({"precision": precision, **_as_json(layouts, found, allowed)}))
    else:
        _show(console, layouts, found, allowed)
    if not all(comparison.agrees for comparison in found):
        raise typer.Exit(1)


def _job(name: str, layout: str, overrides: list[str], steps: int, keep_every: int) -> "Job":
    from myriad.job import load_job

    parts = re.split(r",(?![^\[]*\])", layout)  # Split at commas outside of lists.
    keys = [part.strip() for part in parts if part.strip()]
    fixed = _fixed_keys(load_job(name, overrides), overrides, steps, keep_every)
    own = {key: value for key, (value, _) in fixed.items()}
    for override in overrides:
        key, _, value = override.partition("=")
        if key in own and value != own[key]:
            raise BadInputError(key, value, f"{own[key]} in a comparison: {fixed[key][1]}")
    set_here = [f"{key}={value}" for key, value in own.items()]
    return load_job(name, [*overrides, *set_here, *(f"layout.{key}" for key in keys)])


def _fixed_keys(
    given: "Job", overrides: list[str], steps: int, keep_every: int
) -> dict[str, tuple[str, str]]:
    """Return the keys that a comparison needs, as ``key: (value, why)``."""
    asked = dict(override.partition("=")[::2] for override in overrides).get("train.precision")
    precision = asked if asked in _PRECISIONS else "float32"
    here, kept = "runs on this machine", "parameters of each compared step are stored before the next step"
    routing = {"telemetry.routing": ("true", "chosen experts are compared")} if given.model.experts else {}
    return routing | {
        "train.precision": (precision, f"one of {', '.join(_PRECISIONS)}"),
        "train.threads": ("1", "sums of several threads differ in their order"),
        "train.steps": (f"{steps}", "--steps sets them"),
        "train.sample_prompt": ("off", "only losses and parameters are compared"),
        "train.validate_every": ("0", "only losses and parameters are compared"),
        "data.validation_batches": ("0", "only losses and parameters are compared"),
        "resilience.engine": ("local", here),
        "resilience.nodes": ("1", here),
        "resilience.spares": ("0", here),
        "checkpoint.every": (f"{keep_every}", "--keep-every sets it"),
        "checkpoint.minutes": ("off", "--keep-every decides"),
        "checkpoint.keep": (f"{steps}", kept),
        "checkpoint.keep_days": ("off", kept),
        "checkpoint.url": ("off", "runs are stored in --folder"),
        "overlap.checkpoint": ("false", kept),
        "optimizer.epsilon": (
            f"{max(given.optimizer.epsilon, _STEADY_EPSILON)}",
            f"at least {_STEADY_EPSILON:g}, below which Adam moves noise by the whole learning rate",
        ),
        "optimizer.warmup_steps": (
            f"{min(given.optimizer.warmup_steps, steps)}",
            f"at most --steps = {steps}",
        ),
    }


_CHANGES_LOSSES = ("train.precision", "optimizer.epsilon", "optimizer.warmup_steps")


def _changes(name: str, overrides: list[str], steps: int, keep_every: int) -> list[str]:
    """Return a line for each key of the job file that is changed and affects the losses."""
    from myriad.job import load_job

    given = load_job(name, overrides)
    lines = []
    for key in _CHANGES_LOSSES:
        section, _, field = key.partition(".")
        before, (after, why) = (
            getattr(getattr(given, section), field),
            _fixed_keys(given, overrides, steps, keep_every)[key],
        )
        if f"{before}" not in (after, "auto"):
            lines.append(f"{key} = {after} instead of the job's {before}: {why}\n")
    return lines


def _train(job: "Job", path: Path, layout: str, console: "Console | None", replayed: Path | None) -> "Run":
    """Train a layout; ``replayed``: the routing that it uses, if not its own."""
    from myriad.cli.train.train_screen import open_screen
    from myriad.launchers.local import run_local
    from myriad.run import Run

    if console is not None:
        console.print(f"[bold]{layout}[/bold]")
    run = Run(path)
    if run.exists:
        raise BadInputError("--folder", str(path.parent), "must not hold earlier runs")
    if replayed is not None:
        job = job.model_copy(update={"train": job.train.model_copy(update={"replay_routing": str(replayed)})})
    run.create_or_resume(job)
    # Each step writes one checkpoint.
    screen = open_screen(console, run, job.train.steps, quiet=("checkpoint",))
    try:
        ended = run_local(run, job.layout.world, threads=job.train.threads, observer=screen)
    finally:
        screen.close()
    if ended == "interrupted":
        raise KeyboardInterrupt
    return run


def _tolerance(precision: str, steps: int, given: float | None) -> "Tolerance":
    """Return the given tolerance, or that of layouts of `tiny` with a margin.

    In bfloat16 the rounding error is up to 4e-3 and layouts round in different places. After 20 steps of
    `tiny` losses differ by 6e-5 and one parameter by 1.2e-2, after 40 by 9e-2. In float16 the rounding error
    is up to 5e-4; after 20 steps losses differ by 5e-5 and one parameter by 1.2e-3."""
    from myriad.train.checkpoint_tools.compare_runs import Tolerance

    if given is not None:
        return Tolerance(given, given)
    if precision == "float32":
        return Tolerance(1e-5, 1e-5)
    if steps > _MOST_STEPS:
        allowed = f"at most {_MOST_STEPS} in {precision}, whose rounding grows with the steps; or --tolerance"
        raise BadInputError("--steps", steps, allowed)
    return Tolerance(*_TOLERANCES[precision])


def _compare(runs: list["Run"], tolerance: "Tolerance") -> list["RunComparison"]:
    from myriad.train.checkpoint_tools.compare_runs import compare_runs

    with spinning_controlled():
        return [compare_runs(runs[0], other, tolerance) for other in runs[1:]]


def _as_json(layouts: list[str], found: list["RunComparison"], tolerance: "Tolerance") -> dict[str, Any]:
    rows = [
        {"layout": text, "agrees": comparison.agrees, **asdict(comparison)}
        for text, comparison in zip(layouts[1:], found, strict=True)
    ]
    return {"reference": layouts[0], "tolerance": tolerance._asdict(), "comparisons": rows}


def _routing(found: "RunComparison") -> str:
    """Return a phrase with the chosen experts that differ; empty if none were compared."""
    if not found.num_choices:
        return ""
    return f"; {found.other_choices:,} of {found.num_choices:,} chosen experts differ"


def _show(
    console: "Console", layouts: list[str], found: list["RunComparison"], tolerance: "Tolerance"
) -> None:
    for text, comparison in zip(layouts[1:], found, strict=True):
        console.print(
            f"[bold]{layouts[0]}[/bold] and [bold]{text}[/bold]: "
            f"{_verdict(comparison, tolerance)}{_routing(comparison)}"
        )


def _verdict(found: "RunComparison", tolerance: "Tolerance") -> str:
    if found.missing and found.parted_step is None:
        steps = format_ranges(found.missing)
        return (
            f"[red]incomplete[/red]: nothing compared at step {steps} (not stored by both runs); the other "
            f"{found.num_kept} agree within {max(found.loss_difference, found.tensor_difference):.1e}"
        )
    if found.equal_bits:
        steps = f"losses of {found.num_steps} steps, parameters of {found.num_kept}"
        return f"[green]equal bits[/green]: {steps}"
    if found.agrees:
        return (
            f"[green]agree[/green]: losses of {found.num_steps} steps within {found.loss_difference:.1e}, "
            f"parameters of {found.num_kept} within {found.tensor_difference:.1e} ({found.worst_tensor})"
        )
    where = f" in {found.parted_tensor}" if found.parted_tensor else " in the loss"
    reference, other = found.losses[(found.parted_step or 1) - 1]
    return (
        f"[red]part in step {found.parted_step}[/red]{where}: beyond {tolerance} "
        f"(loss {reference:.6f} and {other:.6f}; largest difference of losses {found.loss_difference:.1e})"
    )
