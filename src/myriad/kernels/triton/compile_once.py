"""Shared compilation: one rank of a node compiles a kernel while the others wait. Import late: needs triton.

Ranks reach the same kernels at the same time, when they test them and in their first step. With Triton's own
cache, each of 8 ranks would compile each of about 40 kernels. With this one, a rank that finds no entry locks
the entry, looks again, and compiles while it holds the lock:

    rank 0    no entry | lock | no entry | compile, store ------------- | unlock
    rank 1    no entry | wait ----------------------------------------- | lock | entry | unlock
    warm      entry

An entry's key includes the GPU's type, the kernel and its constants, so kernels of other GPUs or other stages
are compiled in parallel. The system releases a lock (POSIX record locks) when the process that holds it ends,
and the next rank compiles. A rank that has waited `PATIENCE_SECONDS` compiles by itself; so does a rank whose
cache cannot be locked, as with Triton's own cache. An existing entry is read without a lock.
"""

# mypy: disable-error-code="import-untyped,misc"
import fcntl
import logging
import os
import sysconfig
import time
from typing import Any

from triton import knobs
from triton.runtime.cache import FileCacheManager

__all__ = ["PATIENCE_SECONDS", "SharedCache", "share_compilations"]

_LOG = logging.getLogger(__name__)
PATIENCE_SECONDS = 60.0
"""Longest wait for another rank's compilation of a kernel, which takes 0.2 to 5 seconds."""
_POLL_SECONDS = 0.02
_LOCK_NAME = "compiling.lock"


class SharedCache(FileCacheManager):
    """One entry of Triton's cache on disk, which one process at a time can fill."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        super().__init__(key, override=override, dump=dump)
        self._is_shared, self._descriptor = not (override or dump), -1

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return the files of a compiled kernel; ``None``: the caller must compile it."""
        return self._found_or_mine(super().get_group, filename)

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        """Store the list of files of a compiled kernel, which completes the entry."""
        path: str = super().put_group(filename, group)
        self._unlock()
        return path

    def get_file(self, filename: str) -> str | None:
        """Return a file. A host module (a kernel's launcher) is waited for in the same way as a kernel."""
        if not filename.endswith(str(sysconfig.get_config_var("EXT_SUFFIX"))):
            path: str | None = super().get_file(filename)
            return path
        return self._found_or_mine(super().get_file, filename)

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        """Store a file. A host module completes its entry."""
        path: str = super().put(data, filename, binary=binary)
        if filename.endswith(str(sysconfig.get_config_var("EXT_SUFFIX"))):
            self._unlock()
        return path

    def __del__(self) -> None:
        """Release the lock after a failed compilation."""
        self._unlock()

    def _found_or_mine(self, look: Any, filename: str) -> Any:
        """Look up the entry. If it is missing, look again with the lock, and keep the lock if it is still
        missing."""
        found = look(filename)
        if found is None and self._is_shared and self._descriptor < 0:
            self._lock(filename)
            found = look(filename)
            if found is not None:
                self._unlock()
        return found

    def _lock(self, filename: str) -> None:
        """Take the entry's lock. Return without it after `PATIENCE_SECONDS`, or if the file system has no
        locks."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        try:
            descriptor = os.open(os.path.join(self.cache_dir, _LOCK_NAME), os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            return
        while True:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):  # POSIX: both mean that another process holds it
                if time.monotonic() < deadline:
                    time.sleep(_POLL_SECONDS)
                    continue
                _LOG.warning("%s is compiled here too: another process has not done so in time", filename)
            except OSError:  # a file system without locks
                pass
            else:
                self._descriptor = descriptor
                return
            os.close(descriptor)
            return

    def _unlock(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def share_compilations() -> None:
    """Compile the Triton kernels of this process once per node. A cache that the user has set
    (``TRITON_CACHE_MANAGER``) is kept."""
    if knobs.cache.manager_class is None:
        knobs.cache.manager_class = SharedCache
