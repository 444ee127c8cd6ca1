"""``myriad plan --calibrate``: rates of a cluster fitted to a user's own iterations, as a cluster file."""

import time
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from myriad import __version__
from myriad.cli.json_output import print_json
from myriad.cli.output_files import read_earlier, write_output
from myriad.cli.progress_bar import count_bar
from myriad.errors import BadInputError

if TYPE_CHECKING:
    from myriad.planner import Calibration, Cluster, ErrorScore, FittedCluster

__all__ = ["calibrate_cluster"]

_HEAD = "# Calibrated by myriad plan --calibrate"


def calibrate_cluster(
    table: Path, cluster: str, framework: str | None, out: Path | None, *, as_json: bool
) -> None:
    """Fit the cluster's rates to the rows of a table, write ``out``, and print what has changed. Raises
    `BadInputError`."""
    from myriad.planner import (
        Calibration,
        TableOptions,
        fit_cluster,
        read_table,
        scaled_cluster,
        steps_of,
    )
    from myriad.recipes.cluster import load_cluster
    from myriad.recipes.framework import ReadyRecipes, load_framework

    _check_out(out)
    assert out is not None
    base = load_cluster(cluster)
    if framework is not None:
        load_framework(framework)
    read = read_table(str(table), ReadyRecipes(), TableOptions(framework=framework, cluster=cluster))
    if not read.is_general:
        allowed = "a table in the general form (docs/guide/validate.md): its rows ran on another cluster"
        raise BadInputError("--calibrate", str(table), allowed)
    rows = read.rows
    total, done = steps_of(len(rows)), count(1)
    with count_bar("fitting") as show:
        fitted = fit_cluster(rows, lambda: show("fitting", next(done), total))
    calibration = Calibration(
        framework=rows[0].framework,
        rows=len(rows),
        experts=rows[0].has_experts,
        interval_ratio=round(fitted.interval, 4),
    )
    name = f"{base.name.removesuffix(_SUFFIX)}{_SUFFIX}"
    found = scaled_cluster(base, fitted.factors).model_copy(update={"name": name, "calibration": calibration})
    _write(out, found, fitted)
    if as_json:
        print_json({"out": str(out), **_as_json(fitted, calibration)})
    else:
        _print(out, fitted, calibration)


_SUFFIX = "-calibrated"


def _check_out(out: Path | None) -> None:
    """Raise `BadInputError` for a file that is not a calibrated cluster."""
    if out is None:
        raise BadInputError("--out", None, "needed with --calibrate: the cluster file to write")
    read_earlier("--out", out, _HEAD, "a cluster that --calibrate wrote")


def _write(out: Path, cluster: "Cluster", fitted: "FittedCluster") -> None:
    from myriad.config import dump_toml

    factors = ", ".join(f"{name} x {value:.3f}" for name, value in fitted.factors._asdict().items())
    head = f"{_HEAD} on {time.strftime('%Y-%m-%d %H:%M')}, myriad {__version__}\n# rates: {factors}\n"
    write_output("--out", out, head + dump_toml(cluster))


_NAMES = {
    "products": "matrix products",
    "streams": "attention, operators between products",
    "node": "links inside a node",
    "network": "links between nodes",
}


def _scores(fitted: "FittedCluster") -> "dict[str, ErrorScore]":
    return {"before": fitted.before, "after": fitted.after, "left_out": fitted.left_out}


def _as_json(fitted: "FittedCluster", calibration: "Calibration") -> dict[str, Any]:
    scores = {
        name: {"errors": list(one.errors), "mean_error_ratio": one.mean, "bias_ratio": one.bias}
        for name, one in _scores(fitted).items()
    }
    factors = {"factors": fitted.factors._asdict(), "at_bound": list(fitted.at_bound)}
    return factors | scores | calibration.model_dump()


def _print(out: Path, fitted: "FittedCluster", calibration: "Calibration") -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    factors = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    factors.add_column("rate")
    factors.add_column("x", justify="right")
    for name, value in fitted.factors._asdict().items():
        factors.add_row(_NAMES[name], f"{value:.2f}")
    errors = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    errors.add_column("errors of predictions")
    for name in ("mean", "worst", "bias"):
        errors.add_column(name, justify="right")
    titles = ("before", "after", "each row left out")
    for title, one in zip(titles, _scores(fitted).values(), strict=True):
        errors.add_row(title, f"{one.mean:.1%}", f"{one.worst:.1%}", f"{one.bias:+.1%}")
    console.print(factors, "", errors, "")
    for name in fitted.at_bound:
        value = getattr(fitted.factors, name)
        text = f"{_NAMES[name]} x {value:.2f} is the bound: check the rows' GPUs, batch and seconds"
        console.print(f"warning: {text}", style="yellow", highlight=False, soft_wrap=True)
    console.print(
        f"nine of ten times of other layouts of {calibration.framework} are within "
        f"{calibration.interval_ratio:.0%}\n{out}",
        highlight=False,
        soft_wrap=True,
    )
