"""``myriad runs``: list, compare and prune runs, and show what differs between two."""

import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from myriad.cli.json_output import print_json
from myriad.cli.shared_options import AsJson
from myriad.cli.terminal_text import terminal_text
from myriad.errors import BadInputError, RunFailedError
from myriad.run import existing_run
from myriad.units import format_bytes

if TYPE_CHECKING:
    from myriad.many_runs.run_row import RunRow

__all__ = ["register"]

_DEFAULT_FOLDER = "runs"
_MOST_COMPARED, _MOST_ROWS = 26, 1000
_Folders = Annotated[
    list[str] | None,
    typer.Argument(metavar="FOLDER", help="Run folders, or folders of runs. Default: runs/."),
]
_Filters = Annotated[
    list[str] | None,
    typer.Option(
        "--filter",
        metavar="KEY=VALUE",
        help="Select runs by a column or a key of the job, e.g. state=failed, 'loss<3', 'name=abl-*' or "
        "optimizer.name!=muon; repeatable: runs that meet all.",
    ),
]
_Run = Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or its name under runs/.")]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    verb = typer.Typer(no_args_is_help=True, help="Many runs: list, compare, diff, note, log and prune them.")
    verb.command("list")(_list)
    verb.command("compare")(_compare)
    verb.command("diff")(_diff)
    verb.command("note")(_note)
    verb.command("log")(_log)
    verb.command("prune")(_prune)
    app.add_typer(verb, name="runs")


def _list(
    folders: _Folders = None,
    sort: Annotated[
        str,
        typer.Option(metavar="KEY", help="Column or key of the job to sort by; -KEY: largest first."),
    ] = "-started",
    filters: _Filters = None,
    archived: Annotated[bool, typer.Option("--archived", help="List archived runs as well.")] = False,
    as_json: AsJson = False,
) -> None:
    """List runs: state, job, layout, losses, speed, start, duration, and how their jobs differ.

    Columns for --sort and --filter: name, state, job, layout, steps, tokens, loss, validation (the best),
    tokens_per_second, mfu, started, seconds, tags (tags=paper: has this tag). A state is starting, training,
    hangs, finished, interrupted, failed (killed, or ended by a fault), new (never started) or unreadable
    (job.toml is damaged); state=running selects starting, training and hangs. "differs" has the keys of the
    job that are not equal in all listed runs. Only reads the run folders.

    Exit code: 0 done, 2 bad input.
    """
    from myriad.many_runs.run_table import differing_keys, filtered, sorted_rows, values_that_differ

    filtered([], filters or [])  # refuse a wrong option before long files are read
    sorted_rows([], sort)
    shown = [row for row in _rows(folders) if archived or not row.notes.archived]
    rows = sorted_rows(filtered(shown, filters or []), sort)
    keys = differing_keys(rows)
    if as_json:
        each = [row.as_json() | {"differs": values_that_differ(row, keys)} for row in rows]
        print_json({"runs": each, "differing_keys": keys})
        return
    from myriad.cli.many_runs.run_tables import show_list

    show_list(rows, keys, ", ".join(folders or [f"{_DEFAULT_FOLDER}/"]))


def _rows(folders: Sequence[str] | None) -> "list[RunRow]":
    from myriad.many_runs.row_cache import RowCache
    from myriad.many_runs.run_row import find_runs

    if not folders and not Path(_DEFAULT_FOLDER).is_dir():
        return []
    cache = RowCache()
    return [cache.row(run) for run in find_runs(folders or [_DEFAULT_FOLDER])]


def _diff(first: _Run, second: _Run, as_json: AsJson = False) -> None:
    """Show what differs between two runs: job, environment, and keys that resumes changed.

    The environment is what the runs recorded: ranks, device, precision, threads, peak, hosts, processors,
    accelerators, versions (myriad, Python, torch, NCCL, kernel, drivers), and the git commits of Myriad and
    of the folder in which the run was started. Facts that only one run recorded are shown as "-".

    Exit code: 0 done, 2 bad input.
    """
    from myriad.many_runs.run_diff import diff_runs
    from myriad.run import Run

    runs = [Run(existing_run(name)) for name in (first, second)]
    found = diff_runs(*runs)
    if as_json:
        print_json({"runs": [str(run.path) for run in runs], **found.as_json()})
        return
    from myriad.cli.many_runs.run_tables import show_diff

    show_diff([run.path.name for run in runs], found)


