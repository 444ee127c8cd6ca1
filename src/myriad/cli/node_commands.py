"""``myriad join`` and ``myriad evict``: add this machine to a run, remove a node, and list or clear machines
in quarantine.
"""

import json as json_format
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from myriad.cli.shared_options import AsJson
from myriad.errors import BadInputError
from myriad.run import existing_run

if TYPE_CHECKING:
    from myriad.supervise.policy.repeat_offenders import RepeatOffenders

__all__ = ["evict", "join", "register"]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("join")(join)
    app.command("evict")(evict)


def evict(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="Run folder, or its name under runs/.", show_default=False),
    ] = None,
    node: Annotated[
        int | None, typer.Argument(metavar="NODE", min=0, help="Number of the node.", show_default=False)
    ] = None,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Reason, stored in the run's event.")] = "",
    anyway: Annotated[
        bool,
        typer.Option(
            "--anyway",
            help="Evict even without a spare: the run then waits for a node or drops a replica.",
        ),
    ] = False,
    show: Annotated[
        bool,
        typer.Option(
            "--list", help="List machines that are suspected of faults, and which of them are in quarantine."
        ),
    ] = False,
    pardon: Annotated[str | None, typer.Option(metavar="HOST", help="Clear the record of a machine.")] = None,
    json: AsJson = False,
) -> None:
    """Remove a node from a running job; a spare replaces it.

    The ranks restart from memory after the current step, so no step is lost. The machine does not return to
    this run. Works on any machine that has the run folder and can reach the driver.

    --list and --pardon HOST, without RUN and NODE, show and clear the records of evicted machines.

    Exit code: 0 evicted, or scheduled after the current step; 1 the driver cannot be reached, 2 bad input.
    """
    if show or pardon is not None:
        _refuse_both(run, show=show, pardon=pardon)
        answer = _list() if show else _clear_record(str(pardon))
    elif run is None or node is None:
        raise BadInputError(
            "NODE" if run else "RUN", "", "is missing: RUN and NODE, or --list, or --pardon HOST"
        )
    else:
        answer = _evict(existing_run(run), node, reason, anyway=anyway)
    typer.echo(json_format.dumps(answer) if json else answer["message"])


def _refuse_both(run: str | None, *, show: bool, pardon: str | None) -> None:
    if run is not None:
        raise BadInputError("RUN", run, "not with --list or --pardon")
    if show and pardon is not None:
        raise BadInputError("--pardon", pardon, "not with --list")


def _evict(run: Path, node: int, reason: str, *, anyway: bool) -> dict[str, Any]:
    from myriad.run import Run
    from myriad.supervise.driver_requests import evict as have_leave

    return {"node": node, "message": have_leave(Run(run), node, reason=reason, anyway=anyway)}


def _list() -> dict[str, Any]:
    from dataclasses import asdict

    offenders, now = _read(), time.time()
    machines, lines = [], []
    for machine, accused in sorted(offenders.accused.items()):
        found = offenders.quarantine(machine, now)
        free_at = None if found is None else found.until
        machines.append({"machine": machine, "quarantine_until": free_at, "accused": [*map(asdict, accused)]})
        lines.append(f"{machine}: " + ("not in quarantine" if found is None else f"until {_at(found.until)}"))
        lines += [
            f"    {_at(one.time)}  {one.kind}, node {one.node} of {one.run}: {one.reason}" for one in accused
        ]
    return {"machines": machines, "message": "\n".join(lines) or "No machine is suspected of faults."}


def _clear_record(name: str) -> dict[str, Any]:
    from myriad.supervise.driver.admission import clear, offenders_path
    from myriad.system.person import person

    offenders = _read()
    machines = offenders.named(name)
    if not machines:
        known = ", ".join(sorted(offenders.accused)) or "none"
        raise BadInputError("--pardon", name, f"must be a machine with records: {known}")
    try:
        for machine in machines:
            clear(machine, person())
    except OSError as error:
        raise BadInputError(
            "--pardon", name, f"{offenders_path()} cannot be written: {error.strerror}"
        ) from None
    return {"pardoned": machines, "message": f"{', '.join(machines)}: pardoned"}


def _read() -> "RepeatOffenders":
    from myriad.supervise.driver.admission import offenders_path, read_offenders

    try:
        return read_offenders()
    except OSError as error:
        raise BadInputError("--list", str(offenders_path()), f"cannot be read: {error.strerror}") from None


def _at(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


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
        typer.echo(json_format.dumps({"run": str(run), "node": was}))
