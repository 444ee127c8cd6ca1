"""Folders that are written whole, by one process at a time: what an export or an import makes, and a reshard.

    .OUT.partial/     written, on disk                  `staged_folder`
    OUT/              by one rename: from here on it is there

The folder under work is locked (flock) as long as its writer lives: another command is refused in a line, and
what a killed one has left is replaced. On a file system that cannot lock folders each has a name of its own,
and the first to finish has OUT.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from myriad.errors import BadInputError, MyriadError, RunFailedError

__all__ = ["alone_in", "staged_folder"]

_KEY = "OUT"
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
"""Errors of a rename to a place that is not empty."""


@contextlib.contextmanager
def alone_in(folder: Path, out: object) -> Iterator[bool]:
    """Make a folder and hold it against other processes; False: this file system cannot lock it. ``out``:
    what the user named. Raises `BadInputError` where another process holds it."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            locked = _lock(descriptor, out)
            if _is_still(folder, descriptor):
                yield locked
                return
        finally:
            os.close(descriptor)


def _lock(descriptor: int, out: object) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BadInputError(_KEY, str(out), "is being written by another process; choose another") from None
    except OSError:
        return False
    return True


def _is_still(folder: Path, descriptor: int) -> bool:
    """Whether the name is that of the folder that was opened, and not of a later one."""
    with contextlib.suppress(OSError):
        return os.path.samestat(folder.stat(), os.fstat(descriptor))
    return False


@contextlib.contextmanager
def staged_folder(out: Path) -> Iterator[Path]:
    """A folder beside ``out`` that becomes it when all went well, and is removed otherwise. Raises
    `BadInputError` where there is something already, or another process is at work on it; `RunFailedError`,
    with nothing left, where there is no room."""
    out = out.resolve()
    _refuse_taken(out)
    with contextlib.ExitStack() as held:
        partial = _begin(out, held)
        try:
            yield partial
            _sync(partial)
            _refuse_taken(out)
            partial.rename(out)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError) and not isinstance(error, MyriadError):
                raise _not_written(out, error) from None
            raise


def _begin(out: Path, held: contextlib.ExitStack) -> Path:
    """An empty folder to write in."""
    partial = out.with_name(f".{out.name}.partial")
    try:
        if not held.enter_context(alone_in(partial, out)):
            partial.rmdir()
            partial = partial.with_name(f"{partial.name}-{secrets.token_hex(4)}")
            partial.mkdir()
        for left in partial.iterdir():  # by a process that was killed
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
    except OSError as error:
        raise BadInputError(_KEY, str(out), f"must be writable ({error.strerror})") from None
    return partial


def _refuse_taken(out: Path) -> None:
    try:
        taken = os.path.lexists(out) and (not out.is_dir() or any(out.iterdir()))
    except OSError as error:
        raise BadInputError(_KEY, str(out), f"must be readable ({error.strerror})") from None
    if taken:
        raise BadInputError(_KEY, str(out), "must be new or an empty folder")


def _not_written(out: Path, error: OSError) -> MyriadError:
    if error.errno in _TAKEN:
        return BadInputError(_KEY, str(out), "must be new or an empty folder: another process has filled it")
    return RunFailedError(f"{out}: not written, and nothing is left of it: {error.strerror or error}")


def _sync(folder: Path) -> None:
    """All of it is on disk before it has its name: otherwise a power cut leaves empty files that look
    whole."""
    for path in (folder, *folder.rglob("*")):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
