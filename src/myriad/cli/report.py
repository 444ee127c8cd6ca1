"""``myriad report``: what became of a run's time, as tables, as JSON, and as one page for the browser."""

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from myriad.cli.runs import existing_run
from myriad.errors import BadInputError

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod

    from myriad.cli.report_facts import Facts
    from myriad.dashboard.insight.losses import Losses
    from myriad.dashboard.run_look import Look
    from myriad.run import Run

__all__ = ["register", "save_report"]

_OF_STEPS = ("losses", "slow", "drifting", "critical_path", "without")
_MOST_SLOW, _MOST_FAULTS = 5, 50
_LOG = logging.getLogger(__name__)


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command("report")(_report)


def _report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or the name of one under runs/.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="Where the page is written; RUN/report.html when left out."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="CLUSTER",
            help="Beside each loss, what is predicted on this cluster; and what its network does to the run.",
        ),
    ] = None,
    without: Annotated[
        str | None,
        typer.Option(
            metavar="RANKS",
            help="Show how long a step would take if these ranks (3 or 0-7,12) were as quick as others.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on standard output, for programs.")
    ] = False,
) -> None:
    """Where a run's time went, second by second and in its newest steps, who is slow, and each fault.

    Every second of the wall time is in one class. Effective training time (ETTR): steps that count; one that
    was done again after a fault counts once. Goodput: tokens of those steps per second of the wall time. The
    run may be at work, stopped, or broken. Writes one page without any link to the network.

    Exit code: 0 done, 2 bad input.
    """
    from myriad.cli.report_facts import facts_of
    from myriad.cli.report_page import page
    from myriad.cli.report_spans import span_parts
    from myriad.cli.top import look_as_json, ranks_asked
    from myriad.dashboard.run_look import RunWatch
    from myriad.run import Run
    from myriad.whole_file import write_whole

    if out is not None and out.suffix != ".html":
        raise BadInputError("--out", str(out), "a file name that ends in .html")
    folder = Run(existing_run(run))
    facts, look = facts_of(folder), RunWatch(folder).look()
    ranks = ranks_asked(without, look)
    predicted, network = (None, "") if cluster is None else _predicted(look, cluster)
    path = facts.run.report_path if out is None else out
    told = f"the page: {path}"
    try:
        write_whole(path, page(facts, [*span_parts(look, predicted, ranks), network]))
    except OSError as error:
        if out is not None:
            raise BadInputError("--out", str(out), f"cannot be written: {error.strerror}") from None
        told = f"no page: {path} cannot be written ({error.strerror}); --out FILE.html writes it elsewhere"
    if as_json:
        steps = {key: value for key, value in look_as_json(look, ranks).items() if key in _OF_STEPS}
        typer.echo(json.dumps(facts.as_json() | steps))
    else:
        _show(facts, look, told)


def _predicted(look: "Look", name: str) -> "tuple[Losses, str]":
    """Losses, and what the cluster's network does to the run."""
    from myriad.cli.bars import share_bar
    from myriad.cli.forecast import costs_of
    from myriad.cli.measure import cluster_path
    from myriad.cli.report_network import network_parts
    from myriad.dashboard.insight.predicted import predicted_losses
    from myriad.recipes.cluster import load_cluster

    cluster = load_cluster(cluster_path(name))
    losses = predicted_losses(costs_of(look.job, cluster))
    with share_bar("the network") as progress:
        return losses, "\n".join(network_parts(look.job, cluster, progress))


def save_report(run: "Run") -> None:
    """At the end of a run, which has nothing to fear from it."""
    try:
        from myriad.cli.report_facts import facts_of
        from myriad.cli.report_page import page
        from myriad.cli.report_spans import span_parts
        from myriad.dashboard.run_look import RunWatch
        from myriad.whole_file import write_whole

        write_whole(run.report_path, page(facts_of(run), span_parts(RunWatch(run).look())))
    except Exception as error:  # whatever it is: what was trained is worth more than what is told of it
        _LOG.warning("no report was written: %s", error)


def _show(facts: "Facts", look: "Look", told: str) -> None:
    from rich.console import Console

    from myriad.units import format_count, format_number, format_seconds

    console, account = Console(highlight=False), facts.account
    console.print(f"run {facts.run.path.name}: {facts.state}", style="bold", markup=False, soft_wrap=True)
    wall = format_seconds(account.ledger.wall_seconds)
    parts = [f"effective training time {account.effective_ratio:.1%} of {wall}"]
    if not account.steps:
        parts = [f"no step is done, in {wall}"]
    if account.ledger.seconds()["planned"] > 0:
        parts.append(f"{account.meant_ratio:.1%} without planned stops")
    parts.append(f"goodput {format_count(account.goodput)} tokens/s")
    parts.append(f"{account.steps} steps done, {account.steps_lost} lost")
    if spare := account.ledger.spare_node_seconds:
        parts.append(f"spare nodes stood {format_number(spare / 3600)} node hours beside it")
    parts += facts.doubts
    console.print(" · ".join(parts), markup=False, soft_wrap=True)
    _show_classes(facts, console)
    _show_steps(look, console)
    _show_faults(facts, console)
    _show_attempts(facts, console)
    console.print(told, style="dim", markup=False, soft_wrap=True)


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
    from myriad.cli.report_facts import MEANING

    rows = [
        [kind, f"{seconds:.2f}", f"{share:.2%}", MEANING[kind]] for kind, seconds, share in facts.shares()
    ]
    wall = facts.account.ledger.wall_seconds
    rows.append(["in all", f"{wall:.2f}", "100.00%" if wall else "-", "the wall time"])
    _table(console, ["class", "seconds", "share", ""], rows, (1, 2))


def _show_steps(look: "Look", console: "Console") -> None:
    """What the newest steps' spans say."""
    from myriad.cli.loss_colours import MEANING

    found = look.findings
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
    for one in found.culprits[:_MOST_SLOW]:
        console.print(one.sentence, markup=False, soft_wrap=True)


def _show_faults(facts: "Facts", console: "Console") -> None:
    """What happened stands below: it is as long as it is."""
    from myriad.cli.report_facts import FAULT_HEADINGS, fault_cells

    older = max(0, len(facts.account.faults) - _MOST_FAULTS)
    rows = fault_cells(facts.account.faults[older:])
    if older:
        note = f"\nthe newest {len(rows)} faults; {older:,} older ones stand in events.jsonl"
        console.print(note, style="dim", markup=False, soft_wrap=True)
    if rows:
        numbered = [[str(number), *row[:-1]] for number, row in enumerate(rows, older + 1)]
        _table(console, ["fault", *FAULT_HEADINGS[:-1]], numbered, (0, 4, 5, 6))
        for number, row in enumerate(rows, older + 1):
            console.print(f"{number}: {row[-1]}", style="dim", markup=False, soft_wrap=True)


def _show_attempts(facts: "Facts", console: "Console") -> None:
    from myriad.cli.report_facts import ATTEMPT_HEADINGS, attempt_cells

    if facts.account.attempts:
        _table(console, ATTEMPT_HEADINGS, attempt_cells(facts.account.attempts), (0, 1, 3, 4))
