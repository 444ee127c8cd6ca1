"""``myriad plan --measure``: this machine as a cluster file, with a bar while it is measured."""

from pathlib import Path
from typing import TYPE_CHECKING

from myriad.cli.bars import share_bar
from myriad.errors import BadInputError

if TYPE_CHECKING:
    from myriad.planner.cluster import Cluster
from myriad.units import format_number

__all__ = ["cluster_path", "measure_to_file", "tell_measured"]


def measure_to_file(out: Path | None = None) -> "tuple[Cluster, Path]":
    """Measures and writes ``out``, or the file where ``--cluster this-machine`` looks. Raises `BadInputError`
    when it cannot be written: before measuring, as far as that can be known."""
    from myriad.train.measure import find_cluster_file, measure_cluster, write_cluster

    path = out or find_cluster_file()
    if path.is_dir() or path.suffix != ".toml":
        raise BadInputError("--out", str(path), "a file name that ends in .toml")
    with share_bar("measuring") as show:
        cluster = measure_cluster(show)
    try:
        write_cluster(cluster, path)
    except OSError as error:
        raise BadInputError("--out", str(path), f"cannot be written: {error.strerror}") from None
    return cluster, path


def cluster_path(name: str) -> str:
    """Where a cluster's file is: of ``this-machine`` where it was measured, which is now if it never was; of
    all others their name."""
    from myriad.train.cluster_file import CLUSTER_NAME, find_cluster_file

    if name != CLUSTER_NAME:
        return name
    path = find_cluster_file()
    if not path.is_file():
        measure_to_file()
    return str(path)


def tell_measured(cluster: "Cluster", path: Path) -> str:
    """One line."""
    core = cluster.accelerator
    rates = f"{core.peak_flops_per_second / 1e9:.0f} GFLOP/s bfloat16"
    if core.float32_flops_per_second:
        rates += f", {core.float32_flops_per_second / 1e9:.0f} float32"
    link = cluster.links.node.bytes_per_second / 1e9
    return (
        f"{core.name}, {cluster.shared_cores} cores of {rates}"
        f"; {format_number(link, 2)} GB/s between ranks\n{path}"
    )
