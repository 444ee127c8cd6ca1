"""Files that are there whole or not at all, whenever the writer is killed; and small ones that are read back.

.NAME.PID   the draft, synced, then renamed; a writer that is killed leaves it, `remove_drafts` removes it
"""

import errno
import json
import os
import re
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["read_json", "read_regular", "remove_drafts", "sync_folder", "write_whole"]

_MOST_JSON_BYTES = 2**26
_DRAFT = re.compile(r"\..+\.\d{1,10}(\.[0-9a-f]{8})?")
_DRAFT_SECONDS = 60.0
"""No writer takes longer."""


def write_whole(path: Path, content: str | bytes, *, mode: int = 0o666) -> None:
    """Replaces a file, synced; ``mode`` before the umask. Raises ``OSError``: the old one is still there."""
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        try:
            rest = memoryview(data)
            while len(rest):
                rest = rest[os.write(handle, rest) :]
            os.fsync(handle)
        finally:
            os.close(handle)
        draft.replace(path)
        sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def sync_folder(path: Path) -> None:
    """Have the names of files in a folder on disk, so that a file that was made is there after a power cut.
    A folder that cannot be opened or synced is left alone: some file systems refuse that."""
    with suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove_drafts(folder: Path) -> None:
    """Remove what writers that were killed have left in this folder."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not (_DRAFT.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)):
                continue
            with suppress(OSError):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > _DRAFT_SECONDS:
                    os.unlink(entry.path)


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Return what a file holds, never waiting for a pipe. Raises ``OSError`` for what is no regular file, and
    ``ValueError`` for one of more bytes."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file")
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"more than {most_bytes} bytes")
    return data


def read_json(path: Path) -> Any:
    """Return what a small file holds; ``None`` where there is none. Raises ``OSError``, and ``ValueError``
    for what is no JSON, or too much of it."""
    try:
        data = read_regular(path, _MOST_JSON_BYTES)
    except FileNotFoundError:
        return None
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deep") from None
