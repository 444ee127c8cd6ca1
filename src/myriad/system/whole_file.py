"""Atomic replacement of files, safe against kills, and safe reading of small files.

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

from myriad.errors import BadInputError

__all__ = [
    "create_whole",
    "is_own_file",
    "opened_to_read",
    "parse_json",
    "read_json",
    "read_regular",
    "read_text",
    "refuse_gzip",
    "remove_drafts",
    "replacing",
    "sync_folder",
    "write_whole",
]

_MOST_JSON_BYTES = 2**26
_MOST_DEPTH = 100
"""Largest nesting depth of JSON. Whether a deeper value is readable would depend on the reader's stack."""
_DRAFT = re.compile(r"\..+\.\d{1,10}(\.[0-9a-f]{8})?")
_DRAFT_SECONDS = 60.0
"""A draft that is older than this belongs to a writer that was killed."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a draft, which replaces ``path`` at the end, or is removed after an error.

    The draft is not synced: after a power failure the file may be torn. Raises ``OSError``."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield draft
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def write_whole(path: Path, content: str | bytes, *, mode: int = 0o666) -> None:
    """Replace a file and sync it; ``mode``: before the umask. Raises ``OSError``; the old file then stays."""
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


def create_whole(path: Path, content: str, *, mode: int = 0o666) -> None:
    """Create a file unless it exists, also if another process creates it now; ``mode``: before the umask.
    Raises ``OSError``."""
    if path.exists():
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        write_whole(draft, content, mode=mode)
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Sync a folder's directory entries, so that a new file exists after a power failure.

    A folder that cannot be opened or synced is ignored: some file systems refuse it."""
    with suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove_drafts(folder: Path) -> None:
    """Remove the drafts of killed writers in this folder."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not (_DRAFT.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)):
                continue
            with suppress(OSError):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > _DRAFT_SECONDS:
                    os.unlink(entry.path)


@contextmanager
def opened_to_read(path: Path) -> Iterator[int]:
    """Open a regular file, and yield its descriptor. Raises ``OSError``. Never blocks, not even on a pipe."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file")
        yield handle
    finally:
        os.close(handle)


def is_own_file(folder: Path, name: object) -> bool:
    """Whether a name that a file gives is that of a file in the folder itself, and of no other place."""
    try:
        return (
            isinstance(name, str)
            and name.isprintable()
            and Path(name).name == name
            and (folder / name).is_file()
        )
    except OSError:  # a name that is too long
        return False


def read_text(path: Path) -> str:
    """Return a small text file, with U+FFFD for invalid UTF-8. Raises ``OSError``."""
    return _read(path).decode(errors="replace")


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Return the content of a regular file of at most ``most_bytes``. Raises ``OSError``."""
    with opened_to_read(path) as handle, open(handle, "rb", closefd=False) as file:
        is_too_large = os.fstat(handle).st_size > most_bytes
        data = b"" if is_too_large else file.read(most_bytes + 1)
    if is_too_large or len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"has more than {most_bytes} bytes")
    return data


def refuse_gzip(key: str, path: str, data: bytes) -> None:
    """Raise `BadInputError` for the data of a file that gzip has compressed (RFC 1952, section 2.3.1)."""
    if data.startswith(b"\x1f\x8b"):
        raise BadInputError(key, path, "is compressed: unpack it first, as by gunzip")


def _read(path: Path) -> bytes:
    return read_regular(path, _MOST_JSON_BYTES)


def read_json(path: Path) -> Any:
    """Return the value in a small JSON file; ``None``: there is no file.

    Raises ``OSError``, or ``ValueError`` if the file is not JSON."""
    try:
        data = _read(path)
    except FileNotFoundError:
        return None
    return parse_json(data)


def parse_json(data: bytes) -> Any:
    """Return the value in JSON bytes. Raises ``ValueError``, also if it is nested too deep."""
    try:
        found = json.loads(data)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if data.count(b"[") + data.count(b"{") > _MOST_DEPTH and _is_deeper(found, _MOST_DEPTH):
        raise ValueError("nested too deep")
    return found


def _is_deeper(value: Any, most: int) -> bool:
    """Whether a value has more than ``most`` levels of lists and objects."""
    level = [value]
    for _ in range(most + 1):
        inside = [
            list(one.values()) if isinstance(one, dict) else one
            for one in level
            if isinstance(one, dict | list)
        ]
        level = [each for one in inside for each in one]
    return bool(level)
