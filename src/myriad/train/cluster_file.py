"""Where the measured cluster is kept, and how it is written. No torch here: a plan reads it."""

import os
import time
from pathlib import Path

from myriad import __version__
from myriad.planner.cluster import Cluster
from myriad.toml_text import dump_toml
from myriad.whole_file import write_whole

__all__ = ["CLUSTER_NAME", "find_cluster_file", "write_cluster"]

CLUSTER_NAME = "this-machine"


def find_cluster_file() -> Path:
    """``$XDG_CACHE_HOME/myriad/this-machine.toml``, or in ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "myriad" / f"{CLUSTER_NAME}.toml"


def write_cluster(cluster: Cluster, path: Path) -> None:
    """As a cluster file that says when and how it was measured; whole or not at all. Raises `OSError`."""
    when = time.strftime("%Y-%m-%d %H:%M")
    head = (
        f"# Measured on {when} by myriad {__version__}: {cluster.accelerator.name},\n"
        f"# {cluster.shared_cores} cores, a process of one thread on each, all at once. A rank is a core;\n"
        "# ranks beyond the cores take turns on them. To measure again: myriad plan --measure\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, head + dump_toml(cluster))
