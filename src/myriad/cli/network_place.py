"""``myriad network place``: which nodes jobs should have, in which order, and what that is worth."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from myriad.cli.files import check_output, check_picture, write_picture
from myriad.cli.json_output import print_json
from myriad.cli.overrides import OverrideCommand
from myriad.errors import BadInputError
from myriad.whole_file import write_whole

if TYPE_CHECKING:
    from myriad.cli.network_place_show import Placed
    from myriad.job import Job
    from myriad.planner.cluster import Cluster
    from myriad.planner.costs import Costs

__all__ = ["register"]

Export = Literal["slurm", "slurm-blocks", "ranks", "kubernetes"]
_USES = ("numbered", "random", "optimised")
"""Placements, in the order in which they are compared."""


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    metavar = "[OPTIONS] [--KEY VALUE]..."
    app.command("place", cls=OverrideCommand, options_metavar=metavar)(place)


def place(
    context: typer.Context,
    jobs: Annotated[
        list[str], typer.Argument(metavar="JOB...", help="Job files or recipes; several run at once.")
    ],
    cluster: Annotated[
        str, typer.Option(metavar="CLUSTER", help="A cluster file, or a recipe's name.")
    ] = "megascale-12288xa100",
    what_if: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Change the cluster: fabric.split=1; again for more."),
    ] = None,
    nodes: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LIST", help="Nodes that a job has, such as 0-63,70; once for each job. Off: any."
        ),
    ] = None,
    routing: Annotated[
        Literal["ecmp", "adaptive"], typer.Option(help="How switches choose among equal ways.")
    ] = "ecmp",
    queue_pairs: Annotated[
        int, typer.Option(min=1, max=64, help="Queue pairs of each transfer (NCCL_IB_QPS_PER_CONNECTION).")
    ] = 1,
    draws: Annotated[
        int, typer.Option(metavar="N", min=1, max=10_000, help="Draws of the switches' hash seeds.")
    ] = 32,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the first draw.")] = 0,
    use: Annotated[
        Literal["numbered", "random", "optimised"], typer.Option(help="The placement to export.")
    ] = "optimised",
    export: Annotated[
        Export | None,
        typer.Option(help="Write it for a scheduler: topology.conf, hosts of ranks, labels of nodes."),
    ] = None,
    to: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File that --export writes. Default: the terminal.")
    ] = None,
    names: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Names of the cluster's nodes, a line each; off: node0 and so on."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE.svg|png", help="Draw it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Lay jobs out on a cluster's fabric: ranks to nodes to switches, bytes by tier, conflicts, slowest ring.

    Compared are nodes as they are numbered, random ones, and the best that is found. Each draw of the hashes
    gives an iteration's time; p50 and p95 are over draws.
    """
    from myriad.cli.forecast import costs_of
    from myriad.cli.network_place_show import show

    if out is not None:
        check_picture("--out", out)
    if to is not None and export is None:
        raise BadInputError("--to", str(to), "goes with --export")
    if to is not None:
        check_output("--to", to)
    found_cluster, loaded = _read(cluster, what_if or (), jobs, OverrideCommand.of(context))
    hosts = _names(names, found_cluster.nodes)
    every = [costs_of(job, found_cluster) for job in loaded]
    placed = _place(loaded, every, nodes, routing, queue_pairs, range(seed, seed + draws))
    if out is not None:
        write_picture("--out", out, placed.picture())
    text = None if export is None else _exported(export, placed, _USES.index(use), hosts)
    if to is not None and text is not None:
        _write(to, text)
    if as_json:
        facts = placed.as_json() | ({} if text is None or to is not None else {"export": text})
        print_json(facts)
    elif text is not None and to is None:
        typer.echo(text, nl=False)
    else:
        show(placed, [str(path) for path in (out, to) if path is not None])


def _read(
    name: str, changes: Sequence[str], jobs: Sequence[str], overrides: Sequence[str]
) -> "tuple[Cluster, list[Job]]":
    from myriad.cli.measure import cluster_path
    from myriad.job import load_job
    from myriad.recipes.cluster import load_cluster

    cluster = load_cluster(cluster_path(name), changes)
    return cluster, [load_job(job, overrides) for job in jobs]


def _place(
    jobs: "Sequence[Job]",
    every: "Sequence[Costs]",
    nodes: Sequence[str] | None,
    routing: Literal["ecmp", "adaptive"],
    queue_pairs: int,
    seeds: range,
) -> "Placed":
    from myriad.cli.bars import share_bar
    from myriad.cli.network_place_show import Placed
    from myriad.network.routing import Routes
    from myriad.planner.cluster_fabric import fabric_of
    from myriad.planner.job_placement import JobsOnFabric
    from myriad.planner.rescore import Simulations

    cluster, simulations = every[0].cluster, Simulations()
    routes, given = Routes(fabric_of(cluster)), _given(nodes, len(jobs), cluster.nodes)
    on_fabric = JobsOnFabric(
        every, routes, simulations.seconds, nodes=given, queue_pairs=queue_pairs, routing=routing
    )
    verdicts, ways = [], (on_fabric.numbered, lambda: on_fabric.random(seeds[0]), on_fabric.optimised)
    with share_bar("placing") as show:
        for number, (name, way) in enumerate(zip(_USES, ways, strict=True)):
            show(name, number / len(ways))
            verdicts.append(on_fabric.verdicts(way(), seeds))
    plain = [simulations.seconds(costs) for costs in every]
    return Placed(tuple(jobs), tuple(every), routes.fabric, verdicts, plain, routing, queue_pairs, len(seeds))


def _given(nodes: Sequence[str] | None, num_jobs: int, num_nodes: int) -> list[list[int]] | None:
    """Nodes of each job."""
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
            raise BadInputError("--nodes", text, "each node once, of one job")
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


def _exported(export: Export, placed: "Placed", use: int, names: Sequence[str]) -> str:
    import yaml

    from myriad.network import topology_files as files
    from myriad.network.placement import Neighbourhoods

    near = Neighbourhoods(placed.fabric)
    if export == "slurm":
        return files.slurm_tree(near, names)
    if export == "slurm-blocks":
        return files.slurm_blocks(near, names)
    nodes = placed.nodes(use)
    if export == "kubernetes":
        jobs = dict(zip(placed.titles, nodes, strict=True))
        return yaml.safe_dump_all(files.node_labels(near, names, jobs), sort_keys=False)
    if len(nodes) > 1:
        raise BadInputError("--export", export, "of one job: each is started with a file of its own")
    per_node = placed.costs[0].cluster.accelerators_per_node
    return files.host_file(nodes[0], placed.jobs[0].layout.world, per_node, names)


def _write(path: Path, text: str) -> None:
    try:
        write_whole(path, text)
    except OSError as error:
        raise BadInputError("--to", str(path), f"cannot be written: {error.strerror}") from None
