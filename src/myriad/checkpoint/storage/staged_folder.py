"""Write an output folder atomically, by one process at a time: for exports, imports and resharding.

    .OUT.partial/     written, on disk                  `staged_folder`
    OUT/              put in place by one rename

The partial folder is locked (flock) while its writer lives: another command is refused with a one-line error.
The files of a killed writer are replaced. On a file system that cannot lock folders, each writer has a
partial folder of its own, and the first to finish creates OUT.
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

__all__ = ["locked_folder", "staged_folder"]

_KEY = "OUT"
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
"""Errors of a rename whose target is not empty."""


@contextlib.contextmanager
def locked_folder(folder: Path, out: object) -> Iterator[bool]:
    """Make a folder and lock it against other processes. Yield False if the file system cannot lock it.

    ``out``: the path that the user gave, for messages. Raises `BadInputError` if another process has the
    lock."""
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
    """Whether the path still names the folder that was opened, and not a later one."""
    with contextlib.suppress(OSError):
        return os.path.samestat(folder.stat(), os.fstat(descriptor))
    return False


@contextlib.contextmanager
def staged_folder(out: Path) -> Iterator[Path]:
    """Yield a folder that is renamed to ``out`` on success and removed on failure.

    Raises `BadInputError` if ``out`` is not empty or another process writes it, and `RunFailedError` if
    writing fails, for example for lack of space; then nothing is left."""
    try:
        out = out.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a symbolic link to itself
        raise BadInputError(_KEY, str(out), f"must be the name of a folder ({error})") from None
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
    """Return an empty partial folder to write in."""
    partial = out.with_name(f".{out.name}.partial")
    try:
        if not held.enter_context(locked_folder(partial, out)):
            partial.rmdir()
            partial = partial.with_name(f"{partial.name}-{secrets.token_hex(4)}")
            partial.mkdir()
        for left in partial.iterdir():  # files of a process that was killed
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
    return RunFailedError(f"{out}: not written; partial files were removed: {error.strerror or error}")


def _sync(folder: Path) -> None:
    """Sync the folder to disk before the rename. Otherwise a power failure could leave empty files in it."""
    for path in (folder, *folder.rglob("*")):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
