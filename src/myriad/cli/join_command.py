"""``myriad join``: run this machine as a node of a run whose driver is elsewhere."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["join", "register"]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("join")(join)


def join(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="Run folder, shared by all nodes.", show_default=False),
    ],
    node: Annotated[
        int | None,
        typer.Option(metavar="K", min=0, help="Number of this node. Default: the driver assigns one."),
    ] = None,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="Time to wait for the run's driver.")
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print only one JSON object, at the end.")] = False,
) -> None:
    """Run this machine as a node of a run until the run ends.

    `myriad train JOB --resilience.engine join --resilience.nodes N --resilience.listen ADDRESS` waits for N
    nodes. Further nodes are spares that replace lost ones.

    Ctrl-C saves a checkpoint and stops the whole run; SIGTERM removes only this machine from it.

    Exit code: 0 the run ended, 1 its driver was lost, 2 there is no run to join.
    """
    from myriad.run import Run
    from myriad.supervise.agent.node_join import join as join_run

    report: Callable[[str], None] = (lambda line: None) if as_json else typer.echo
    was = join_run(Run(run), node, wait_seconds=wait, report=report)
    if as_json:
        typer.echo(json.dumps({"run": str(run), "node": was}))
