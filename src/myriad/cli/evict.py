"""``myriad evict``: a person has a node leave a run, and sees or pardons machines in quarantine."""

import json as json_format
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from myriad.cli.runs import existing_run
from myriad.errors import BadInputError

if TYPE_CHECKING:
    from myriad.resilience.decide.lemons import Lemons

__all__ = ["evict", "register"]


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command("evict")(evict)


def evict(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="The run's folder, or its name under runs/.", show_default=False),
    ] = None,
    node: Annotated[
        int | None, typer.Argument(metavar="NODE", min=0, help="The number of the node.", show_default=False)
    ] = None,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Reason, kept in the run's event.")] = "",
    anyway: Annotated[
        bool,
        typer.Option(
            "--anyway",
            help="Evict even without a spare: the run then waits for a node, or has fewer replicas.",
        ),
    ] = False,
    show: Annotated[
        bool,
        typer.Option("--list", help="Machines that were accused of faults, and which are in quarantine."),
    ] = False,
    pardon: Annotated[
        str | None, typer.Option(metavar="HOST", help="Forget what a machine was accused of.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object on standard output, for programs.")
    ] = False,
) -> None:
    """Have a node leave a run that is at work; a spare takes its place.

    All ranks end after the step under way and begin again from memory, so no step is lost. The machine does
    not come back to this run. Typed on any machine that has the run's folder and reaches its driver.

    Instead of RUN and NODE: --list or --pardon HOST, of machines that were evicted from runs of yours.

    Exit code: 0 done, or as soon as the step is; 1 the driver is not reachable, 2 bad input.
    """
    if show or pardon is not None:
        _refuse_both(run, show=show, pardon=pardon)
        told = _list() if show else _pardon(str(pardon))
    elif run is None or node is None:
        raise BadInputError(
            "NODE" if run else "RUN", "", "is missing: RUN and NODE, or --list, or --pardon HOST"
        )
    else:
        told = _evict(existing_run(run), node, reason, anyway=anyway)
    typer.echo(json_format.dumps(told) if json else told["told"])


def _refuse_both(run: str | None, *, show: bool, pardon: str | None) -> None:
    if run is not None:
        raise BadInputError("RUN", run, "not with --list or --pardon")
    if show and pardon is not None:
        raise BadInputError("--pardon", pardon, "not with --list")


def _evict(run: Path, node: int, reason: str, *, anyway: bool) -> dict[str, Any]:
    from myriad.resilience.evict import evict as have_leave
    from myriad.run import Run

    return {"node": node, "told": have_leave(Run(run), node, reason=reason, anyway=anyway)}


def _list() -> dict[str, Any]:
    from dataclasses import asdict

    lemons, now = _read(), time.time()
    machines, lines = [], []
    for machine, accused in sorted(lemons.accused.items()):
        found = lemons.quarantine(machine, now)
        free_at = None if found is None else found.until
        machines.append({"machine": machine, "quarantine_until": free_at, "accused": [*map(asdict, accused)]})
        lines.append(f"{machine}: " + ("in no quarantine" if found is None else f"until {_at(found.until)}"))
        lines += [
            f"    {_at(one.time)}  {one.kind}, node {one.node} of {one.run}: {one.reason}" for one in accused
        ]
    return {"machines": machines, "told": "\n".join(lines) or "No machine was accused of anything."}


def _pardon(name: str) -> dict[str, Any]:
    from myriad.resilience.drive.lemon_file import clear, lemon_path
    from myriad.resilience.evict import person

    lemons = _read()
    machines = lemons.named(name)
    if not machines:
        known = ", ".join(sorted(lemons.accused)) or "none"
        raise BadInputError("--pardon", name, f"a machine that was accused of something: {known}")
    try:
        for machine in machines:
            clear(machine, person())
    except OSError as error:
        raise BadInputError("--pardon", name, f"{lemon_path()} cannot be written: {error.strerror}") from None
    return {"pardoned": machines, "told": f"{', '.join(machines)}: pardoned"}


def _read() -> "Lemons":
    from myriad.resilience.drive.lemon_file import lemon_path, read_lemons

    try:
        return read_lemons()
    except OSError as error:
        raise BadInputError("--list", str(lemon_path()), f"cannot be read: {error.strerror}") from None


def _at(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
