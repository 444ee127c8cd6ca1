"""Start the snapshot server of a node.

The first rank of the node starts it. A launcher may start it earlier, while that rank still imports modules.
A server's name is a hash of the run's path and of the random content of RUN/id. A run that is removed and
trained again under the same path therefore does not resume from the snapshots of its predecessor, and other
users of the machine, who cannot read that file, cannot take the name before the server does.
"""

import hashlib
import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from myriad.system.processes import open_log
from myriad.system.whole_file import create_whole

__all__ = [
    "NODE",
    "SnapshotServerProcess",
    "StartServer",
    "StartedServer",
    "node_server_name",
    "server_name",
    "server_names",
    "start_snapshot_server",
]

NODE = "MYRIAD_NODE"
"""Environment variable with the rank's node id, which stays the same across attempts. If it is not set, the
launcher's grouping of ranks defines the node."""
_SOCKETS, _MARK = Path("/proc/net/unix"), "id"


class StartedServer(Protocol):
    """A snapshot server that was started, as a process or as a thread of this process."""

    def poll(self) -> int | None:
        """Return ``None`` while it runs, else its exit code; 0: another server has the name."""

    def finish(self, seconds: float) -> None:
        """Wait up to ``seconds`` until a server of this process has stored the newest snapshot."""


StartServer = Callable[[str, Path], StartedServer]
"""Starts a snapshot server, given its name and its log."""


def server_name(run: Path, node: int | None = None) -> str:
    """Return the server name of a run on this machine, equal in every attempt.

    ``node``: node id, if several nodes of the run may share the machine."""
    mark = ""
    with suppress(OSError):
        mark = (run / _MARK).read_text(errors="replace")
    what = f"{run.resolve()}:{os.getuid()}:{mark}"
    name = f"myriad-keeper-{hashlib.blake2s(what.encode(), digest_size=12).hexdigest()}"
    return name if node is None else f"{name}-{node}"


def node_server_name(run: Path, node: int | None = None) -> str:
    """Return the server name for the node of this process; create RUN/id if it is missing.

    ``node``: node id to use if the environment has none."""
    with suppress(OSError):  # without RUN/id (disk full, folder gone) the name depends on the path alone
        create_whole(run / _MARK, secrets.token_hex(8), mode=0o600)
    given = os.environ.get(NODE)
    return server_name(run, node if given is None else int(given))


def server_names(run: Path) -> list[str]:
    """Return the names of all snapshot servers of the run that listen on this machine."""
    name = server_name(run)
    lines = _SOCKETS.read_text().splitlines() if _SOCKETS.exists() else []
    found = {line.rpartition(" ")[2].removeprefix("@") for line in lines if f"@{name}" in line}
    return sorted(one for one in found if one == name or one.startswith(f"{name}-"))


class SnapshotServerProcess(subprocess.Popen[bytes]):
    """A snapshot server as a process of its own."""

    def finish(self, seconds: float) -> None:
        """Do nothing: the process stores by itself, after this one has ended."""


def start_snapshot_server(name: str, log: Path) -> SnapshotServerProcess:
    """Start a server process in its own session, so that a signal to the ranks does not reach it."""
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    with open(open_log(log), "ab") as stream:
        return SnapshotServerProcess(
            [sys.executable, "-Pm", "myriad.checkpoint.snapshots.snapshot_server_process", name],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **one_thread},
            start_new_session=True,
        )
