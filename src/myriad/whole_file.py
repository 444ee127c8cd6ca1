"""Files that are there whole or not at all, whenever the writer is killed; and small ones that are read back.

.NAME.PID   the draft, synced, then renamed; a writer that is killed leaves it, `remove_drafts` removes it
"""

import errno
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

__all__ = [
    "create_whole",
    "opened_to_read",
    "parse_json",
    "read_json",
    "read_regular",
    "read_text",
    "remove_drafts",
    "sync_folder",
    "write_whole",
]

_MOST_JSON_BYTES = 2**26
_MOST_DEPTH = 100
"""Levels of JSON in each other. Deeper ones are readable or not by how deep the reader's own calls are."""
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


def create_whole(path: Path, content: str) -> None:
    """Create a file; one that is there stays, also if another process creates it now. Raises ``OSError``."""
    if path.exists():
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        write_whole(draft, content)
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)


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


@contextmanager
def opened_to_read(path: Path) -> Iterator[int]:
    """Open a regular file; give its descriptor. Raises ``OSError``; never waits, not even for a pipe."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file")
        yield handle
    finally:
        os.close(handle)


def read_text(path: Path) -> str:
    """Return a small text file; what is no UTF-8 becomes U+FFFD. Raises ``OSError``."""
    return _read(path).decode(errors="replace")


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Return what a regular file of at most so many bytes holds. Raises ``OSError``."""
    with opened_to_read(path) as handle, open(handle, "rb", closefd=False) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"has more than {most_bytes} bytes")
    return data


def _read(path: Path) -> bytes:
    return read_regular(path, _MOST_JSON_BYTES)


def read_json(path: Path) -> Any:
    """Return what a small file holds; ``None`` where there is none. Raises ``OSError``, and ``ValueError``
    for what is no JSON."""
    try:
        data = _read(path)
    except FileNotFoundError:
        return None
    return parse_json(data)


def parse_json(data: bytes) -> Any:
    """Return what bytes from a disk hold. Raises ``ValueError``, also for what is nested too deep."""
    try:
        found = json.loads(data)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if data.count(b"[") + data.count(b"{") > _MOST_DEPTH and _is_deeper(found, _MOST_DEPTH):
        raise ValueError("nested too deep")
    return found


def _is_deeper(value: Any, most: int) -> bool:
    """Whether a value has more levels of lists and objects than ``most``."""
    level = [value]
    for _ in range(most + 1):
        inside = [
            list(one.values()) if isinstance(one, dict) else one
            for one in level
            if isinstance(one, dict | list)
        ]
        level = [each for one in inside for each in one]
    return bool(level)