class _Axis(StrEnum):
    steps = "steps"
    tokens = "tokens"


def _compare(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN", help="Run folders, or names under runs/: two or more.")
    ],
    by: Annotated[_Axis, typer.Option(help="Compare at equal steps or at equal tokens.")] = _Axis.steps,
    metric: Annotated[
        str,
        typer.Option(
            metavar="FIELD", help="Number in metrics.jsonl, such as grad_norm, or a name given to myriad.log."
        ),
    ] = "loss",
    rows: Annotated[int, typer.Option(help="Rows of the table of the metric.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Compare runs at equal steps or tokens: loss, best validation, time, speed, and a chart.

    Figures are those at the end of the range that all runs have. A row of the table is the mean over the
    steps since the row before. The time is that of steps, without validation and checkpoints. tokens/s and
    MFU are those of the newest attempt.

    Exit code: 0 done, 2 bad input.
    """
    from myriad.many_runs.run_comparison import compare_runs
    from myriad.run import Run

    if not 2 <= len(runs) <= _MOST_COMPARED:
        raise BadInputError("RUN", runs, f"2 to {_MOST_COMPARED} runs")
    if not 1 <= rows <= _MOST_ROWS:
        raise BadInputError("--rows", rows, f"1 to {_MOST_ROWS}")
    folders = [Run(existing_run(name)) for name in runs]
    found = compare_runs(folders, axis=by.value, metric=metric, num_rows=rows)
    if as_json:
        print_json(found.as_json())
        return
    from myriad.cli.many_runs.run_tables import show_comparison

    show_comparison(found)


def _note(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Run folders, or their names under runs/.")
    ],
    text: Annotated[
        str | None, typer.Option("--text", metavar="TEXT", help='Note; it replaces the one before. "": none.')
    ] = None,
    tag: Annotated[
        list[str] | None, typer.Option("--tag", metavar="TAG", help="Tag to add; repeatable.")
    ] = None,
    untag: Annotated[
        list[str] | None, typer.Option("--untag", metavar="TAG", help="Tag to remove; repeatable.")
    ] = None,
    archive: Annotated[
        bool | None,
        typer.Option(
            "--archive/--unarchive",
            help="Leave the runs out of lists, or list them again. Default: unchanged.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the notes of runs, or write a note, add and remove tags, and archive.

    They are in RUN/notes.json, and nothing else of the run changes. Without an option they are printed.

    Exit code: 0 done, 1 a folder cannot be written, 2 bad input.
    """
    from myriad.run import Run
    from myriad.run.run_notes import read_notes, write_notes

    found = {}
    for run in [Run(existing_run(name)) for name in runs]:
        notes = read_notes(run)
        tags = [one for one in (*notes.tags, *(tag or [])) if one not in (untag or [])]
        if text is not None or tag or untag or archive is not None:
            try:
                notes = write_notes(run, note=text, tags=tags, archived=archive)
            except OSError as error:
                raise RunFailedError(f"{run.path}: {error.strerror}") from None
        found[str(run.path)] = notes
    if as_json:
        each = {
            path: {"note": one.note, "tags": list(one.tags), "archived": one.archived}
            for path, one in found.items()
        }
        print_json({"runs": each})
        return
    for path, one in found.items():
        parts = [*one.tags, *(["archived"] if one.archived else []), *([one.note] if one.note else [])]
        typer.echo(terminal_text(f"{path}: {', '.join(parts) or 'no notes'}"))


_LOG_SECONDS = 600.0


def _log(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Run folders, or their names under runs/.")
    ],
    to: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Tracker to send to: tensorboard, wandb or mlflow; repeatable. Default: telemetry.loggers "
            "of each run's job.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Send what experiment trackers have not received of ended runs: job, metrics, summary, paths.

    For a tracker that was away when a run ended, for runs that had none, and for the paths of later exports.
    Accounts and servers are those of the trackers' environment variables, as in training. No line is sent
    twice.

    Exit code: 0 done, 1 a tracker did not take all lines, 2 bad input.
    """
    from myriad.launchers.metric_loggers import Loggers
    from myriad.run import Run
    from myriad.run.run_status import is_at_work
    from myriad.telemetry.config import check_loggers

    check_loggers(to or (), "--to")
    folders = [Run(existing_run(name)) for name in runs]
    wanted = {run: to or run.job().telemetry.loggers for run in folders}
    for run, names in wanted.items():
        if not names:
            raise BadInputError("--to", "", f"must be given: the job of {run.path} has no telemetry.loggers")
        check_loggers(names)
        if is_at_work(run):
            raise BadInputError("RUN", str(run.path), "must have ended: while it trains, its loggers send")
    missed = {}
    for run, names in wanted.items():
        with run.lock(), run.shared_as_folder(), Loggers(run, names, _LOG_SECONDS) as loggers:
            loggers.begin()
        missed[str(run.path)] = loggers.num_missed
        if not as_json:
            rest = f", which did not take {loggers.num_missed} lines" if loggers.num_missed else ""
            typer.echo(terminal_text(f"{run.path}: sent to {', '.join(names)}{rest}"))
    if as_json:
        print_json({"missed": missed})
    if any(missed.values()):
        raise typer.Exit(1)


def _prune(
    folders: _Folders = None,
    states: Annotated[
        list[str] | None,
        typer.Option(
            "--state",
            metavar="STATE",
            help="Select runs of this state: failed, interrupted, finished, new or unreadable; repeatable.",
        ),
    ] = None,
    older_than: Annotated[
        float | None,
        typer.Option(metavar="DAYS", help="Select runs whose last event or step is older than this.", min=0),
    ] = None,
    keep_best: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Keep the N runs with the lowest validation loss, of those that --filter selects.",
            min=1,
        ),
    ] = None,
    filters: _Filters = None,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without a question.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete runs that meet all given conditions; shows them first, and asks.

    At least one condition is needed. A run stays if it is running, if its last step is only in memory, if
    its Slurm job was requeued, if its folder is a link or holds another run, or if an unfinished run takes
    weights or checkpoints from it.
    Without a terminal, or with --json, nothing is deleted without --yes. Checkpoints at a URL stay.

    Exit code: 0 done, 1 a run could not be deleted, 2 bad input.
    """
    from myriad.cli.many_runs.run_tables import show_plan
    from myriad.many_runs.run_pruning import PruneRules, plan_pruning, prune

    rules = PruneRules(
        keep_best=keep_best, older_than_days=older_than, states=states or [], filters=filters or []
    )
    rules.check()  # refuse a wrong option before long files are read
    plan = plan_pruning(_rows(folders), rules)
    if not as_json:
        show_plan(plan, ", ".join(folders or [f"{_DEFAULT_FOLDER}/"]))
    if not yes and (as_json or not plan.delete or not _agrees(len(plan.delete), plan.total_bytes)):
        if as_json:
            print_json(plan.as_json() | {"deleted": [], "problems": {}})
        elif plan.delete:
            typer.echo("nothing was deleted")
        return
    deleted, problems = prune(plan)
    if as_json:
        named = {str(path): why for path, why in problems.items()}
        print_json(plan.as_json() | {"deleted": list(map(str, deleted)), "problems": named})
    elif plan.delete:
        size = format_bytes(sum(plan.num_bytes[path] for path in deleted))
        typer.echo(f"deleted {len(deleted)} of {len(plan.delete)} runs, {size}")
    for path, why in problems.items():
        typer.echo(terminal_text(f"not deleted: {path}: {why}"), err=True)
    if problems:
        raise typer.Exit(1)


def _agrees(count: int, num_bytes: int) -> bool:
    """Ask whether to delete; without a terminal nobody can answer, and the answer is no."""
    if sys.stdin is None or not sys.stdin.isatty():
        typer.echo("--yes deletes them")
        return False
    return typer.confirm(f"delete {count} {'run' if count == 1 else 'runs'}, {format_bytes(num_bytes)}?")
