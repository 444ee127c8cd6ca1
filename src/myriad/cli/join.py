"""``myriad join``: this machine becomes a node of a run that is trained elsewhere."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["join", "register"]


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command("join")(join)


def join(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="The run's folder, which its nodes share.", show_default=False),
    ],
    node: Annotated[
        int | None,
        typer.Option(metavar="K", min=0, help="The node to be; the driver says when left out."),
    ] = None,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="How long to wait for the run's driver.")
    ] = 60.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print nothing but one JSON object at the end.")
    ] = False,
) -> None:
    """Make this machine a node of a run, until the run is over.

    `myriad train JOB --resilience.engine join --resilience.nodes N --resilience.listen ADDRESS` waits for N
    of them; any more are spares, and take the place of one that is lost.

    Ctrl-C saves and stops the whole run; SIGTERM takes this machine away.

    Exit code: 0 the run is over, 1 its driver was lost, 2 there is nothing to join.
    """
    from myriad.resilience.node.join import join as join_run
    from myriad.run import Run

    tell: Callable[[str], None] = (lambda line: None) if as_json else typer.echo
    was = join_run(Run(run), node, wait_seconds=wait, tell=tell)
    if as_json:
        typer.echo(json.dumps({"run": str(run), "node": was}))
