"""``myriad network place``: the nodes for each job, their order, and the seconds that it saves."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from myriad.cli.job_key_options import OverrideCommand
from myriad.cli.json_output import print_json
from myriad.cli.output_files import check_output, check_picture, write_picture
from myriad.cli.shared_options import ClusterChanges, ClusterFile
from myriad.errors import BadInputError
from myriad.system.whole_file import write_whole
from myriad.units import format_number

if TYPE_CHECKING:
    from rich.console import Console

    from myriad.forecasts.compared_placements import ComparedPlacements
    from myriad.job import Job
    from myriad.planner import Cluster

__all__ = ["register"]

Export = Literal["slurm", "slurm-blocks", "ranks", "kubernetes"]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    metavar = "[OPTIONS] [--KEY VALUE]..."
    app.command("place", cls=OverrideCommand, options_metavar=metavar)(place)


def place(
    context: typer.Context,
    jobs: Annotated[
        list[str],
        typer.Argument(metavar="JOB...", help="Job files or recipes; several jobs run at the same time."),
    ],
    cluster: ClusterFile = "megascale-12288xa100",
    what_if: ClusterChanges = None,
    nodes: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LIST", help="Nodes of a job, such as 0-63,70; once for each job. Default: any."
        ),
    ] = None,
    routing: Annotated[
        Literal["ecmp", "adaptive"], typer.Option(help="How switches choose among equal paths.")
    ] = "ecmp",
    queue_pairs: Annotated[
        int, typer.Option(min=1, max=64, help="Queue pairs of each transfer (NCCL_IB_QPS_PER_CONNECTION).")
    ] = 1,
    draws: Annotated[
        int, typer.Option(metavar="N", min=1, max=10_000, help="Draws of the switches' hash seeds.")
    ] = 32,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the first draw.")] = 0,
    use: Annotated[
        Literal["numbered", "random", "optimised"], typer.Option(help="Placement to export.")
    ] = "optimised",
    export: Annotated[
        Export | None,
        typer.Option(help="Export for a scheduler: topology.conf, host list of ranks, or node labels."),
    ] = None,
    to: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File that --export writes. Default: the terminal.")
    ] = None,
    names: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File with the names of the nodes, one a line. Default: node0, node1, ..."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE.svg|png", help="Draw the placements.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Place jobs on the nodes of a cluster: bytes by switch tier, hash conflicts, slowest ring, iteration
    time.

    Compares nodes as numbered, random nodes, and the best placement that is found. p50 and p95 are over draws
    of the switches' hash seeds.
    """
    from myriad.cli.progress_bar import share_bar
    from myriad.forecasts.compared_placements import PLACEMENTS, compare_placements

    if out is not None:
        check_picture("--out", out)
    if to is not None and export is None:
        raise BadInputError("--to", str(to), "only with --export")
    if to is not None:
        check_output("--to", to)
    found_cluster, loaded = _read(cluster, what_if or (), jobs, OverrideCommand.of(context))
    hosts = _names(names, found_cluster.nodes)
    with share_bar("placing") as progress:
        placed = compare_placements(
            loaded,
            found_cluster,
            nodes=_given(nodes, len(loaded), found_cluster.nodes),
            routing=routing,
            queue_pairs=queue_pairs,
            seeds=range(seed, seed + draws),
            progress=progress,
        )
    if out is not None:
        from myriad.reports.charts.placement_chart import placement_picture

        write_picture("--out", out, placement_picture(placed))
    text = None if export is None else _exported(export, placed, PLACEMENTS.index(use), hosts)
    if to is not None and text is not None:
        _write(to, text)
    if as_json:
        facts = placed.as_json() | ({} if text is None or to is not None else {"export": text})
        print_json(facts)
    elif text is not None and to is None:
        typer.echo(text, nl=False)
    else:
        _show(placed, [str(path) for path in (out, to) if path is not None])


def _read(
    name: str, changes: Sequence[str], jobs: Sequence[str], overrides: Sequence[str]
) -> "tuple[Cluster, list[Job]]":
    from myriad.cli.measured_cluster import cluster_path
    from myriad.job import load_job
    from myriad.recipes.cluster import load_cluster

    cluster = load_cluster(cluster_path(name), changes)
    return cluster, [load_job(job, overrides) for job in jobs]


