"""Start the snapshot server of a node.

The first rank of the node starts it. A launcher may start it earlier, while that rank still imports modules.
A server's name is a hash of the run's path and of the random content of RUN/id. A run that is removed and
trained again under the same path therefore does not resume from the snapshots of its predecessor, and other
users of the machine, who cannot read that file, cannot take the name before the server does. They can take it
after the server has ended, as the kernel lists names in use for all users; a start then draws another one.
"""

import hashlib
import logging
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from myriad.checkpoint.snapshots.server_socket import ForeignServerError, connect_to_own
from myriad.system.processes import open_log
from myriad.system.whole_file import create_whole, write_whole

__all__ = [
    "NODE",
    "SnapshotServerProcess",
    "StartServer",
    "StartedServer",
    "leave_taken_names",
    "node_server_name",
    "server_name",
    "server_names",
    "start_snapshot_server",
]

NODE = "MYRIAD_NODE"
"""Environment variable with the rank's node id, which stays the same across attempts. If it is not set, the
launcher's grouping of ranks defines the node."""
_LOG = logging.getLogger(__name__)
_SOCKETS, _MARK = Path("/proc/net/unix"), "id"
_UNCONNECTED = "01"
"""State of a socket that is bound to a name, listening or not."""
_ANSWER_SECONDS, _END_SECONDS = 1.0, 0.5


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
    return _names_in_use(run, _sockets())


def _names_in_use(run: Path, lines: list[str]) -> list[str]:
    name = server_name(run)
    found = {line.rpartition(" ")[2].removeprefix("@") for line in lines if f"@{name}" in line}
    return sorted(one for one in found if one == name or one.startswith(f"{name}-"))


def _sockets() -> list[str]:
    return _SOCKETS.read_text().splitlines() if _SOCKETS.exists() else []


def _bound_names(run: Path) -> list[str]:
    """Return the run's names that no other process can bind; its server's connections have the name, too."""
    return _names_in_use(run, [line for line in _sockets() if line.split()[5] == _UNCONNECTED])


def leave_taken_names(run: Path) -> None:
    """Draw new names for the run's servers if another user of this machine has taken one of them. Call it
    before the run starts. Servers with the former names, on any node, are then not found."""
    taken = [name for name in _bound_names(run) if not _is_own(name)]
    if not taken:
        return
    time.sleep(_END_SECONDS)  # a server of this run that is just ending does not answer either
    if not set(taken) & set(_bound_names(run)):
        return
    _LOG.warning("another user has taken the name of a snapshot server (%s): a new one is drawn", taken[0])
    with suppress(OSError):  # the ranks report it
        write_whole(run / _MARK, secrets.token_hex(8), mode=0o600)


def _is_own(name: str) -> bool:
    """Return whether a process of this user listens at this name."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_ANSWER_SECONDS)
        try:
            connect_to_own(probe, name)
        except (OSError, ForeignServerError):
            return False
    return True


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
