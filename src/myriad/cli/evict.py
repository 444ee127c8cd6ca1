"""``myriad evict``: a person has a node leave a run."""

import json as json_format
from typing import Annotated

import typer

from myriad.cli.runs import existing_run

__all__ = ["evict", "register"]


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command("evict")(evict)


def evict(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="The run's folder, or its name under runs/.", show_default=False),
    ],
    node: Annotated[
        int, typer.Argument(metavar="NODE", min=0, help="The number of the node.", show_default=False)
    ],
    reason: Annotated[
        str, typer.Option(metavar="TEXT", help="Why; goes to the event, for whoever reads it.")
    ] = "",
    anyway: Annotated[
        bool,
        typer.Option(
            "--anyway", help="Also where no spare stands by: the run then waits until another node comes."
        ),
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object on standard output, for programs.")
    ] = False,
) -> None:
    """Have a node leave a run that is at work; a spare takes its place.

    All ranks end after the step under way and begin again from memory, so no step is lost. The node does not
    come back to this run. Typed on any machine that has the run's folder and reaches its driver.

    Exit code: 0 it is done when the step is, 1 the driver is not reachable, 2 it cannot be.
    """
    from myriad.resilience.evict import evict as have_leave
    from myriad.run import Run

    told = have_leave(Run(existing_run(run)), node, reason=reason, anyway=anyway)
    typer.echo(json_format.dumps({"node": node, "told": told}) if json else told)
