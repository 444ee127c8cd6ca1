"""``myriad faults``: inject faults into a real run, and grade the recovery, as Markdown tables."""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from myriad.cli.progress_bar import Counted, count_bar
from myriad.cli.shared_options import AsJson, Oversubscribes
from myriad.errors import BadInputError, MyriadError
from myriad.run.run_lines import StepLines
from myriad.units import format_duration

if TYPE_CHECKING:
    from myriad.faults.fault_grades import Grade, Report
    from myriad.faults.fault_tally import GradedIncident, Tally
    from myriad.faults.recovery_targets import RecoveryTarget
    from myriad.faults.scenario import FaultScenario
    from myriad.run import Run

__all__ = ["register"]

_LOG = logging.getLogger(__name__)


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    text = "Inject faults into a real run, and grade its recovery."
    verb = typer.Typer(no_args_is_help=True, help=text)
    verb.command("run")(_run)
    verb.command("list")(_list)
    app.add_typer(verb, name="faults")


def _run(
    scenarios: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCENARIO...",
            help="Scenario files, or names of built-in scenarios (`myriad faults list`).",
        ),
    ] = None,
    all_: Annotated[
        bool, typer.Option("--all", help="Run every built-in scenario that this machine supports.")
    ] = False,
    random: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="Inject N random faults, one at a time, several in each run."),
    ] = 0,
    doubles: Annotated[
        int, typer.Option(metavar="N", min=0, help="Inject N pairs of random faults, at most 2 s apart.")
    ] = 0,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="S",
            min=0,
            max=2**32 - 1,
            help="Seed of --random, --doubles and a scenario's open choices. Default: 1, or the scenario's.",
        ),
    ] = None,
    folder: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER", help="Folder for the runs; undisturbed runs are kept there for later calls."
        ),
    ] = Path("runs/faults"),
    oversubscribe: Oversubscribes = False,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE.md", help="Write the table to this file as well.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Start a run for each scenario, inject its faults, and grade the recovery: detection time, suspect, time
    until it trains again, lost steps, and whether the final state equals the undisturbed run's bit for
    bit.

    A failed scenario does not stop the others. The table is Markdown; times are those of this machine. The
    last line gives the incidents that were handled without an operator, the correct suspects, and the healthy
    nodes evicted per incident.

    Exit code: 0 all goals were met (random faults: 99 % of singles and 95 % of doubles handled, 95 % of
    suspects correct, no healthy node evicted), 1 some were not, 2 bad input, 130 Ctrl-C (reports what was
    tried).
    """
    names, drawn = list(scenarios or []), random + doubles > 0
    if bool(names) + all_ + drawn != 1:
        raise BadInputError("SCENARIO", " ".join(names), "at least one, or --all, or --random and --doubles")
    if markdown is not None and not markdown.parent.is_dir():
        raise BadInputError("--markdown", str(markdown), "must be a file in an existing folder")
    if drawn:
        from myriad.faults.scenario import random_scenarios

        chosen = list(random_scenarios(random, doubles, 1 if seed is None else seed))
    else:
        chosen = list(_able() if all_ else ((Path(name).stem, _load(name)) for name in names))
        if seed is not None:
            chosen = [(name, scenario.model_copy(update={"seed": seed})) for name, scenario in chosen]
    _check(chosen, oversubscribe, folder)
    reports: list[Report] = []
    try:
        with count_bar("scenarios") as show, closing(_Follower(show)) as follower:
            for number, (name, scenario) in enumerate(chosen, 1):
                follower.title = f"{name} ({number} of {len(chosen)})"
                reports.append(_try(name, scenario, folder, follower))
    except KeyboardInterrupt:
        if reports:
            _print_grades(reports, drawn, None, as_json=as_json)
        raise
    if not _print_grades(reports, drawn, markdown, as_json=as_json):
        raise typer.Exit(1)


def _load(name: str) -> "FaultScenario":
    from myriad.faults.scenario import load_scenario

    return load_scenario(name)


def _able() -> "Iterator[tuple[str, FaultScenario]]":
    """Yield the scenarios that this process can run. Faults that need root are left out, with a message,
    where it is not root."""
    from myriad.recipes import recipe_names

    for name in recipe_names("faults"):
        try:
            yield name, _load(name)
        except BadInputError as error:
            _print_progress(f"{name}: left out: {error}")


def _check(chosen: "Sequence[tuple[str, FaultScenario]]", oversubscribe: bool, folder: Path) -> None:
    """Refuse scenarios that cannot run before the first one starts: check cores and the folder first, then
    the data."""
    from myriad.launchers.local import check_cores
    from myriad.train.inputs import open_inputs

    jobs = [scenario.resolved_job() for _, scenario in chosen]
    for job in jobs:
        check_cores(job.layout.world, oversubscribe=oversubscribe)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInputError("--folder", str(folder), f"must be a folder ({error.strerror})") from None
    for job in jobs:
        open_inputs(job, _print_progress)


class _Follower:
    """Shows the completed steps of the current run and the remaining time, from its metrics."""

    def __init__(self, show: Counted) -> None:
        self.title = ""
        self._show = show
        self._ended = threading.Event()
        self._run: tuple[str, StepLines, int] | None = None
        self._thread = threading.Thread(target=self._poll, name="follower", daemon=True)
        self._thread.start()

    def __call__(self, which: str, run: "Run", steps: int) -> None:
        """Follow this run from now on."""
        self._run = which, StepLines(run.metrics_path), steps

    def close(self) -> None:
        """End the thread that reads the metrics."""
        self._ended.set()
        self._thread.join()

    def _poll(self) -> None:
        run, first, since = None, 0, 0.0
        while not self._ended.wait(_POLL_SECONDS):
            if self._run is None:
                continue
            which, metrics, steps = self._run
            metrics.poll()
            done, now = len(metrics.lines), time.monotonic()
            if self._run is not run or not first:
                run, first, since = self._run, done, now
            left = (now - since) * (steps - done) / (done - first) if done > first else 0.0
            about = f", about {format_duration(left)} left" if left >= 1 else ""
            self._show(f"{self.title}, {which}{about}, steps", done, steps)


_POLL_SECONDS = 1.0


def _try(name: str, scenario: "FaultScenario", folder: Path, follower: _Follower) -> "Report":
    """Run a scenario and return its report. An exception becomes a failed report, so that the other scenarios
    still run."""
    from myriad.faults.fault_grades import failed_report
    from myriad.faults.trial import try_scenario

    try:
        report = try_scenario(name, scenario, folder, _print_progress, follower)
    except Exception as error:
        _LOG.warning("%s could not be tried", name, exc_info=not isinstance(error, MyriadError))
        report = failed_report(name, str(error) or type(error).__name__)
    missed = len(report.missed) + sum(len(grade.missed) for grade in report.grades)
    _print_progress(f"{name}: {f'{missed} aims missed' if missed else 'all aims met'}")
    return report


def _print_progress(text: str) -> None:
    typer.echo(text, err=True)


def _print_grades(reports: "list[Report]", drawn: bool, markdown: Path | None, *, as_json: bool) -> bool:
    """Print and write the grades; return whether all goals were met."""
    from myriad.faults.fault_tally import tally

    found, lines = tally(reports), (_random_lines if drawn else _matrix_lines)(reports)
    text = "\n".join(lines) + "\n"
    met = found.met if drawn else all(report.met for report in reports)
    if markdown is not None:
        markdown.write_text(text)
    if as_json:
        scenarios = [asdict(report) | {"met": report.met} for report in reports]
        counts = asdict(found) | {
            "handled_ratio": found.handled_ratio,
            "culprit_ratio": found.culprit_ratio,
            "evicted_per_incident": found.evicted_per_incident,
        }
        typer.echo(json.dumps({"scenarios": scenarios, "tally": counts, "met": met}))
    else:
        typer.echo(text, nl=False)
    return met


def _list(as_json: AsJson = False) -> None:
    """List the faults that can be injected (what they are, how they are caused, the expected reaction), and
    the built-in scenarios."""
    from myriad.faults.fault_kinds import KINDS
    from myriad.recipes import read_recipe, recipe_names

    ready = {name: read_recipe("faults", name, "scenario")["about"] for name in recipe_names("faults")}
    if as_json:
        kinds = {name: asdict(kind) for name, kind in KINDS.items()}
        typer.echo(json.dumps({"kinds": kinds, "scenarios": ready}))
        return
    for name, kind in KINDS.items():
        root = "; needs root" if kind.needs_root else ""
        typer.echo(f"{name}: {kind.what}\n  how: {kind.how}{root}")
        for where, aim in kind.aims.items():
            typer.echo(f"  {where}: {_describe_target(aim)}")
    typer.echo("\nready scenarios: myriad faults run NAME")
    for scenario, about in ready.items():
        typer.echo(f"  {scenario:{max(map(len, ready))}}  {about}")


def _describe_target(aim: "RecoveryTarget") -> str:
    steps = f", or {aim.median_steps:g} median steps if longer" if aim.median_steps else ""
    if aim.seen == "nothing":
        return aim.also
    parts = [f"found in {aim.detected_seconds:g} s{steps}"]
    if aim.causes:
        parts.append(f"reported as {' or '.join(aim.causes)}")
    if aim.trains_seconds is not None:
        parts.append(f"trains again {aim.trains_seconds:g} s later")
    if aim.steps_lost is not None:
        parts.append(f"at most {aim.steps_lost} steps lost" if aim.steps_lost else "no step lost")
    return "; ".join([*parts, *([aim.also] if aim.also else [])])


_HEADINGS = (
    "scenario",
    "fault",
    "found after",
    "aim",
    "reported as",
    "culprit",
    "trains again",
    "lost",
    "equal",
    "aims",
)
_RANDOM_HEADINGS = (
    "incidents",
    "fault",
    "tried",
    "handled",
    "culprit right",
    "found after: median",
    "longest",
    "trains again: median",
    "longest",
    "most steps lost",
)


def _matrix_lines(reports: "Sequence[Report]") -> Iterator[str]:
    """Yield a row for each fault, the missed goals, and the totals."""
    from myriad.faults.fault_tally import tally

    yield from _table(_HEADINGS, [_row(report, grade) for report in reports for grade in report.grades])
    yield ""
    yield from _missed(reports, lambda grade: grade.missed)
    yield _tally_line(tally(reports))


def _random_lines(reports: "Sequence[Report]") -> Iterator[str]:
    """Yield a row for each kind of fault, the faults that were not handled or not attributed, and the
    totals."""
    from myriad.faults.fault_tally import incidents_of, tally

    incidents = [one for report in reports for one in incidents_of(report)]
    rows = []
    for name, some in (
        ("single", [one for one in incidents if not one.is_double]),
        ("double", [one for one in incidents if one.is_double]),
    ):
        for kind in sorted({_kind(grade) for one in some for grade in one.grades}):
            rows.append(_kind_row(name, kind, some))
    yield from _table(_RANDOM_HEADINGS, rows)
    yield ""
    yield from _missed(reports, _not_named)
    yield _tally_line(tally(reports))


def _tally_line(found: "Tally") -> str:
    """Return the totals in one line."""
    parts = [f"{found.incidents} incidents, {found.handled_ratio:.1%} handled without a person"]
    if found.singles and found.doubles:
        parts[0] += f" (single {found.singles_handled} of {found.singles}, "
        parts[0] += f"double {found.doubles_handled} of {found.doubles})"
    share = f" ({found.culprit_ratio:.1%})" if found.named else ""
    parts.append(f"culprit right {found.named_right} of {found.named}{share}")
    parts.append(f"healthy nodes evicted per incident {found.evicted_per_incident:.2f}")
    parts.append(f"false alarms {found.false_alarms}")
    return "; ".join(parts)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    for cells in (headings, tuple("-" * width for width in widths), *rows):
        yield f"| {' | '.join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))} |"


def _missed(reports: "Sequence[Report]", of: "Callable[[Grade], Sequence[str]]") -> Iterator[str]:
    said = False
    for report in reports:
        for text in [*report.missed, *(text for grade in report.grades for text in of(grade))]:
            said = True
            yield f"- {report.scenario}: {text} ({report.folder})"
    if said:
        yield ""


def _row(report: "Report", grade: "Grade") -> tuple[str, ...]:
    lost = "-" if grade.steps_lost is None else str(grade.steps_lost)
    culprit = {True: "right", False: "wrong", None: "-"}[grade.culprit_right]
    equal = {True: "yes", False: "no", None: "-"}[report.equal]
    met = "met" if not grade.missed and not report.missed else "missed"
    reported = grade.report if len(grade.report) <= 60 else f"{grade.report[:57]}..."
    return (
        report.scenario,
        grade.fault,
        _seconds(grade.detected_seconds),
        f"{grade.aim_seconds:.3g} s" if grade.aim_seconds else "-",
        reported,
        culprit,
        _seconds(grade.trains_seconds),
        lost,
        equal,
        met,
    )


def _kind(grade: "Grade") -> str:
    """Return the kind of a fault: of ``kill rank 1 at step 20``, ``kill rank``."""
    return " ".join(grade.fault.split()[:2])


def _kind_row(name: str, kind: str, incidents: "Sequence[GradedIncident]") -> tuple[str, ...]:
    mine = [
        (one, grade) for one in incidents for grade in one.grades if grade.caused and _kind(grade) == kind
    ]
    named = [grade for _, grade in mine if grade.names]
    right = f"{sum(grade.culprit_right is True for grade in named)} of {len(named)}" if named else "-"
    found = [grade.detected_seconds for _, grade in mine if grade.detected_seconds is not None]
    again = [grade.trains_seconds for _, grade in mine if grade.trains_seconds is not None]
    lost = [grade.steps_lost for _, grade in mine if grade.steps_lost is not None]
    return (
        name,
        kind,
        str(len(mine)),
        str(sum(one.handled for one, _ in mine)),
        right,
        _seconds(median(found) if found else None),
        _seconds(max(found, default=None)),
        _seconds(median(again) if again else None),
        _seconds(max(again, default=None)),
        str(max(lost, default="-")),
    )


def _not_named(grade: "Grade") -> list[str]:
    return [f"{grade.fault}: {text}" for text in grade.missed if text.startswith(("wrong", "not det", "did"))]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
