"""A listening socket for asyncio that withstands a flood of connections, and the limit of open files."""

import errno
import os
import resource
import socket
import time
from contextlib import suppress
from typing import Any

__all__ = ["Listener", "raise_file_limit"]

_NO_FILE_SECONDS = 0.05


class Listener(socket.socket):
    """Closes a new connection for which no file can be opened, until others have ended. asyncio would try
    again at once, with a traceback in the log for each try: gigabytes within minutes."""

    _spare: int | None = None

    @classmethod
    def bound(cls, family: int, address: Any) -> "Listener":
        """Return a TCP socket that is bound to an address. Raises ``OSError``."""
        # Named, or asyncio does not see that it is TCP, leaves Nagle's algorithm on, and answers wait 40 ms.
        listener = cls(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError:
            listener.close()
            raise
        return listener

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection. Raises ``BlockingIOError`` if there is none, or no file can be opened."""
        try:
            if self._spare is None:
                self._spare = os.open(os.devnull, os.O_RDONLY)
            return super().accept()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
        if self._spare is None:
            time.sleep(_NO_FILE_SECONDS)
        else:
            self._close_spare()
            with suppress(OSError):
                super().accept()[0].close()
        raise BlockingIOError

    def close(self) -> None:
        """Close the socket."""
        self._close_spare()
        super().close()

    def _close_spare(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None


def raise_file_limit() -> None:
    """Raise the limit of this process's open files as far as it may: a server needs one for each connection,
    and the default is 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
