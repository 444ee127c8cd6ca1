"""``myriad checkpoint``: what a run has saved, whether it is whole, and what differs between two."""

import json as json_format
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from myriad.cli import convert
from myriad.cli.bars import bytes_bar
from myriad.cli.runs import existing_run
from myriad.errors import BadInputError
from myriad.units import format_bytes

if TYPE_CHECKING:
    from myriad.checkpoint.folder import Checkpoint, CheckpointFolder

__all__ = ["register"]

_Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, for programs.")]
_Run = Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or its name under runs/.")]
_Path = Annotated[
    str, typer.Argument(metavar="PATH", help="Folder of a checkpoint, or a run: all of its, or the newest.")
]


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    told = "What a run has saved: list, verify, diff, prune, reshard; Hugging Face: export, import."
    verb = typer.Typer(no_args_is_help=True, help=told)
    verb.command("list")(_list)
    verb.command("verify")(_verify)
    verb.command("diff")(_diff)
    verb.command("prune")(_prune)
    convert.register(verb)
    app.add_typer(verb, name="checkpoint")


def _list(
    run: _Run,
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte, not only sizes.")] = False,
    json: _Json = False,
) -> None:
    """Show a run's checkpoints: step, time, size, where they are, and whether they are whole."""
    from myriad.checkpoint.listing import list_checkpoints

    path = existing_run(run)
    rows = list_checkpoints(path, _folder_of(path), every_byte=verify)
    if json:
        typer.echo(json_format.dumps({"run": run, "checkpoints": rows}))
    else:
        _show_rows(run, rows)


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
    from myriad.checkpoint.folder import verify

    found: dict[str, list[str]] = {}
    for checkpoint in _checkpoints(path):
        with bytes_bar() as show:
            found[checkpoint.where] = verify(checkpoint, show=partial(show, checkpoint.name))
    if json:
        typer.echo(json_format.dumps({"path": path, "whole": not any(found.values()), "problems": found}))
    else:
        for checkpoint_path, problems in found.items():
            typer.echo("\n".join(problems) if problems else f"{checkpoint_path}: whole")
        if not found:
            typer.echo(f"{path}: no checkpoint yet")
    if any(found.values()):
        raise typer.Exit(1)


def _diff(first: _Path, second: _Path, json: _Json = False) -> None:
    """Say which tensors of two checkpoints differ, and by how much; exit code 1 when one does."""
    paths = [_newest(path) for path in (first, second)]
    from myriad.checkpoint.difference import compare_checkpoints

    where = [path.where for path in paths]
    found = list(compare_checkpoints(*where))
    if json:
        typer.echo(json_format.dumps({"paths": where, "differences": [asdict(one) for one in found]}))
    else:
        lines = [
            f"{one.name}: {one.what or f'up to {one.largest:.3g} ({one.relative:.1e} of the largest)'}"
            for one in found
        ]
        typer.echo("\n".join(lines) or f"{where[0]} and {where[1]}: equal bits")
    if found:
        raise typer.Exit(1)


def _prune(
    run: _Run,
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

    path = existing_run(run)
    folder = _folder_of(path)
    with Run(path).lock():
        newest = folder.newest()
        age = None if older_than is None else older_than * 86400
        removed = folder.prune(keep, newest[0], age) if newest else []
        removed += folder.remove_damaged() if damaged else []
    if json:
        typer.echo(json_format.dumps({"run": run, "removed": removed, "kept": folder.steps()}))
    else:
        typer.echo(f"removed {len(removed)}, kept {', '.join(map(str, folder.steps())) or 'none'}")


def _folder_of(run: Path) -> "CheckpointFolder":
    from myriad.checkpoint.folder import CheckpointFolder
    from myriad.run import Run

    return CheckpointFolder(Run(run).checkpoints())


def _checkpoints(name_or_path: str) -> "list[Checkpoint]":
    """The one, or all of a run. Raises `BadInputError` for anything else."""
    from myriad.checkpoint.folder import open_checkpoint

    one = open_checkpoint(name_or_path)
    if any(one.storage.size(one.at(name)) is not None for name in ("manifest.json", ".metadata")):
        return [one]
    folder = _folder_of(existing_run(name_or_path))
    return [folder.at_step(step) for step in folder.steps()]


def _newest(name_or_path: str) -> "Checkpoint":
    found = _checkpoints(name_or_path)
    if not found:
        raise BadInputError("PATH", name_or_path, "a run that has saved a checkpoint")
    return found[-1]