def _given(nodes: Sequence[str] | None, num_jobs: int, num_nodes: int) -> list[list[int]] | None:
    """Parse the nodes of each job."""
    from myriad.units import parse_ranges

    if not nodes:
        return None
    if len(nodes) != num_jobs:
        raise BadInputError("--nodes", f"{len(nodes)} lists", f"one for each of the {num_jobs} jobs, or none")
    taken: set[int] = set()
    found = []
    for text in nodes:
        try:
            own = [node for part in parse_ranges(text, num_nodes) for node in part]
        except ValueError:
            allowed = f"nodes from 0 to {num_nodes - 1}, like 3 or 0-7,12"
            raise BadInputError("--nodes", text, allowed) from None
        twice = len(set(own)) < len(own) or bool(taken & set(own))
        if twice:
            raise BadInputError("--nodes", text, "each node may be listed once, for one job")
        taken |= set(own)
        found.append(own)
    return found


def _names(path: Path | None, num_nodes: int) -> list[str]:
    if path is None:
        return [f"node{number}" for number in range(num_nodes)]
    try:
        names = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError("--names", str(path), f"cannot be read: {error}") from None
    if len(names) != num_nodes or len(set(names)) < len(names):
        allowed = f"{num_nodes} different names, one for each node of the cluster"
        raise BadInputError("--names", f"{len(set(names))} in {path}", allowed)
    return names


def _exported(export: Export, placed: "ComparedPlacements", use: int, names: Sequence[str]) -> str:
    import yaml

    from myriad.network import node_placement as placement

    near = placement.TopologyDomains(placed.fabric)
    if export == "slurm":
        return placement.slurm_tree(near, names)
    if export == "slurm-blocks":
        return placement.slurm_blocks(near, names)
    nodes = placed.nodes(use)
    if export == "kubernetes":
        jobs = dict(zip(placed.titles, nodes, strict=True))
        return yaml.safe_dump_all(placement.node_labels(near, names, jobs), sort_keys=False)
    if len(nodes) > 1:
        raise BadInputError("--export", export, "only with one JOB: each job needs its own file")
    per_node = placed.costs[0].cluster.accelerators_per_node
    return placement.host_file(nodes[0], placed.jobs[0].layout.world, per_node, names)


def _write(path: Path, text: str) -> None:
    try:
        write_whole(path, text)
    except OSError as error:
        raise BadInputError("--to", str(path), f"cannot be written: {error.strerror}") from None


def _show(placed: "ComparedPlacements", files: Sequence[str]) -> None:
    """Print a table for each job, then the files that were written."""
    from rich.console import Console

    console = Console(highlight=False)
    console.print(placed.headline(), style="bold", soft_wrap=True)
    console.print(placed.conditions(), style="dim", soft_wrap=True)
    for job, title in enumerate(placed.titles):
        _show_job(console, placed, job, title)
    console.print(
        "slowest ring: share of its ports' rate, median over draws; meet: share of the rings' flows above "
        "a first-tier switch that share a link which is too narrow for them",
        style="dim",
        soft_wrap=True,
    )
    for file in files:
        console.print(file, soft_wrap=True)


def _show_job(console: "Console", placed: "ComparedPlacements", job: int, title: str) -> None:
    from rich.table import Table

    from myriad.forecasts.compared_placements import TIERS, format_iteration

    plain = placed.plain_seconds[job]
    caption = f"{title}: {format_iteration(plain)} an iteration, predicted without switches"
    table = Table(box=None, title=caption, title_justify="left", title_style="bold", pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in (*(f"TB {tier}" for tier in TIERS), "meet", "slowest ring", "p50", "p95"):
        table.add_column(name, justify="right", no_wrap=name in ("p50", "p95"))
    for number, row in enumerate(placed.verdicts):
        one = row[job]
        p50, p95, ring = placed.quantiles(number, job)
        cells = [_terabytes(size) for size in one.tier_bytes]
        ends = (f"{one.shared_ratio:.1%}", f"{ring:.2f}", format_iteration(p50), format_iteration(p95))
        table.add_row(one.arrangement.name, *cells, *ends)
    console.print(table)


def _terabytes(num_bytes: float) -> str:
    if 0 < num_bytes < 1e10:
        return "<0.01"
    return f"{num_bytes / 1e12:,.0f}" if num_bytes >= 1e14 else format_number(num_bytes / 1e12)
