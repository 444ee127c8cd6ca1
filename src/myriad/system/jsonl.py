"""JSON Lines files that several processes append to and others read at the same time.

A line is complete or absent:

    append ──► lock, write ──► no space: the part that was written is cut off, ``OSError``
                               killed: a torn line remains, and the next line starts on a new line
    LineFile ──► lines that cannot be written stay in memory (bounded; the oldest are dropped and counted) and
                 are written in order once there is space

The lock (flock) is awaited only briefly, so that a stopped process that holds it blocks no other. Without the
lock, a line starts with a newline and nothing is cut off. Readers skip blank lines. They skip and count lines
that are not JSON objects: torn lines, NUL blocks after a power failure, invalid UTF-8, lines that are too
long.
"""

import errno
import fcntl
import json
import math
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from sys import intern
from typing import Any

from myriad.system.whole_file import opened_to_read, parse_json, sync_folder

__all__ = ["JsonlTail", "LineFile", "Record", "append_line", "append_lines", "late_events"]

Record = dict[str, Any]
_LOCK_SECONDS, _LOCK_POLL_SECONDS = 0.05, 0.001
_CHUNK_BYTES = 2**20
_MOST_LINE_BYTES = 2**24
"""A longer line is invalid."""
_NO_ROOM_MICROSECONDS = 271_828
"""Marker in a file's modification time: a line could not be appended then. Setting it needs no disk space."""
_MOST_WAITING_LINES, _MOST_WAITING_BYTES = 8192, 2**24


class JsonlTail:
    """Reads the complete lines that were added to a file since the last `poll`."""

    def __init__(
        self,
        path: Path,
        *,
        from_end: bool = False,
        offset: int = 0,
        check: Callable[[Record], Record | None] | None = None,
    ) -> None:
        """``offset``: number of bytes already read.

        ``check`` receives each line as it is read, and returns the line that `poll` should return, or
        ``None``."""
        self._check = check
        self._path = path
        self._offset = path.stat().st_size if from_end and path.exists() else offset
        self._skipping = False
        self.num_wrong = 0
        """Number of lines that are not JSON objects."""
        self.no_room_at = 0.0
        """Time at which a writer last failed to append a line; 0: it did not fail."""
        self.problem = ""
        """Why the file cannot be read; "": it can, or it does not exist yet."""

    @property
    def offset(self) -> int:
        """Number of bytes that have been read."""
        return self._offset

    def poll(self) -> list[Record]:
        """Return the new lines; empty if the file does not exist or cannot be read."""
        try:
            with opened_to_read(self._path) as handle:
                status = os.fstat(handle)
                if status.st_size < self._offset:  # the file was replaced
                    self._offset, self._skipping = 0, False
                is_marked = status.st_mtime_ns % 10**9 // 1000 == _NO_ROOM_MICROSECONDS
                self.no_room_at = status.st_mtime if is_marked else 0.0
                found = list(self._records(handle))
        except FileNotFoundError:
            return []
        except OSError as error:
            self.problem = error.strerror or str(error)
            return []
        self.problem = ""
        return found

    def _records(self, handle: int) -> Iterator[Record]:
        for line in self._lines(handle):
            if not line.strip(b" \t\r"):
                continue
            record = _parse_line(line)
            if record is None:
                self.num_wrong += 1
                continue
            right = record if self._check is None else self._check(record)
            if right is not None:
                yield right

    def _lines(self, handle: int) -> Iterator[bytes]:
        """Yield complete lines. A line that is too long is counted and skipped, whatever its length."""
        rest = b""
        while data := os.pread(handle, _CHUNK_BYTES, self._offset + len(rest)):
            *lines, rest = (rest + data).split(b"\n") if b"\n" in data else (rest + data,)
            for line in lines:
                self._offset += len(line) + 1
                if not self._skipping:
                    yield line
                self._skipping = False
            if len(rest) > _MOST_LINE_BYTES or (self._skipping and rest):
                self.num_wrong += not self._skipping
                self._offset, self._skipping, rest = self._offset + len(rest), True, b""


def _parse_line(line: bytes) -> Record | None:
    try:
        record = parse_json(line)
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    if b"\\u" in line:  # an unpaired surrogate is valid JSON, but cannot be encoded
        record = json.loads(json.dumps(record, ensure_ascii=False).encode(errors="replace"))
    # A million lines share a dozen keys: interning them halves the memory of a long run.
    return {intern(key): value for key, value in record.items()}


def late_events(events: Sequence[Record]) -> list[Record]:
    """Return events in order of time: an event that was written late is moved to its place."""
    late = [event for event in events if "late_seconds" in event and _time(event) is not None]
    if not late:
        return list(events)
    timely = [event for event in events if "late_seconds" not in event or _time(event) is None]
    ordered: list[Record] = []
    late.sort(key=lambda event: _time(event) or 0.0, reverse=True)
    for event in timely:
        while late and (at := _time(event)) is not None and (_time(late[-1]) or 0.0) < at:
            ordered.append(late.pop())
        ordered.append(event)
    return ordered + late[::-1]


def _time(record: Record) -> float | None:
    at = record.get("time")
    if isinstance(at, bool) or not isinstance(at, int | float) or not abs(at) < 1e300:
        return None
    return float(at)


def append_line(path: Path, record: Mapping[str, Any], *, sync: bool = False) -> None:
    """Append one line; non-finite figures become null. Raises ``OSError`` if the line was not written."""
    _append(path, [_encode(record)], sync=sync)


