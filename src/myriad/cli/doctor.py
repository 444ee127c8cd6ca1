"""``myriad doctor``: this node, check by check, with what to do about what is not well."""

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from myriad.cli.bars import share_bar
from myriad.errors import RunFailedError
from myriad.units import format_bytes, format_count

if TYPE_CHECKING:
    from rich.table import Table

    from myriad.resilience.doctor.item import Diagnosis, Expected, Item

__all__ = ["doctor", "register"]

_BASELINE_ROUNDS = 3
_STYLES = {"ok": "green", "slow": "yellow", "bad": "bold red", "skipped": "dim"}


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command("doctor")(doctor)


def doctor(
    folder: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where runs or their checkpoints are written.")
    ] = Path("runs"),
    baseline: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What healthy nodes reach; by default the one kept for this user."),
    ] = None,
    save_baseline: Annotated[
        bool,
        typer.Option("--save-baseline", help="Measure this node three times and keep what it reaches."),
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object on standard output, for programs.")
    ] = False,
) -> None:
    """Test this node in some seconds, and say in words what is wrong with it.

    Memory, disk, network interfaces, its ranks among each other, accelerators, limits, versions, clock. Each
    check is ok, slow (below 80 % of the baseline), bad or skipped; exit code 1 when any is slow or bad.
    """
    from myriad.resilience.doctor.baseline import default_path, read_baseline

    path = baseline or default_path()
    if save_baseline:
        _save(folder, path, json=json)
        return
    expected = read_baseline(path) if baseline is not None or path.is_file() else {}
    diagnosis = _diagnose(folder, expected, quiet=json)
    if json:
        typer.echo(json_format.dumps(diagnosis.as_json() | {"baseline": str(path) if expected else None}))
    else:
        _show(diagnosis, path if expected else None)
    if not diagnosis.healthy:
        raise typer.Exit(1)


def _diagnose(folder: Path, expected: "Expected", *, quiet: bool, title: str = "testing") -> "Diagnosis":
    from myriad.resilience.doctor.node import diagnose

    with share_bar(title, quiet=quiet) as tell:
        return diagnose(folder, expected, tell=tell)


def _save(folder: Path, path: Path, *, json: bool) -> None:
    from myriad.resilience.doctor.baseline import merge, read_baseline, summarize, write_baseline

    old = read_baseline(path) if path.exists() else {}
    rounds = []
    for number in range(_BASELINE_ROUNDS):
        found = _diagnose(folder, {}, quiet=json, title=f"baseline, {number + 1} of {_BASELINE_ROUNDS}")
        if not found.healthy:
            raise RunFailedError(f"no baseline was saved, this node is not healthy: {found.words}")
        rounds.append(found.readings)
    new = summarize(rounds)
    write_baseline(path, merge(old, new))
    count = sum(len(measures) for measures in new.values())
    if json:
        typer.echo(json_format.dumps({"baseline": str(path), "hardware": new}))
    else:
        typer.echo(f"{count} values of {len(new)} kinds of hardware\n{path}")


def _show(diagnosis: "Diagnosis", baseline: Path | None) -> None:
    from rich.console import Console

    console = Console()
    console.print(_table(diagnosis))
    if baseline is None:
        told = "No baseline: rates are held against floors that only a broken node misses. On a healthy node:"
        console.print(f"{told}\n    myriad doctor --save-baseline", style="dim")
    else:
        console.print(f"Baseline: {baseline}", style="dim", soft_wrap=True)
    style = "green" if diagnosis.healthy else "bold red"
    console.print(f"{diagnosis.words} ({diagnosis.seconds:.1f} s)", style=style, soft_wrap=True)


def _table(diagnosis: "Diagnosis") -> "Table":
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    grid.add_column("", no_wrap=True)
    grid.add_column("check", overflow="fold", ratio=3)
    grid.add_column("measured", overflow="fold", ratio=2)
    grid.add_column("in words", overflow="fold", ratio=4)
    for item in diagnosis.items:
        style = "dim" if item.advisory else _STYLES[item.verdict]
        grid.add_row(Text(item.verdict, style), Text(item.name), Text(_measured(item)), Text(item.words))
    return grid


def _measured(item: "Item") -> str:
    value, unit = item.measured, item.unit
    if value is None or isinstance(value, str):
        return value or ""
    if unit.startswith("bytes"):
        return format_bytes(value) + unit.removeprefix("bytes")
    if unit in ("s", "ppm"):
        return f"{value:.3g} {unit}"
    return f"{format_count(value)} {unit}"
