"""``myriad plan --measure``: measure this machine and write it as a cluster file."""

from pathlib import Path
from typing import TYPE_CHECKING

from myriad.cli.progress_bar import share_bar
from myriad.errors import BadInputError

if TYPE_CHECKING:
    from myriad.planner import Cluster
from myriad.units import format_number

__all__ = ["cluster_path", "format_measured", "measure_to_file"]


def measure_to_file(out: Path | None = None) -> "tuple[Cluster, Path]":
    """Measure this machine and write ``out``, by default the file of ``--cluster this-machine``. Raises
    `BadInputError` when the file cannot be written, before measuring where that is known then."""
    from myriad.train.calibration.measure_machine import find_cluster_file, measure_cluster, write_cluster

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
    """Return the path of the measured file for ``this-machine``, after measuring if it does not exist yet.
    Any other name is returned unchanged."""
    from myriad.train.calibration.cluster_file import CLUSTER_NAME, find_cluster_file

    if name != CLUSTER_NAME:
        return name
    path = find_cluster_file()
    if not path.is_file():
        measure_to_file()
    return str(path)


def format_measured(cluster: "Cluster", path: Path) -> str:
    """Return a text with the measured rates, and the path of the file."""
    core = cluster.accelerator
    rates = f"{core.peak_flops_per_second / 1e9:.0f} GFLOP/s bfloat16"
    if core.float32_flops_per_second:
        rates += f", {core.float32_flops_per_second / 1e9:.0f} float32"
    link = cluster.links.node.bytes_per_second / 1e9
    return (
        f"{core.name}, {cluster.shared_cores} cores of {rates}"
        f"; {format_number(link, 2)} GB/s between ranks\n{path}"
    )
