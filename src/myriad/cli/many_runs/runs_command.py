"""``myriad runs``: list and compare runs, and show what differs between two."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from myriad.cli.json_output import print_json
from myriad.cli.shared_options import AsJson, existing_run

if TYPE_CHECKING:
    from myriad.reports.many_runs.run_row import RunRow

__all__ = ["register"]

_DEFAULT_FOLDER = "runs"
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
    verb = typer.Typer(no_args_is_help=True, help="Many runs: list them, and show what differs.")
    verb.command("list")(_list)
    verb.command("diff")(_diff)
    app.add_typer(verb, name="runs")


def _list(
    folders: _Folders = None,
    sort: Annotated[
        str,
        typer.Option(metavar="KEY", help="Column or key of the job to sort by; -KEY: largest first."),
    ] = "-started",
    filters: _Filters = None,
    as_json: AsJson = False,
) -> None:
    """List runs: state, job, layout, losses, speed, start, duration, and how their jobs differ.

    Columns for --sort and --filter: name, state, job, layout, steps, tokens, loss, validation (the best),
    tokens_per_second, mfu, started, seconds. A state is running, finished, interrupted, failed (killed, or
    ended by a fault), new (never started) or unreadable (job.toml is damaged). "differs" has the keys of the
    job that are not equal in all listed runs. Only reads the run folders.

    Exit code: 0 done, 2 bad input.
    """
    from myriad.reports.many_runs.run_table import differing_keys, filtered, sorted_rows, values_that_differ

    filtered([], filters or [])  # refuse a wrong option before long files are read
    sorted_rows([], sort)
    rows = sorted_rows(filtered(_rows(folders), filters or []), sort)
    keys = differing_keys(rows)
    if as_json:
        each = [row.as_json() | {"differs": values_that_differ(row, keys)} for row in rows]
        print_json({"runs": each, "differing_keys": keys})
        return
    from myriad.cli.many_runs.run_tables import show_list

    show_list(rows, keys, ", ".join(folders or [f"{_DEFAULT_FOLDER}/"]))


def _rows(folders: Sequence[str] | None) -> "list[RunRow]":
    from myriad.reports.many_runs.run_row import find_runs, read_row

    if not folders and not Path(_DEFAULT_FOLDER).is_dir():
        return []
    return [read_row(run) for run in find_runs(folders or [_DEFAULT_FOLDER])]


def _diff(first: _Run, second: _Run, as_json: AsJson = False) -> None:
    """Show what differs between two runs: job, environment, and keys that resumes changed.

    The environment is what the runs recorded: ranks, device, precision, threads, peak, hosts, processors,
    accelerators, and versions of the kernel and drivers. Facts that only one run recorded are shown as "-".

    Exit code: 0 done, 2 bad input.
    """
    from myriad.reports.many_runs.run_diff import diff_runs
    from myriad.run import Run

    runs = [Run(existing_run(name)) for name in (first, second)]
    found = diff_runs(*runs)
    if as_json:
        print_json({"runs": [str(run.path) for run in runs], **found.as_json()})
        return
    from myriad.cli.many_runs.run_tables import show_diff

    show_diff([run.path.name for run in runs], found)
