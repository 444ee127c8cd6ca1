"""``myriad network ecmp``: flows that hash to the same link, under one switch or on a cluster's fabric."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from myriad.cli.json_output import print_json
from myriad.cli.output_files import check_picture, write_picture
from myriad.cli.progress_bar import share_bar
from myriad.cli.shared_options import ClusterChanges
from myriad.errors import BadInputError

if TYPE_CHECKING:
    from myriad.network.ecmp_remedies import EcmpRow, FabricStudy, SwitchStudy
    from myriad.planner import Cluster

__all__ = ["ecmp", "register"]

_MOST_DRAWS = 10_000


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("ecmp")(ecmp)


def ecmp(
    flows: Annotated[
        int | None,
        typer.Option(metavar="N", help="Flows that leave one switch at the same time. Default: 32."),
    ] = None,
    uplinks: Annotated[
        int | None, typer.Option(metavar="N", help="Uplinks of that switch. Default: 32.")
    ] = None,
    split: Annotated[
        int | None, typer.Option(metavar="N", help="Flows that an uplink carries at full rate. Default: 1.")
    ] = None,
    queue_pairs: Annotated[
        int, typer.Option(metavar="N", help="Queue pairs of each flow; each has its own hash.")
    ] = 1,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="CLUSTER", help="Route rings over the nodes of this cluster: a file or a recipe."
        ),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(metavar="N", help="Number of the cluster's accelerators to use.")
    ] = None,
    what_if: ClusterChanges = None,
    placement: Annotated[
        str | None,
        typer.Option(
            metavar="WAY",
            help="Placement of a ring's nodes: packed under switches (default), spread, or random.",
        ),
    ] = None,
    ring_nodes: Annotated[
        int | None, typer.Option(metavar="N", help="Nodes of a ring. Default: all.")
    ] = None,
    draws: Annotated[
        int | None, typer.Option(metavar="N", help="Draws of the switches' hash seeds. Default: 20.")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Seed of the first draw, and of a random placement.")
    ] = 0,
    out: Annotated[Path | None, typer.Option(metavar="FILE.svg|png", help="Draw a picture.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show how much flows lose that hash to the same link, and what would help.

    Without --cluster: one switch, computed exactly as balls in bins. With --cluster: rings of nodes, one for
    each port, routed over the fabric for each draw of hash seeds.

    slowest: fraction of its rate that the slowest flow gets; a collective is as fast as that flow. slowed:
    flows below their full rate. conflict: probability that any flow is slowed.
    """
    if out is not None:
        check_picture("--out", out)
    if cluster is None:
        unread = {"--gpus": gpus, "--what-if": what_if, "--placement": placement}
        _refuse(unread | {"--ring-nodes": ring_nodes, "--draws": draws}, "only with --cluster")
        _show_switch(_switch(flows, uplinks, split, queue_pairs), out, as_json)
        return
    _refuse({"--flows": flows, "--uplinks": uplinks, "--split": split}, "only without --cluster")
    found = _cluster(cluster, gpus, what_if or [])
    question = _fabric(found, placement, ring_nodes, queue_pairs, draws, seed)
    _show_fabric(found, question, out, as_json)


def _refuse(given: Mapping[str, object], why: str) -> None:
    for option, value in given.items():
        if value is not None:
            raise BadInputError(option, value, why)


def _switch(flows: int | None, uplinks: int | None, split: int | None, pairs: int) -> "SwitchStudy":
    from myriad.network.ecmp_remedies import SwitchStudy

    flows, uplinks, split = (
        32 if flows is None else flows,
        32 if uplinks is None else uplinks,
        1 if split is None else split,
    )
    given = {"--flows": flows, "--uplinks": uplinks, "--split": split, "--queue-pairs": pairs}
    for option, value in given.items():
        if value < 1:
            raise BadInputError(option, value, "at least 1")
    return SwitchStudy(num_flows=flows, num_uplinks=uplinks, split=split, queue_pairs=pairs)


