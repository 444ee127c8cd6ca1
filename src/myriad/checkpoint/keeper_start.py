"""Starts the keeper of a node: by its first rank, or before, while that rank still imports what it needs.

A server is found by its name, a hash of the run's path and of the random content of RUN/id. So a run that is
removed and trained again under the same name does not go on from what its predecessor left in memory.
"""

import hashlib
import os
import secrets
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from myriad.processes import open_log
from myriad.whole_file import create_whole

__all__ = ["NODE", "keeper_name", "keeper_names", "node_keeper", "start_keeper"]

NODE = "MYRIAD_NODE"
"""Tells ranks, in their environment, which of several nodes they are on, whatever place it has in this
attempt; without it a node is what a launcher made."""
_SOCKETS, _MARK = Path("/proc/net/unix"), "id"


def keeper_name(run: Path, node: int | None = None) -> str:
    """The same in every attempt of a run on a machine; ``node``: where several of its nodes may share it."""
    mark = ""
    with suppress(OSError):
        mark = (run / _MARK).read_text(errors="replace")
    what = f"{run.resolve()}:{os.getuid()}:{mark}"
    name = f"myriad-keeper-{hashlib.blake2s(what.encode(), digest_size=12).hexdigest()}"
    return name if node is None else f"{name}-{node}"


def node_keeper(run: Path, place: int | None = None) -> str:
    """The name for the node that this process is on; ``place``: its number where the environment has none.
    Makes RUN/id where there is none yet."""
    with suppress(OSError):  # a disk without room, or a folder that is gone: the path alone
        create_whole(run / _MARK, secrets.token_hex(8))
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
