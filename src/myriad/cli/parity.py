"""``myriad parity``: train the same job in several layouts and say where they part."""

import json
import re
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from myriad.cli.overrides import OverrideCommand
from myriad.errors import BadInputError

if TYPE_CHECKING:
    from rich.console import Console

    from myriad.job import Job
    from myriad.run import Run
    from myriad.train.compare import Comparison

__all__ = ["parity", "register"]


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command("parity", cls=OverrideCommand, options_metavar="--layout L --layout L [OPTIONS]")(parity)


def parity(
    context: typer.Context,
    job: Annotated[str, typer.Argument(metavar="JOB", help="A job file, or a recipe's name.")],
    layout: Annotated[
        list[str] | None,
        typer.Option(
            metavar="K=V,K=V",
            help='A layout, at least two of them: "tp=2,pp=2,zero=2". The first is the reference.',
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps to train.", min=1)] = 20,
    tolerance: Annotated[float, typer.Option(help="Largest relative difference that agrees.")] = 1e-5,
    keep_every: Annotated[
        int, typer.Option(help="Compare parameters every so many steps (and after the last).", min=1)
    ] = 1,
    folder: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Keep the runs here; left out: removed afterwards.")
    ] = None,
    oversubscribe: Annotated[
        bool, typer.Option("--oversubscribe", help="Allow more ranks than cores: they take turns.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train a job in two or more layouts and compare every loss and every parameter.

    In float32, and with an optimizer.epsilon of at least 1e-6: below it Adam moves elements whose gradient is
    only rounding noise by the whole learning rate, each layout its own way.

    Prints the largest relative difference, or the first step and the first tensor in which they part.

    Exit code: 0 they agree, 1 they part, 2 bad input.
    """
    from rich.console import Console

    from myriad.resilience.engines.local import check_local

    layouts = layout or []
    if len(layouts) < 2:
        raise BadInputError("--layout", len(layouts), "give at least two")
    overrides = OverrideCommand.of(context)
    jobs = [_job(job, text, overrides, steps, keep_every) for text in layouts]
    for resolved in jobs:
        check_local(resolved, oversubscribe=oversubscribe)
    console = None if as_json else Console()
    with tempfile.TemporaryDirectory() as temporary:
        runs = [
            _train(resolved, Path(folder or temporary) / f"layout-{number}", text, console)
            for number, (resolved, text) in enumerate(zip(jobs, layouts, strict=True))
        ]
        found = _compare(runs, tolerance)
    if console is None:
        typer.echo(json.dumps(_as_json(layouts, found, tolerance)))
    else:
        _show(console, layouts, found, tolerance)
    if not all(comparison.agrees for comparison in found):
        raise typer.Exit(1)


def _job(name: str, layout: str, overrides: list[str], steps: int, keep_every: int) -> "Job":
    from myriad.job import load_job

    parts = re.split(r",(?![^\[]*\])", layout)  # at commas that no list holds
    keys = [part.strip() for part in parts if part.strip()]
    fixed = ["train.precision=float32", "train.threads=1", f"train.steps={steps}", "train.sample_prompt=off"]
    fixed += ["resilience.engine=local", "resilience.nodes=1", "resilience.spares=0"]
    kept = [f"checkpoint.every={keep_every}", f"checkpoint.keep={steps}", "train.validate_every=0"]
    given = load_job(name, overrides).optimizer
    steady = [f"optimizer.epsilon={max(given.epsilon, 1e-6)}", "data.validation_batches=0"]
    shorter = [f"optimizer.warmup_steps={min(given.warmup_steps, steps)}"]
    return load_job(name, [*overrides, *fixed, *kept, *steady, *shorter, *(f"layout.{key}" for key in keys)])


def _train(job: "Job", path: Path, layout: str, console: "Console | None") -> "Run":
    from myriad.cli.screen import open_screen
    from myriad.resilience.engines.local import run_local
    from myriad.run import Run

    if console is not None:
        console.print(f"[bold]{layout}[/bold]")
    run = Run(path)
    if run.exists:
        raise BadInputError("--folder", str(path.parent), "must not hold earlier runs")
    run.create_or_resume(job)
    screen = open_screen(console, run, job.train.steps, quiet=("checkpoint",))  # there is one a step
    try:
        ended = run_local(run, job.layout.world, threads=job.train.threads, observer=screen)
    finally:
        screen.close()
    if ended == "interrupted":
        raise KeyboardInterrupt
    return run


def _compare(runs: list["Run"], tolerance: float) -> list["Comparison"]:
    from myriad.train.compare import compare_runs

    return [compare_runs(runs[0], other, tolerance) for other in runs[1:]]


def _as_json(layouts: list[str], found: list["Comparison"], tolerance: float) -> dict[str, Any]:
    rows = [
        {"layout": text, "agrees": comparison.agrees, **asdict(comparison)}
        for text, comparison in zip(layouts[1:], found, strict=True)
    ]
    return {"reference": layouts[0], "tolerance": tolerance, "comparisons": rows}


def _show(console: "Console", layouts: list[str], found: list["Comparison"], tolerance: float) -> None:
    for text, comparison in zip(layouts[1:], found, strict=True):
        console.print(f"[bold]{layouts[0]}[/bold] and [bold]{text}[/bold]: {_verdict(comparison, tolerance)}")


def _verdict(found: "Comparison", tolerance: float) -> str:
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
        f"[red]part in step {found.parted_step}[/red]{where}: beyond {tolerance:g} "
        f"(loss {reference:.6f} and {other:.6f}; largest difference of losses {found.loss_difference:.1e})"
    )
