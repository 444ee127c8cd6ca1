"""``myriad plan --measure``: this machine as a cluster file, with a bar while it is measured."""

from pathlib import Path
from typing import TYPE_CHECKING

from myriad.errors import BadInputError

if TYPE_CHECKING:
    from myriad.planner.cluster import Cluster

__all__ = ["measure_to_file", "this_machine"]


def measure_to_file(out: Path | None = None, *, quiet: bool = False) -> "tuple[Cluster, Path]":
    """Measures and writes ``out``, or the file where ``--cluster this-machine`` looks. Raises `BadInputError`
    when it cannot be written: before measuring, as far as that can be known."""
    from rich import progress as bars
    from rich.console import Console

    from myriad.train.measure import find_cluster_file, measure_cluster, write_cluster

    path = out or find_cluster_file()
    if path.is_dir() or path.suffix != ".toml":
        raise BadInputError("--out", str(path), "a file name that ends in .toml")
    columns = (bars.TextColumn("measuring: {task.description}"), bars.BarColumn(), bars.TimeElapsedColumn())
    with bars.Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task("starting processes", total=1.0)
        cluster = measure_cluster(lambda what, done: bar.update(task, description=what, completed=done))
    try:
        write_cluster(cluster, path)
    except OSError as error:
        raise BadInputError("--out", str(path), f"cannot be written: {error.strerror}") from None
    return cluster, path


def this_machine(*, quiet: bool = False) -> "Cluster":
    """As measured before; measured now where it never was."""
    from myriad.planner.cluster import Cluster
    from myriad.recipes import read_recipe
    from myriad.train.cluster_file import find_cluster_file

    path = find_cluster_file()
    if not path.is_file():
        return measure_to_file(quiet=quiet)[0]
    return Cluster.model_validate(read_recipe("clusters", str(path), "--cluster")).check()
