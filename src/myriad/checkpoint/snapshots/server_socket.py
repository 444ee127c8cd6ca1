"""The unix socket between ranks and the snapshot server of their node: both ends check the other's user."""

import os
import socket
import struct

from myriad.errors import RunFailedError

__all__ = ["ForeignServerError", "connect_to_own", "user_of"]


class ForeignServerError(RunFailedError):
    """Another user of this machine listens where a snapshot server of this user should."""


def user_of(connection: socket.socket) -> int:
    """Return the user id of the process at the other end of a unix socket, as the kernel knows it."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    user: int = struct.unpack("3i", credentials)[1]
    return user


def connect_to_own(connection: socket.socket, name: str) -> None:
    """Connect to the snapshot server ``name`` of this user.

    Names are in no folder, so any user may take a free one; weights are sent only to processes of this user.
    Raises ``OSError`` if no process listens, and `ForeignServerError`."""
    connection.connect(f"\0{name}")
    if (user := user_of(connection)) != os.getuid():
        raise ForeignServerError(
            f"user {user} of this machine listens as this run's snapshot server ({name}): end that process, "
            "or copy the run to another folder"
        )
