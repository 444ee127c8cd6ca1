"""Process state from /proc, and log files of processes that are started."""

import io
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = [
    "PausableClock",
    "StopTimer",
    "log_stream",
    "open_log",
    "process_cpu_ticks",
    "process_run_ns",
    "process_start_ticks",
    "process_state",
]

_STAT_BYTES = 4096
"""More than the 52 fields of /proc/PID/stat need."""


def open_log(path: Path, *, truncate: bool = False) -> int:
    """Open a log for appending, and return its descriptor.

    If the log cannot be opened (disk full, folder removed), return a descriptor of /dev/null, so that the
    process starts without a log."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if truncate else 0)
    try:
        if path.parent.parent.is_dir():  # do not create the folder of a run that was removed
            path.parent.mkdir(exist_ok=True)
        return os.open(path, flags, 0o644)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


class _LossyFile(io.RawIOBase):
    """A file whose disk may be full. Bytes that cannot be written are dropped, counted, and reported in the
    log once there is space."""

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
    """Return a replacement for ``sys.stdout`` or ``sys.stderr`` that survives a full disk."""
    return io.TextIOWrapper(
        _LossyFile(descriptor), "utf-8", "backslashreplace", line_buffering=True, write_through=True
    )


def process_state(pid: int) -> str:
    """Return the state letter of a process: R, S, D, T (stopped), Z, ...; ``?``: there is no process."""
    fields = _stat_fields(pid)
    return fields[0] if fields else "?"


def process_start_ticks(pid: int) -> int | None:
    """Return the start time in ticks since boot, which with the pid is unique; ``None``: it has ended."""
    fields = _stat_fields(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else None


def process_cpu_ticks(pid: int) -> int:
    """Return the processor time used by all threads, in clock ticks; -1: there is no such process."""
    fields = _stat_fields(pid)
    return int(fields[11]) + int(fields[12]) if fields else -1


def process_run_ns(pid: int) -> int:
    """Return the time that all threads have run, in nanoseconds; -1: there is no such process.

    If the kernel does not count nanoseconds, the result is in clock ticks."""
    total, counted = 0, False
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/schedstat", "rb", 0) as file:
                total, counted = total + int(file.read(_STAT_BYTES).split()[0]), True
    return total if counted else process_cpu_ticks(pid)


class PausableClock:
    """A clock for timeouts of other processes that tolerates pauses of its own process.

    Time in which the own process did not run (stopped, or the machine paused) counts as one poll at most:
    the other processes may have been paused too."""

    def __init__(self, longest_interval: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest, self._clock = longest_interval, clock
        self._polled_at, self._seconds = clock(), 0.0

    def read(self) -> float:
        """Return the seconds since the clock was made, without pauses."""
        now = self._clock()
        self._seconds += min(now - self._polled_at, self._longest)
        self._polled_at = now
        return self._seconds


class StopTimer:
    """Measures for how long a process has been stopped (SIGSTOP).

    A process that has run between two polls, even briefly, counts as slow, not as stopped."""

    def __init__(self) -> None:
        self._pid, self._run_ns = 0, -1
        self._since: float | None = None

    def poll(self, pid: int, now: float) -> float | None:
        """Return the seconds since the process was first seen stopped; ``None``: it is not stopped."""
        if process_state(pid) != "T":
            self._since = None
            return None
        run_ns = process_run_ns(pid)
        if self._since is None or (pid, run_ns) != (self._pid, self._run_ns):
            self._since, self._pid, self._run_ns = now, pid, run_ns
        return now - self._since


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; the name before it may contain anything."""
    with suppress(OSError), open(f"/proc/{pid}/stat", "rb", 0) as file:  # called often: avoid pathlib
        return file.read(_STAT_BYTES).rpartition(b")")[2].decode("ascii").split()
    return []
