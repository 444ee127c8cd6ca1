"""``myriad checkpoint``: what a run has saved, whether it is whole, and what differs between two."""

import contextlib
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

import typer

from myriad.cli import convert
from myriad.cli.bars import bytes_bar
from myriad.cli.json_output import print_json
from myriad.cli.runs import CHECKPOINTS, existing_run
from myriad.spin_watch import spinning_watched
from myriad.units import format_bytes

__all__ = ["register"]

_Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, for programs.")]
_Path = Annotated[str, typer.Argument(metavar="PATH", help=CHECKPOINTS)]
_One = Annotated[str, typer.Argument(metavar="PATH", help=f"{CHECKPOINTS} Of several, the newest.")]
_Run = Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or its name under runs/.")]


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    text = "Look after checkpoints: list, verify, diff, prune, reshard, save; other systems': export, import."
    verb = typer.Typer(no_args_is_help=True, help=text)
    verb.command("list")(_list)
    verb.command("verify")(_verify)
    verb.command("diff")(_diff)
    verb.command("prune")(_prune)
    verb.command("save")(_save)
    verb.command("release")(_release)
    convert.register(verb)
    app.add_typer(verb, name="checkpoint")


def _list(
    path: _Path,
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte, not only sizes.")] = False,
    json: _Json = False,
) -> None:
    """Show checkpoints: step, time, size, where they are, and whether they are whole.

    Of a run, also the steps in the memory of this machine; "held": the run has ended and could not store that
    step, see save and release."""
    from myriad.checkpoint.listing import list_checkpoint, list_checkpoints
    from myriad.train.locate import locate

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
    """Read every byte and name every chunk that is not as it was written; exit code 1 when there is one."""
    from myriad.checkpoint.folder import is_removed, verify
    from myriad.train.locate import locate

    found: dict[str, list[str]] = {}
    place = locate(path)
    for checkpoint in place.checkpoints():
        with bytes_bar() as show:
            problems = verify(checkpoint, show=partial(show, checkpoint.name))
        if not (problems and place.one is None and is_removed(checkpoint)):  # else: pruned meanwhile
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
    """Say which tensors of two checkpoints differ, and by how much; exit code 1 when one does."""
    from myriad.train.locate import locate, newest_whole

    paths = [newest_whole(locate(path), every_byte=False) for path in (first, second)]
    from myriad.checkpoint.difference import compare_checkpoints

    where = [path.where for path in paths]
    with spinning_watched():
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
    keep: Annotated[int, typer.Option(help="Checkpoints to keep, the newest ones.", min=1)],
    older_than: Annotated[
        float | None, typer.Option(metavar="DAYS", help="Remove older ones even if fewer are kept.", min=0)
    ] = None,
    damaged: Annotated[
        bool, typer.Option("--damaged", help="Remove those too that a load found damaged and set aside.")
    ] = False,
    json: _Json = False,
) -> None:
    """Remove all but the newest checkpoints; the newest that is whole always stays."""
    from myriad.run import Run
    from myriad.train.locate import locate

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
        typer.Option(
            metavar="PLACE", help="Folder or URL without checkpoints; default: where the run stores."
        ),
    ] = None,
    json: _Json = False,
) -> None:
    """Store the newest step that the memory of this machine holds of a run that has ended.

    A run whose last checkpoint could not be stored (a full disk) ends, and its snapshot servers hold the
    state in memory until it is stored, released, or the machine goes down. This stores it in PLACE, verifies
    it, and gives the memory back. Go on with: myriad train RUN --checkpoint.url PLACE. On several nodes run
    it where rank 0 was; PLACE must be reached from all of them."""
    from myriad.train.rescue import save_from_memory

    done = save_from_memory(existing_run(run), to)
    if json:
        print_json(done)
        return
    typer.echo(f"step {done['step']} is stored and verified: {done['where']} ({format_bytes(done['bytes'])})")
    url = "" if to is None else f" --checkpoint.url {shlex.quote(done['url'])}"
    typer.echo(f"go on: myriad train {shlex.quote(run)}{url}")


def _release(run: _Run, json: _Json = False) -> None:
    """Give up, unstored, what a run that has ended holds in the memory of this machine."""
    from myriad.train.rescue import release_memory

    steps = release_memory(existing_run(run))
    if json:
        print_json({"run": run, "released": steps})
    else:
        typer.echo(
            f"released from memory: step {', '.join(map(str, steps))}" if steps else "nothing was held"
        )
