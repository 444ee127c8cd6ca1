"""What the kernel says of a process, and where a process that is started writes its log."""

import io
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = [
    "StopTimer",
    "WatchClock",
    "log_stream",
    "open_log",
    "process_cpu_ticks",
    "process_run_ns",
    "process_start_ticks",
    "process_state",
]

_STAT_BYTES = 4096
"""More than its 52 numbers take."""


def open_log(path: Path, *, anew: bool = False) -> int:
    """Open a log that is appended to, as a descriptor. Where it cannot be made (on a full disk, in a folder
    that was removed) it is /dev/null: a missing log is no reason for a missing process."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if anew else 0)
    try:
        if path.parent.parent.is_dir():  # a run's folder that was removed stays removed
            path.parent.mkdir(exist_ok=True)
        return os.open(path, flags, 0o644)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


class _LossyFile(io.RawIOBase):
    """A descriptor whose disk may be full: what it does not take is lost, counted, and named in the log once
    there is room."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor, self._num_lost = descriptor, 0
        self.name = descriptor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            if self._num_lost:
                os.write(self._descriptor, b"\n[%d bytes of this log were lost]\n" % self._num_lost)
                self._num_lost = 0
            while len(rest):
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            self._num_lost += len(rest)
        return size


def log_stream(descriptor: int) -> io.TextIOWrapper:
    """``sys.stdout`` or ``sys.stderr`` of a process that a full disk under its log must not end."""
    return io.TextIOWrapper(
        _LossyFile(descriptor), "utf-8", "backslashreplace", line_buffering=True, write_through=True
    )


def process_state(pid: int) -> str:
    """Its letter: R, S, D, T (stopped), Z, ...; ``?``: there is none."""
    fields = _stat_fields(pid)
    return fields[0] if fields else "?"


def process_start_ticks(pid: int) -> int | None:
    """When it started, in ticks since boot: with the pid, a name for good. None: it is gone."""
    fields = _stat_fields(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else None


def process_cpu_ticks(pid: int) -> int:
    """Processor time that all its threads have used, in ticks; -1: there is no such process."""
    fields = _stat_fields(pid)
    return int(fields[11]) + int(fields[12]) if fields else -1


def process_run_ns(pid: int) -> int:
    """Time that its threads have run on a processor, in nanoseconds where the kernel counts those; -1: there
    is no such process."""
    total, counted = 0, False
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/schedstat", "rb", 0) as file:
                total, counted = total + int(file.read(_STAT_BYTES).split()[0]), True
    return total if counted else process_cpu_ticks(pid)


class WatchClock:
    """A clock for the deadlines of other processes. Time in which its own process did not run (it was
    stopped, or the whole machine was paused) counts for one look at most: the others may have been paused."""

    def __init__(self, longest_look: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest, self._clock = longest_look, clock
        self._looked_at, self._seconds = clock(), 0.0

    def look(self) -> float:
        """Seconds since it was made."""
        now = self._clock()
        self._seconds += min(now - self._looked_at, self._longest)
        self._looked_at = now
        return self._seconds


class StopTimer:
    """Measures for how long a process has been stopped (SIGSTOP). One that has run between two looks, if only
    for a moment, is slow and not stopped."""

    def __init__(self) -> None:
        self._pid, self._run_ns = 0, -1
        self._since: float | None = None

    def look(self, pid: int, now: float) -> float | None:
        """Seconds since it was first seen to be stopped; ``None``: it is not."""
        if process_state(pid) != "T":
            self._since = None
            return None
        run_ns = process_run_ns(pid)
        if self._since is None or (pid, run_ns) != (self._pid, self._run_ns):
            self._since, self._pid, self._run_ns = now, pid, run_ns
        return now - self._since


def _stat_fields(pid: int) -> list[str]:
    """Of /proc/PID/stat, from the state on: the name before it may hold anything."""
    with suppress(OSError), open(f"/proc/{pid}/stat", "rb", 0) as file:  # asked again and again: no pathlib
        return file.read(_STAT_BYTES).rpartition(b")")[2].decode("ascii").split()
    return []