def append_lines(path: Path, lines: Sequence[str]) -> None:
    """Append lines with one write. Raises ``OSError`` if none was written."""
    _append(path, ["".join(f"{line}\n" for line in lines).encode()])


def _encode(record: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(dict(record), ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(record), ensure_ascii=False)
    return text.encode(errors="backslashreplace") + b"\n"  # unpaired surrogates, as JSON escapes them


def _finite(value: Any) -> Any:
    """Return a copy with null for each non-finite figure."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _append(path: Path, pieces: Sequence[bytes], *, sync: bool = False) -> int:
    """Append pieces of complete lines, as many as there is space for. Return how many were written.

    Raises ``OSError`` if none was written."""
    done = 0
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o644)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file")
        is_alone, is_new = _lock(handle), not os.fstat(handle).st_size
        try:
            for piece in pieces:
                _write(handle, piece, is_alone=is_alone)
                done += 1
        except OSError:
            if not done:
                raise
        if sync:
            os.fsync(handle)
            if is_new:
                sync_folder(path.parent)
    finally:
        os.close(handle)
    return done


def _lock(handle: int) -> bool:
    """Lock the file; return whether this process has the lock."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
        except OSError:  # a file system without locks
            return False
        time.sleep(_LOCK_POLL_SECONDS)


def _write(handle: int, piece: bytes, *, is_alone: bool) -> None:
    """Write all of ``piece`` on a line of its own, or nothing. Raises ``OSError``."""
    size = os.fstat(handle).st_size
    begins_line = is_alone and (size == 0 or os.pread(handle, 1, size - 1) == b"\n")
    whole = piece if begins_line else b"\n" + piece
    written = 0
    try:
        while written < len(whole):
            if written and not is_alone:  # another process may write between the two parts
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written += os.write(handle, whole[written:])
    except OSError:
        if written and is_alone and os.fstat(handle).st_size == (end := os.lseek(handle, 0, os.SEEK_CUR)):
            with suppress(OSError):  # keep the newline: a reader may have seen it
                os.ftruncate(handle, end - written + (not begins_line))
        raise


def _mark_no_room(path: Path) -> None:
    """Mark a file so that readers can see that its writer is alive although it adds no line."""
    at = (int(time.time()) * 10**6 + _NO_ROOM_MICROSECONDS) * 1000
    with suppress(OSError):
        os.utime(path, ns=(at, at))


def _marked(line: bytes, late_seconds: float) -> bytes:
    return line[:-2] + f', "late_seconds": {late_seconds:.3f}}}\n'.encode()


class LineFile:
    """A JSON Lines file to append to while the disk may be full. Thread-safe."""

    def __init__(
        self,
        path: Path,
        report: Callable[[str, int, int], None] | None = None,
        *,
        sync: bool = False,
        marks_late: bool = False,
        most_waiting: int = _MOST_WAITING_LINES,
    ) -> None:
        """``report(problem, num_late, num_dropped)`` is called when writing begins to fail.

        It is called again with problem "" when writing works, with the numbers of late and dropped lines.
        ``sync``: `append` returns once the line is on disk. ``marks_late``: add ``late_seconds`` to a line
        that was delayed."""
        self.path, self._send_report = path, report
        self._sync, self._marks_late, self._most_waiting = sync, marks_late, most_waiting
        self._lock = threading.RLock()
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._waiting_bytes = 0
        self._num_tried = 0
        """Number of the oldest waiting lines for which a write has already failed."""
        self._num_late = self._dropped_since = 0
        self.num_dropped = 0
        """Number of lines dropped because the buffer was full."""
        self.problem = ""
        """Why lines wait; "": no line waits."""

    @property
    def num_waiting(self) -> int:
        """Number of lines that are only in memory."""
        return len(self._waiting)

    def append(self, record: Mapping[str, Any]) -> bool:
        """Append a line after all that wait. Return whether it is written."""
        line = _encode(record)
        with self._lock:
            self._waiting.append((time.monotonic(), line))
            self._waiting_bytes += len(line)
            return self.flush()

    def flush(self) -> bool:
        """Write the waiting lines. Return whether all are written."""
        with self._lock:
            if not self._waiting:
                return True
            before = self.problem
            try:
                self._write()
                self.problem = "" if not self._waiting else "no room for all lines"
            except OSError as error:
                self.problem = error.strerror or str(error)
                _mark_no_room(self.path)
            self._drop_oldest()
            self._num_tried = len(self._waiting)
            if bool(self.problem) != bool(before):
                self._report()
            return not self._waiting

    def _write(self) -> None:
        pieces = [line for _, line in self._waiting]
        if self._marks_late:
            now, tried = time.monotonic(), islice(self._waiting, self._num_tried)
            pieces[: self._num_tried] = [_marked(line, now - since) for since, line in tried]
        num_written = _append(self.path, pieces, sync=self._sync)
        self._num_late += min(self._num_tried, num_written)
        for _ in range(num_written):
            self._waiting_bytes -= len(self._waiting.popleft()[1])

    def _drop_oldest(self) -> None:
        while len(self._waiting) > self._most_waiting or self._waiting_bytes > _MOST_WAITING_BYTES:
            self._waiting_bytes -= len(self._waiting.popleft()[1])
            self.num_dropped += 1
            self._dropped_since += 1

    def _report(self) -> None:
        if self._send_report is None:
            return
        late, dropped = self._num_late, self._dropped_since
        if not self.problem:
            self._num_late = self._dropped_since = 0
        self._send_report(self.problem, late, dropped)