def _cluster(name: str, gpus: int | None, changes: Sequence[str]) -> "Cluster":
    from myriad.planner import scale_cluster
    from myriad.recipes.cluster import load_cluster

    cluster = load_cluster(name, changes)
    return cluster if gpus is None else scale_cluster(cluster, gpus)


def _fabric(
    cluster: "Cluster",
    placement: str | None,
    ring_nodes: int | None,
    queue_pairs: int,
    draws: int | None,
    seed: int,
) -> "FabricStudy":
    from myriad.network.ecmp_remedies import FabricStudy
    from myriad.planner import builder_of, shape_of

    if ring_nodes is not None and not 2 <= ring_nodes <= cluster.nodes:
        raise BadInputError("--ring-nodes", ring_nodes, f"2 to {cluster.nodes}, the nodes of {cluster.name}")
    if draws is not None and not 1 <= draws <= _MOST_DRAWS:
        raise BadInputError("--draws", draws, f"1 to {_MOST_DRAWS:,}")
    return FabricStudy(
        build=builder_of(cluster),
        shape=shape_of(cluster),
        placement=placement or "packed",
        ring_nodes=ring_nodes,
        queue_pairs=queue_pairs,
        draws=20 if draws is None else draws,
        seed=seed,
    )


def _show_switch(question: "SwitchStudy", out: Path | None, as_json: bool) -> None:
    from myriad.network.ecmp_remedies import curves, switch_rows

    rows = switch_rows(question)
    title = f"{question.num_flows} flows on {question.num_uplinks} uplinks"
    title += f", split {question.split}, {_pairs(question.queue_pairs)}"
    if out is not None:
        from myriad.reports.charts.ecmp_chart import draw_curves

        asked = (question.num_flows, rows[0].slowest_ratio)
        write_picture("--out", out, draw_curves(title, curves(question), asked))
    _print_rows({"question": asdict(question)}, title, rows, as_json)


def _show_fabric(cluster: "Cluster", question: "FabricStudy", out: Path | None, as_json: bool) -> None:
    from myriad.network.ecmp_remedies import fabric_rows

    with share_bar("drawing hashes") as show:
        rows = fabric_rows(question, show)
    nodes = question.ring_nodes or cluster.nodes
    title = f"{cluster.name}: rings of {nodes} nodes, {question.placement}, {_pairs(question.queue_pairs)}"
    if out is not None:
        from myriad.reports.charts.ecmp_chart import draw_bars

        write_picture("--out", out, draw_bars(title, rows))
    facts = {
        "cluster": cluster.name,
        "nodes": cluster.nodes,
        "fabric": question.shape.model_dump(mode="json", exclude_none=True),
        "placement": question.placement,
        "ring_nodes": nodes,
        "queue_pairs": question.queue_pairs,
        "draws": question.draws,
        "seed": question.seed,
    }
    _print_rows(facts, title, rows, as_json)


def _pairs(count: int) -> str:
    return f"{count} queue pair{'s' if count > 1 else ''} a flow"


def _print_rows(facts: dict[str, Any], title: str, rows: "Sequence[EcmpRow]", as_json: bool) -> None:
    from myriad.network.ecmp_remedies import advice

    if as_json:
        print_json(facts | {"rows": [asdict(row) for row in rows], "advice": advice(rows)})
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    grid.add_column("", no_wrap=True)
    has_range = any(row.low_ratio < row.high_ratio for row in rows)
    names = ("slowest", *(("p5", "p95") if has_range else ()), "mean", "slowed", "conflict")
    for name in names:
        grid.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        shares = (row.slowest_ratio, *((row.low_ratio, row.high_ratio) if has_range else ()), row.mean_ratio)
        cells = [f"{share:.2f}" for share in shares]
        cells += [f"{row.held_up_ratio:.0%}", f"{row.conflict_probability:.0%}"]
        grid.add_row(row.name, *cells, style="bold" if row.is_asked else "")
    console = Console()
    console.print(Text(title, style="bold"), soft_wrap=True)
    console.print(grid)
    console.print(advice(rows), style="dim", markup=False, highlight=False)
