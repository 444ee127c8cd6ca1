"""A disk that fails at a chosen write: every call of ``os`` that changes a folder goes through it.

crash      the process stops at its n-th change, a write of it done in part; nothing after it happens
power cut  besides, what was not synced is lost: the end of a file (or it is there as NUL bytes), names
           that were made or replaced since their folder was synced
full       a write takes the bytes that there is room for, then fails
"""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow

_CHANGES = ("write", "pwrite", "fsync", "ftruncate", "replace", "rename", "unlink", "rmdir", "mkdir")


class Crash(BaseException):
    """The process is no more."""


class CrashingDisk:
    """Everything below one folder; what is elsewhere is left alone."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.room: int | None = None
        """Bytes that it takes yet; ``None``: any number."""
        self.crash_after: int | None = None
        """Changes until the crash."""
        self.is_dead = False
        self.part = 0.0
        """Of the write at which it crashes, how much is done."""
        self._real = {name: getattr(os, name) for name in (*_CHANGES, "open")}
        self._synced: dict[int, bytes] = {}
        """Content of a file, by inode, when it was last synced."""
        self._unsynced_names: list[tuple[Path, bytes | None]] = []
        """Names that were made or replaced since their folder was synced, with what they held before."""

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside, the writers' calls are this disk's."""
        patches = [mock.patch.object(os, name, self._wrapped(name)) for name in _CHANGES]
        patches += [mock.patch.object(os, "open", self._open)]
        patches += [mock.patch.object(pyarrow, "OSFile", self._arrow_file)]
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()

    def cut_power(self, keep: float, nuls: bool) -> None:
        """Lose what was not synced. ``keep``: how much of it is there all the same."""
        kept = round(len(self._unsynced_names) * keep)
        for path, before in reversed(self._unsynced_names[kept:]):
            if before is None:
                path.unlink(missing_ok=True)
            elif path.parent.is_dir():
                path.write_bytes(before)
        for path in self.root.rglob("*"):
            if path.is_file() and path.stat().st_ino not in self._reverted(kept):
                self._lose_end(path, keep, nuls)

    def _reverted(self, kept: int) -> set[int]:
        undone = (path for path, before in self._unsynced_names[kept:] if before is not None)
        return {path.stat().st_ino for path in undone if path.is_file()}

    def _lose_end(self, path: Path, keep: float, nuls: bool) -> None:
        content, synced = path.read_bytes(), self._synced.get(path.stat().st_ino, b"")
        if content.startswith(synced) and len(content) > len(synced):
            size = len(synced) + round((len(content) - len(synced)) * keep)
            path.write_bytes(content[:size] + bytes(len(content) - size if nuls else 0))

    def reboot(self) -> None:
        """Another process may write."""
        self.is_dead, self.crash_after = False, None
        self._synced = {path.stat().st_ino: path.read_bytes() for path in self._files()}
        self._unsynced_names.clear()

    def _files(self) -> Iterator[Path]:
        return (path for path in self.root.rglob("*") if path.is_file())

    def _is_mine(self, target: Any) -> bool:
        if isinstance(target, int):
            target = os.readlink(f"/proc/self/fd/{target}")
        return Path(target).is_relative_to(self.root)

    def _step(self) -> bool:
        """Whether this change is the one at which the process ends."""
        if self.is_dead:
            raise Crash
        if self.crash_after is None:
            return False
        self.crash_after -= 1
        self.is_dead = self.crash_after < 0
        return self.is_dead

    def _wrapped(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def change(target: Any, *rest: Any, **more: Any) -> Any:
            if "dir_fd" in more or not self._is_mine(target):
                return real(target, *rest, **more)
            ends = self._step()
            if name in ("write", "pwrite"):
                return self._write(real, target, *rest, ends=ends)
            if ends:
                raise Crash
            self._note(name, target, rest)
            return real(target, *rest, **more)

        return change

    def _write(self, real: Any, target: int, data: Any, *rest: int, ends: bool) -> int:
        view = memoryview(data).cast("B")
        if ends:
            if part := view[: int(len(view) * self.part)]:
                real(target, part, *rest)
            raise Crash
        if self.room is not None:
            view = view[: self.room]
            if not len(view):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.room -= len(view)
        return int(real(target, view, *rest))

    def _note(self, name: str, target: Any, rest: tuple[Any, ...]) -> None:
        """Remember what a power cut would leave."""
        if name == "fsync":
            path = Path(os.readlink(f"/proc/self/fd/{target}"))
            if path.is_dir():
                self._unsynced_names = [one for one in self._unsynced_names if one[0].parent != path]
            else:
                self._synced[os.fstat(target).st_ino] = path.read_bytes()
        elif name in ("replace", "rename") and Path(target).is_file():
            to = Path(rest[0])
            self._unsynced_names.append((to, to.read_bytes() if to.is_file() else None))

    def _open(self, path: Any, flags: int, *rest: Any, **more: Any) -> int:
        makes = bool(flags & os.O_CREAT) and not os.path.lexists(path)
        if "dir_fd" in more or not (makes or flags & os.O_TRUNC) or not self._is_mine(path):
            return int(self._real["open"](path, flags, *rest, **more))
        if self._step():
            raise Crash
        handle = int(self._real["open"](path, flags, *rest, **more))
        if makes:
            self._unsynced_names.append((Path(path), None))
        self._synced[os.fstat(handle).st_ino] = b""
        return handle

    def _arrow_file(self, path: str, mode: str) -> pyarrow.NativeFile:
        """Arrow's own writes, as one change each."""
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        file = os.fdopen(handle, "wb", buffering=0)
        return pyarrow.PythonFile(_Forwarded(file), mode="w")


class _Forwarded:
    def __init__(self, file: Any) -> None:
        self._file, self.closed = file, False

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        while len(rest):
            rest = rest[os.write(self._file.fileno(), rest) :]
        return size

    def tell(self) -> int:
        return int(self._file.tell())

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._file.close()
        self.closed = True
