"""``myriad faults``: break a real run on purpose, and grade how it is repaired."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from myriad.errors import BadInputError

if TYPE_CHECKING:
    from myriad.resilience.faults.grade import Grade, Report
    from myriad.resilience.faults.kinds import Aim
    from myriad.resilience.faults.scenario import Scenario

__all__ = ["register"]

_Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, for programs.")]


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    told = "Break a real run on purpose, and grade the recovery: run, list."
    verb = typer.Typer(no_args_is_help=True, help=told)
    verb.command("run")(_run)
    verb.command("list")(_list)
    app.add_typer(verb, name="faults")


def _run(
    scenarios: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCENARIO...", help="Scenario files, or names of ready ones (`myriad faults list`)."
        ),
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every ready scenario.")] = False,
    folder: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where the runs are made, and the undisturbed ones kept.")
    ] = Path("runs/faults"),
    oversubscribe: Annotated[
        bool, typer.Option("--oversubscribe", help="Allow more ranks than cores: they take turns.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Start a real run for each scenario, break it, and grade it: found after how long, who was blamed, when
    it trained again, steps lost, and whether the end is, bit for bit, that of the undisturbed run.

    The table is Markdown; seconds are those of this machine.

    Exit code: 0 all aims were met, 1 some were not, 2 bad input.
    """
    from myriad.recipes import recipe_names

    names = list(scenarios or [])
    if all_ == bool(names):
        raise BadInputError("SCENARIO", " ".join(names), "at least one, or --all")
    chosen = _checked(recipe_names("faults") if all_ else names, oversubscribe)
    reports = [_try(name, scenario, folder) for name, scenario in chosen]
    if as_json:
        told = [asdict(report) | {"met": report.met} for report in reports]
        typer.echo(json.dumps({"scenarios": told, "met": all(report.met for report in reports)}))
    else:
        _show(reports)
    if not all(report.met for report in reports):
        raise typer.Exit(1)


def _checked(names: list[str], oversubscribe: bool) -> "list[tuple[str, Scenario]]":
    """All of them and their data, before the first starts."""
    from myriad.resilience.engines.local import check_cores
    from myriad.resilience.faults.scenario import load_scenario
    from myriad.train.inputs import open_inputs

    chosen = [(Path(name).stem, load_scenario(name)) for name in names]
    for _, scenario in chosen:
        job = scenario.resolved_job()
        check_cores(job.layout.world, oversubscribe=oversubscribe)
        open_inputs(job, _tell)
    return chosen


def _try(name: str, scenario: "Scenario", folder: Path) -> "Report":
    from myriad.resilience.faults.trial import try_scenario

    return try_scenario(name, scenario, folder, _tell)


def _tell(text: str) -> None:
    typer.echo(text, err=True)


# What is shown

_HEADINGS = (
    "scenario",
    "fault",
    "found after",
    "aim",
    "told",
    "culprit",
    "trains again",
    "lost",
    "equal",
    "aims",
)


def _show(reports: "list[Report]") -> None:
    rows = [_row(report, grade) for report in reports for grade in report.grades]
    widths = [max(map(len, column)) for column in zip(_HEADINGS, *rows, strict=True)]
    for cells in (_HEADINGS, tuple("-" * width for width in widths), *rows):
        line = " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        typer.echo(f"| {line} |")
    for report in reports:
        for missed in [*report.missed, *(text for grade in report.grades for text in grade.missed)]:
            typer.echo(f"{report.scenario}: {missed} ({report.folder})")


def _row(report: "Report", grade: "Grade") -> tuple[str, ...]:
    lost = "-" if grade.steps_lost is None else str(grade.steps_lost)
    culprit = {True: "right", False: "wrong", None: "-"}[grade.culprit_right]
    equal = {True: "yes", False: "no", None: "-"}[report.equal]
    met = "met" if not grade.missed and not report.missed else "missed"
    found, trains = _seconds(grade.detected_seconds), _seconds(grade.trains_seconds)
    told = grade.told if len(grade.told) <= 60 else f"{grade.told[:57]}..."
    return (
        report.scenario,
        grade.fault,
        found,
        f"{grade.aim_seconds:g} s",
        told,
        culprit,
        trains,
        lost,
        equal,
        met,
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def _list(as_json: _Json = False) -> None:
    """Show each fault that can be caused: what it is, how it is caused, what a run is to make of it; and the
    ready scenarios."""
    from myriad.recipes import read_recipe, recipe_names
    from myriad.resilience.faults.kinds import KINDS

    ready = {name: read_recipe("faults", name, "scenario")["about"] for name in recipe_names("faults")}
    if as_json:
        kinds = {name: asdict(kind) for name, kind in KINDS.items()}
        typer.echo(json.dumps({"kinds": kinds, "scenarios": ready}))
        return
    for name, kind in KINDS.items():
        root = "; needs root" if kind.needs_root else ""
        typer.echo(f"{name}: {kind.what}\n  how: {kind.how}{root}")
        for where, aim in kind.aims.items():
            typer.echo(f"  {where}: {_aim_in_words(aim)}")
    typer.echo("\nready scenarios: myriad faults run NAME")
    for scenario, about in ready.items():
        typer.echo(f"  {scenario:{max(map(len, ready))}}  {about}")


def _aim_in_words(aim: "Aim") -> str:
    steps = f", or {aim.median_steps:g} median steps if longer" if aim.median_steps else ""
    parts = [f"found in {aim.detected_seconds:g} s{steps}"]
    if aim.causes:
        parts.append(f"told as {' or '.join(aim.causes)}")
    if aim.trains_seconds is not None:
        parts.append(f"trains again {aim.trains_seconds:g} s later")
    if aim.steps_lost is not None:
        parts.append(f"at most {aim.steps_lost} steps lost" if aim.steps_lost else "no step lost")
    return "; ".join([*parts, *([aim.also] if aim.also else [])])
