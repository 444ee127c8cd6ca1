"""``myriad network tune``: the environment for NCCL and gloo on a cluster, each line with its reason."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from myriad.cli.output_files import check_picture, write_picture
from myriad.cli.progress_bar import count_bar
from myriad.cli.shared_options import ClusterFile, HasDriver
from myriad.errors import BadInputError

if TYPE_CHECKING:
    from myriad.network.link_flaps import FlapScenario
    from myriad.planner import Cluster, EnvAdvice

__all__ = ["register"]

_RETRANSMISSION = "mlxreg -d DEVICE --reg_name ROCE_ACCL --set roce_adp_retrans_en=1"


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("tune")(tune)


def tune(
    cluster: ClusterFile,
    what_if: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Change the cluster, e.g. nics.transport=roce; repeatable."),
    ] = None,
    down: Annotated[
        str,
        typer.Option(metavar="TIMES", help="Down times of links, as for `myriad network flap`."),
    ] = "lognormal:2:1",
    driver: HasDriver = True,
    patience: Annotated[float, typer.Option(help="resilience.timeout_scale of the job.")] = 1.0,
    export: Annotated[
        Literal["sh", "env", "json"] | None,
        typer.Option(
            help="Print only the variables to set: for `eval` and job scripts, as an env file, or as JSON."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.svg|png", help="Draw the curves from which queue pairs and timeout are chosen."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print every line with its reason as JSON.")
    ] = False,
) -> None:
    """Print environment variables for NCCL and gloo on this cluster, with reasons.

    Sets a variable if the cluster's file, or a model of its fabric, calls for a value other than NCCL's
    default. Also lists the variables that are best left alone, and the facts that the cluster's file lacks.

    eval "$(myriad network tune --cluster CLUSTER --export sh)"; ranks inherit it from `myriad train`.
    """
    from myriad.forecasts.flap_answer import JobTolerance, LinkRates, link_habits
    from myriad.planner import tune
    from myriad.recipes.cluster import load_cluster

    if out is not None:
        check_picture("--out", out)
    found = load_cluster(cluster, what_if or ())
    habits = link_habits(found, down, LinkRates(), JobTolerance(driver, patience, None))
    with count_bar("comparing settings") as progress:
        lines = tune(found, habits)
        if out is not None:
            progress("drawing", 0, 0)
            _draw(out, found, habits, lines)
    if as_json or export == "json":
        typer.echo(_as_json(found, lines, only_set=not as_json))
    elif export is None:
        _print(found, lines, out)
    else:
        for text in _exported(lines, export):
            typer.echo(text)


def _draw(out: Path, cluster: "Cluster", habits: "FlapScenario", lines: "Sequence[EnvAdvice]") -> None:
    from myriad.planner import tuning_evidence
    from myriad.reports.charts.tuning_chart import draw

    found = tuning_evidence(cluster, habits, lines)
    if found is None:
        raise BadInputError(
            "--out", str(out), "only for a cluster with RDMA: with sockets there is nothing to draw"
        )
    write_picture("--out", out, draw(cluster.name, found))


def _exported(lines: "Sequence[EnvAdvice]", form: Literal["sh", "env"]) -> list[str]:
    texts = []
    for line in lines:
        if line.what == "set" and form == "sh":
            texts += [f"# {line.reason}", f"export {line.name}={shlex.quote(line.value)}"]
        elif line.what == "set":
            texts.append(f"{line.name}={line.value}")
    return texts


def _as_json(cluster: "Cluster", lines: "Sequence[EnvAdvice]", *, only_set: bool) -> str:
    if only_set:
        return json.dumps({line.name: line.value for line in lines if line.what == "set"})
    every = [
        {"what": line.what, "name": line.name, "value": line.value or None, "reason": line.reason}
        for line in lines
    ]
    return json.dumps({"cluster": cluster.name, "lines": every, "nics": _nic_settings(cluster)})


def _nic_settings(cluster: "Cluster") -> list[str]:
    nics = cluster.nics
    if nics is None or nics.transport != "roce" or not nics.adaptive_retransmission:
        return []
    return [_RETRANSMISSION]


def _print(cluster: "Cluster", lines: "Sequence[EnvAdvice]", out: Path | None) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    titles = {"set": "set", "left alone": "left alone, NCCL's own choice is right", "not known": "not known"}
    for what, title in titles.items():
        some = [line for line in lines if line.what == what]
        if some:
            console.print(Text(title, style="bold"))
        for line in some:
            console.print(Text(f"  {line.assignment}"), soft_wrap=True)
            console.print(Text(f"      {line.reason}", style="dim"), soft_wrap=True)
    if settings := _nic_settings(cluster):
        console.print(Text("and on every NIC, by its administrator", style="bold"))
        for setting in settings:
            console.print(Text(f"  {setting}"), soft_wrap=True)
            why = "the first resends of what a flap lost come after milliseconds (myriad network flap)"
            console.print(Text(f"      {why}", style="dim"), soft_wrap=True)
    note = "Names and defaults: NCCL's documentation. Nothing was run: check with NCCL_DEBUG=INFO."
    console.print(Text(note, style="dim"), soft_wrap=True)
    if out is not None:
        console.print(str(out), soft_wrap=True)
