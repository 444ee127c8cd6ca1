"""``myriad report``: where a run's time went, as tables, as JSON, and as an HTML page."""

import json
import logging
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from myriad.cli.shared_options import AsJson, RunName, WithoutRanks
from myriad.errors import BadInputError
from myriad.run import existing_run

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod

    from myriad.dashboard.insight.losses import Losses
    from myriad.dashboard.run_view import RunView
    from myriad.reports.run_report.run_facts import Facts
    from myriad.run import Run

__all__ = ["register", "save_report"]

_OF_STEPS = ("losses", "slow", "drifting", "critical_path", "without")
_MOST_SLOW, _MOST_FAULTS = 5, 50
_LOG = logging.getLogger(__name__)


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("report")(_report)


def _report(
    run: RunName,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="File for the page. Default: RUN/report.html."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="CLUSTER",
            help="Add the predicted losses on this cluster, and the effects of its network.",
        ),
    ] = None,
    without: WithoutRanks = None,
    as_json: AsJson = False,
) -> None:
    """Report where a run's time went, slow ranks, and every fault; write an HTML page.

    Each second of the wall time belongs to one class. Effective training time (ETTR) is the time of steps
    that count; a step that was repeated after a fault counts once. Goodput is the tokens of those steps per
    second of wall time. The run may be training, stopped or failed. The page is one file without external
    links.

    Exit code: 0 done, 2 bad input.
    """
    from myriad.cli.top.top_command import requested_ranks, view_as_json
    from myriad.dashboard.run_view import RunReader
    from myriad.reports.run_report.report_page import page
    from myriad.reports.run_report.run_facts import facts_of
    from myriad.reports.run_report.steps_section import span_parts
    from myriad.run import Run
    from myriad.system.whole_file import write_whole

    if out is not None and out.suffix != ".html":
        raise BadInputError("--out", str(out), "a file name that ends in .html")
    folder = Run(existing_run(run))
    facts, view = facts_of(folder), RunReader(folder).read()
    ranks = requested_ranks(without, view)
    predicted, network = (None, "") if cluster is None else _predicted(view, cluster)
    path = facts.run.report_path if out is None else out
    message = f"report: {path}"
    try:
        with folder.shared_as_folder() if out is None else nullcontext():
            write_whole(path, page(facts, [*span_parts(view, predicted, ranks), network]))
    except OSError as error:
        if out is not None:
            raise BadInputError("--out", str(out), f"cannot be written: {error.strerror}") from None
        message = (
            f"no report: {path} cannot be written ({error.strerror}); --out FILE.html writes it elsewhere"
        )
    if as_json:
        steps = {key: value for key, value in view_as_json(view, ranks).items() if key in _OF_STEPS}
        typer.echo(json.dumps(facts.as_json() | steps))
    else:
        _show(facts, view, message)


def _predicted(view: "RunView", name: str) -> "tuple[Losses, str]":
    """Return the predicted losses, and the HTML section on the cluster's network."""
    from myriad.cli.measured_cluster import cluster_path
    from myriad.cli.progress_bar import share_bar
    from myriad.dashboard.insight.predicted_step import predicted_losses
    from myriad.forecasts.iteration_forecast import costs_of
    from myriad.recipes.cluster import load_cluster
    from myriad.reports.run_report.network_section import network_parts

    cluster = load_cluster(cluster_path(name))
    losses = predicted_losses(costs_of(view.job, cluster))
    with share_bar("the network") as progress:
        return losses, "\n".join(network_parts(view.job, cluster, progress))


def save_report(run: "Run") -> None:
    """Write the HTML report at the end of a run; failures are logged and never fail the run."""
    try:
        from myriad.dashboard.run_view import RunReader
        from myriad.reports.run_report.report_page import page
        from myriad.reports.run_report.run_facts import facts_of
        from myriad.reports.run_report.steps_section import span_parts
        from myriad.system.whole_file import write_whole

        write_whole(run.report_path, page(facts_of(run), span_parts(RunReader(run).read())))
    except Exception as error:  # A failed report must never fail the run.
        _LOG.warning("no report was written: %s", error)


