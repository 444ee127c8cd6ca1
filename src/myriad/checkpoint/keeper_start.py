"""Starts the keeper of a node: by its first rank, or before, while that rank still imports what it needs."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from myriad.processes import open_log

__all__ = ["NODE", "keeper_name", "keeper_names", "node_keeper", "start_keeper"]

NODE = "MYRIAD_NODE"
"""Tells ranks, in their environment, which of several nodes they are on, whatever place it has in this
attempt; without it a node is what a launcher made."""
_SOCKETS = Path("/proc/net/unix")


def keeper_name(run: Path, node: int | None = None) -> str:
    """The same in every attempt of a run on a machine; ``node``: where several of its nodes may share it."""
    what = f"{run.resolve()}:{os.getuid()}"
    name = f"myriad-keeper-{hashlib.blake2s(what.encode(), digest_size=12).hexdigest()}"
    return name if node is None else f"{name}-{node}"


def node_keeper(run: Path, place: int | None = None) -> str:
    """Of the node that this process is on; ``place``: in its stead where no number was given to it."""
    told = os.environ.get(NODE)
    return keeper_name(run, place if told is None else int(told))


def keeper_names(run: Path) -> list[str]:
    """Of all nodes of the run that are on this machine at this moment."""
    name = keeper_name(run)
    lines = _SOCKETS.read_text().splitlines() if _SOCKETS.exists() else []
    found = {line.rpartition(" ")[2].removeprefix("@") for line in lines if f"@{name}" in line}
    return sorted(one for one in found if one == name or one.startswith(f"{name}-"))


def start_keeper(name: str, log: Path) -> "subprocess.Popen[bytes]":
    """In a session of its own: what ends this rank, or all ranks, does not end it."""
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    with open(open_log(log), "ab") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "myriad.checkpoint.keeper_process", name],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **one_thread},
            start_new_session=True,
        )
