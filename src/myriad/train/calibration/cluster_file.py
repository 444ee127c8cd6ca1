"""The file of the measured cluster: its path and its format. This module does not import torch, because
plans use it."""

import os
import time
from pathlib import Path

from myriad import __version__
from myriad.config import dump_toml
from myriad.planner import Cluster
from myriad.system.whole_file import write_whole

__all__ = ["CLUSTER_NAME", "find_cluster_file", "write_cluster"]

CLUSTER_NAME = "this-machine"


def find_cluster_file() -> Path:
    """Return ``$XDG_CACHE_HOME/myriad/this-machine.toml``, by default in ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "myriad" / f"{CLUSTER_NAME}.toml"


def write_cluster(cluster: Cluster, path: Path) -> None:
    """Write a cluster file atomically, with when and how it was measured. Raises `OSError`."""
    when = time.strftime("%Y-%m-%d %H:%M")
    head = (
        f"# Measured on {when} by myriad {__version__}: {cluster.accelerator.name},\n"
        f"# {cluster.shared_cores} cores, a process of one thread on each, all at once. A rank is a core;\n"
        "# ranks beyond the cores take turns on them. To measure again: myriad plan --measure\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, head + dump_toml(cluster))
