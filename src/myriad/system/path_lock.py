"""A lock of a path on this machine that outlives the folder at the path: a file of the user, locked by flock.

The file is in the user's own folder, so no other user can take the lock. The kernel releases it when the
process ends, also by SIGKILL. A file that is left behind is then unlocked, and the next owner removes it. A
process that waited for a file which its owner removed holds a lock on a file without a name. So a lock counts
only if the name still leads to the locked file.
"""

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import socket
from pathlib import Path

from myriad.system.state_folder import make_private, state_folder

__all__ = ["PathLock"]

_LOG = logging.getLogger(__name__)


class PathLock:
    """Holds the lock of a path until it is closed."""

    def __init__(self, path: Path) -> None:
        """Raises ``BlockingIOError`` if another process has the lock. A user without a folder of their own
        that can be written gets no lock, with a line in the log."""
        self._file: Path | None = None
        self._handle = -1
        text = f"{socket.gethostname()}:{path.resolve()}"
        name = hashlib.blake2s(text.encode(errors="surrogateescape"), digest_size=12).hexdigest()
        try:
            folder = state_folder() / "locks"
            make_private(folder.parent)
            make_private(folder)
            self._lock(folder / f"{name}.lock")
        except BlockingIOError:
            raise
        except OSError as error:
            _LOG.warning("the path %s is not locked: %s", path, error)

    def _lock(self, file: Path) -> None:
        while self._file is None:
            handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _leads_to(file, handle):
                    self._file, self._handle, handle = file, handle, -1
            except OSError as error:
                if error.errno == errno.EWOULDBLOCK and not _leads_to(file, handle):
                    continue  # the owner has just removed it
                raise
            finally:
                if handle >= 0:
                    os.close(handle)

    def close(self) -> None:
        """Release the lock."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink()
            os.close(self._handle)
            self._file = None


def _leads_to(file: Path, handle: int) -> bool:
    try:
        return os.path.samestat(file.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False