def _show(facts: "Facts", view: "RunView", message: str) -> None:
    from rich.console import Console

    from myriad.units import format_count, format_number, format_seconds

    console, account = Console(highlight=False), facts.account
    console.print(f"run {facts.run.path.name}: {facts.state}", style="bold", markup=False, soft_wrap=True)
    wall = format_seconds(account.ledger.wall_seconds)
    parts = [f"effective training time {account.effective_ratio:.1%} of {wall}"]
    if not account.steps:
        parts = [f"no step done in {wall}"]
    if account.ledger.seconds()["planned"] > 0:
        parts.append(f"{account.meant_ratio:.1%} without planned stops")
    parts.append(f"goodput {format_count(account.goodput)} tokens/s")
    parts.append(f"{account.steps} steps done, {account.steps_lost} lost")
    if spare := account.ledger.spare_node_seconds:
        parts.append(f"spare nodes were idle for {format_number(spare / 3600)} node hours")
    parts += facts.doubts
    console.print(" · ".join(parts), markup=False, soft_wrap=True)
    _show_classes(facts, console)
    _show_steps(view, console)
    _show_faults(facts, console)
    _show_attempts(facts, console)
    console.print(message, style="dim", markup=False, soft_wrap=True)


def _table(console: "Console", headings: list[str], rows: list[list[str]], right: tuple[int, ...]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for place, heading in enumerate(headings):
        justify: JustifyMethod = "right" if place in right else "left"
        table.add_column(heading, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print()
    console.print(table)


def _show_classes(facts: "Facts", console: "Console") -> None:
    from myriad.reports.run_report.run_facts import MEANING

    rows = [
        [kind, f"{seconds:.2f}", f"{share:.2%}", MEANING[kind]] for kind, seconds, share in facts.shares()
    ]
    wall = facts.account.ledger.wall_seconds
    rows.append(["in all", f"{wall:.2f}", "100.00%" if wall else "-", "the wall time"])
    _table(console, ["class", "seconds", "share", ""], rows, (1, 2))


def _show_steps(view: "RunView", console: "Console") -> None:
    """Print the losses of the newest steps and the slow ranks."""
    from myriad.reports.charts.colours import MEANING

    found = view.findings
    losses = found.losses
    if losses is None:
        return
    rows = [
        [name, f"{losses.seconds[name] * 1e3:.2f}", f"{share:.2%}", MEANING[name]]
        for name, share in losses.shares.items()
        if abs(share) >= 0.00005
    ]
    if losses.mfu is not None and losses.ideal_seconds is not None:
        rows.append(["MFU", f"{losses.ideal_seconds * 1e3:.2f}", f"{losses.mfu:.2%}", "of the peak"])
    _table(console, ["of a step", "ms", "share", ""], rows, (1, 2))
    for one in found.suspects[:_MOST_SLOW]:
        console.print(one.sentence, markup=False, soft_wrap=True)


def _show_faults(facts: "Facts", console: "Console") -> None:
    """Print the table of faults, and a line on each below it."""
    from myriad.reports.run_report.run_facts import FAULT_HEADINGS, fault_cells

    older = max(0, len(facts.account.faults) - _MOST_FAULTS)
    rows = fault_cells(facts.account.faults[older:])
    if older:
        note = f"\nthe newest {len(rows)} faults; {older:,} older ones are in events.jsonl"
        console.print(note, style="dim", markup=False, soft_wrap=True)
    if rows:
        numbered = [[str(number), *row[:-1]] for number, row in enumerate(rows, older + 1)]
        _table(console, ["fault", *FAULT_HEADINGS[:-1]], numbered, (0, 4, 5, 6))
        for number, row in enumerate(rows, older + 1):
            console.print(f"{number}: {row[-1]}", style="dim", markup=False, soft_wrap=True)


def _show_attempts(facts: "Facts", console: "Console") -> None:
    from myriad.reports.run_report.run_facts import ATTEMPT_HEADINGS, attempt_cells

    if facts.account.attempts:
        _table(console, ATTEMPT_HEADINGS, attempt_cells(facts.account.attempts), (0, 1, 3, 4))
