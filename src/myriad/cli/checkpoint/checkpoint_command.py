"""``myriad checkpoint``: list, verify, compare, remove and store the checkpoints of a run."""

import contextlib
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

import typer

from myriad.cli.checkpoint import convert_command
from myriad.cli.json_output import print_json
from myriad.cli.progress_bar import bytes_bar
from myriad.cli.run_argument import CHECKPOINTS, existing_run
from myriad.system.spin_control import spinning_controlled
from myriad.units import format_bytes

__all__ = ["register"]

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
_Path = Annotated[str, typer.Argument(metavar="PATH", help=CHECKPOINTS)]
_One = Annotated[str, typer.Argument(metavar="PATH", help=f"{CHECKPOINTS} Of several, the newest.")]
_Run = Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or its name under runs/.")]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    text = (
        "Manage checkpoints: list, verify, diff, prune, reshard, save; export to and import from other "
        "systems."
    )
    verb = typer.Typer(no_args_is_help=True, help=text)
    verb.command("list")(_list)
    verb.command("verify")(_verify)
    verb.command("diff")(_diff)
    verb.command("prune")(_prune)
    verb.command("save")(_save)
    verb.command("release")(_release)
    convert_command.register(verb)
    app.add_typer(verb, name="checkpoint")


def _list(
    path: _Path,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every byte instead of comparing sizes.")
    ] = False,
    json: _Json = False,
) -> None:
    """List checkpoints: step, time, size, location, and whether they are complete.

    For a run it also lists the steps in this machine's memory. "held": the run ended and could not store that
    step; see `save` and `release`."""
    from myriad.checkpoint.storage.checkpoint_list import list_checkpoint, list_checkpoints
    from myriad.train.checkpoint_tools.locate_checkpoint import locate

    found = locate(path)
    if found.one is not None:
        rows = [list_checkpoint(found.one, every_byte=verify)]
    else:
        rows = list_checkpoints(found.run if found.is_run else None, found.whole_folder(), every_byte=verify)
    if json:
        print_json({"run": path, "checkpoints": rows})
    else:
        _show_rows(path, rows)


def _show_rows(run: str, rows: Sequence[dict[str, Any]]) -> None:
    from datetime import datetime

    from rich.console import Console
    from rich.table import Table

    if not rows:
        typer.echo(f"{run}: no checkpoint yet")
        return
    table = Table("step", "saved", "size", "tier", "state", box=None, header_style="bold")
    for row in rows:
        saved = "" if row["time"] is None else f"{datetime.fromtimestamp(row['time']):%Y-%m-%d %H:%M:%S}"
        size = "" if row["bytes"] is None else format_bytes(row["bytes"])
        table.add_row(str(row["step"]), saved, size, row["tier"], row["state"])
    Console().print(table)
    for problem in (problem for row in rows for problem in row["problems"]):
        typer.echo(problem)


def _verify(path: _Path, json: _Json = False) -> None:
    """Read every byte and list damaged chunks; exit code 1 if there are any."""
    from myriad.checkpoint.storage.checkpoint_folder import is_removed, verify
    from myriad.train.checkpoint_tools.locate_checkpoint import locate

    found: dict[str, list[str]] = {}
    place = locate(path)
    for checkpoint in place.checkpoints():
        with bytes_bar() as show:
            problems = verify(checkpoint, show=partial(show, checkpoint.name))
        # A removed checkpoint was pruned in the meantime.
        if not (problems and place.one is None and is_removed(checkpoint)):
            found[checkpoint.where] = problems
    if json:
        print_json({"path": path, "whole": not any(found.values()), "problems": found})
    else:
        for checkpoint_path, problems in found.items():
            typer.echo("\n".join(problems) if problems else f"{checkpoint_path}: whole")
        if not found:
            typer.echo(f"{path}: no checkpoint yet")
    if any(found.values()):
        raise typer.Exit(1)


def _diff(first: _One, second: _One, json: _Json = False) -> None:
    """Compare two checkpoints tensor by tensor; exit code 1 if any differ."""
    from myriad.train.checkpoint_tools.locate_checkpoint import locate, newest_whole

    paths = [newest_whole(locate(path), every_byte=False) for path in (first, second)]
    from myriad.checkpoint.checkpoint_files import compare_checkpoints

    where = [path.where for path in paths]
    with spinning_controlled():
        found = list(compare_checkpoints(*where))
    if json:
        print_json({"paths": where, "differences": [asdict(one) for one in found]})
    else:
        lines = [
            f"{one.name}: {one.what or f'up to {one.largest:.3g} ({one.relative:.1e} of the largest)'}"
            for one in found
        ]
        typer.echo("\n".join(lines) or f"{where[0]} and {where[1]}: equal bits")
    if found:
        raise typer.Exit(1)


def _prune(
    path: _Path,
    keep: Annotated[int, typer.Option(help="Number of newest checkpoints to keep.", min=1)],
    older_than: Annotated[
        float | None,
        typer.Option(
            metavar="DAYS", help="Remove checkpoints older than this even if fewer are kept.", min=0
        ),
    ] = None,
    damaged: Annotated[
        bool,
        typer.Option("--damaged", help="Remove checkpoints as well that a load found damaged and set aside."),
    ] = False,
    json: _Json = False,
) -> None:
    """Remove all but the newest checkpoints; the newest complete one always stays."""
    from myriad.run import Run
    from myriad.train.checkpoint_tools.locate_checkpoint import locate

    found = locate(path)
    folder = found.whole_folder()
    with contextlib.nullcontext() if found.run is None else Run(found.run).lock():
        newest = folder.newest()
        age = None if older_than is None else older_than * 86400
        removed = folder.prune(keep, newest[0], age) if newest else []
        removed += folder.remove_damaged() if damaged else []
    if json:
        print_json({"run": path, "removed": removed, "kept": folder.steps()})
    else:
        typer.echo(f"removed {len(removed)}, kept {', '.join(map(str, folder.steps())) or 'none'}")


def _save(
    run: _Run,
    to: Annotated[
        str | None,
        typer.Option(metavar="PLACE", help="Folder or URL without checkpoints. Default: the run's own."),
    ] = None,
    json: _Json = False,
) -> None:
    """Store the newest step of an ended run that this machine holds in memory.

    A run whose last checkpoint could not be stored (a full disk) ends, and its snapshot servers hold the
    state in memory until it is stored, released, or the machine goes down. This command stores it in PLACE,
    verifies it, and releases the memory. Resume with: myriad train RUN --checkpoint.url PLACE. With several
    nodes, run it on the node of rank 0; PLACE must be reachable from all nodes.
    """
    from myriad.train.checkpoint_tools.memory_rescue import save_from_memory

    done = save_from_memory(existing_run(run), to)
    if json:
        print_json(done)
        return
    typer.echo(f"step {done['step']} is stored and verified: {done['where']} ({format_bytes(done['bytes'])})")
    url = "" if to is None else f" --checkpoint.url {shlex.quote(done['url'])}"
    typer.echo(f"resume with: myriad train {shlex.quote(run)}{url}")


def _release(run: _Run, json: _Json = False) -> None:
    """Discard the unstored steps that an ended run holds in this machine's memory."""
    from myriad.train.checkpoint_tools.memory_rescue import release_memory

    steps = release_memory(existing_run(run))
    if json:
        print_json({"run": run, "released": steps})
    else:
        typer.echo(
            f"released from memory: step {', '.join(map(str, steps))}" if steps else "nothing was in memory"
        )
