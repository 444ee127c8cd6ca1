"""Time spans on a GPU and follow the device's progress, with events on the current stream.

Each span records a mark (an event from a pool) at its begin and at its end. A span that directly follows
another shares the other's end mark. The host runs far ahead of the device, so marks wait in a log:

    log        b forward | b tensor_comm | e tensor_comm | e forward, b wait | e wait | ...
                                         ^ the device is here: inside a forward, out of communication

Events of a stream complete in order, so a binary search finds the newest mark that the device has passed. The
host reads the passed marks in bulk where it is idle: one time query per mark and no status query. Another
thread may read the device's position (`DeviceClock.position`) without changing the log.

Times are sums of the intervals between marks, from a mark whose host time is known because it completed at
once on an idle device. `DeviceClock.align` renews that mark every few seconds, where the host has waited for
the device in any case: the two clocks drift apart.
"""

import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from myriad.telemetry.progress.operation_counters import COUNTERS, Operation

__all__ = ["Begun", "DeviceClock", "DevicePosition", "Ended", "Mark", "cuda_clock"]

_RENEW_NS = 5_000_000_000
_LOOKS = 20
"""Maximum number of queries of an event that should complete at once."""
_MOST_WAITING = 1 << 17
"""Maximum number of pending marks. Beyond it, spans get the host's times."""


class Mark(Protocol):
    """A point on a stream: `torch.cuda.Event` with timing."""

    def record(self) -> None:
        """Record the mark on the current stream."""
        ...

    def query(self) -> bool:
        """Return whether the device has passed the mark."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has passed the mark."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds from this mark to ``end_event``."""
        ...


class Ended(NamedTuple):
    """The end of a span: its record and its weights in the totals.

    A weight is 1, 0, or -1 for time that is subtracted from the enclosing span.
    """

    when: int
    what: int
    busy: int
    """Weight of the duration in the compute total."""
    exposed: int
    """Weight of the duration in the total of waiting for other ranks."""
    recorded: bool = True


class Begun(NamedTuple):
    """The begin of a span."""

    name: str
    operation: Operation | None


_Entry = list[Any]
"""Entry of the log: a mark, its `Ended` or ``None``, its `Begun` or ``None``. It is a list for speed, as a
step creates thousands."""


class DevicePosition:
    """The spans and operations that a device has entered and left, up to a mark."""

    def __init__(self) -> None:
        self.counters = [0] * len(COUNTERS)
        self.waits = self.entered = self.left = 0
        """Wait word and counts of waits entered and left, as on a row of the progress page."""
        self.open: list[tuple[Begun, int]] = []
        """Open spans, outermost first, each with its start in nanoseconds."""
        self.is_idle = False
        """Whether the device has completed all issued work."""

    @property
    def activity(self) -> str | None:
        """Name of the innermost open span; empty outside of spans, ``None`` if the device is idle."""
        if self.is_idle:
            return None
        return self.open[-1][0].name if self.open else ""

    def copy(self) -> "DevicePosition":
        """Return an independent copy."""
        other = DevicePosition()
        other.counters, other.open = self.counters.copy(), self.open.copy()
        other.waits, other.entered, other.left = self.waits, self.entered, self.left
        return other

    def begin(self, begun: Begun, now_ns: int) -> None:
        """Advance past the begin of a span."""
        self.open.append((begun, now_ns))
        operation = begun[1]
        if operation is None:
            return
        for counter in operation.counters:
            self.counters[counter] += 1
        if operation.waits:
            self.entered += 1
            self.waits = operation.waits

    def end(self) -> int:
        """Advance past the end of the innermost span, and return its start in nanoseconds."""
        begun, began_ns = self.open.pop()
        operation = begun[1]
        if operation is not None and operation.waits:
            self.left += 1
            self.waits = 0
        return began_ns


class DeviceClock:
    """Records marks from a pool and times the spans between them.

    One thread at a time may write; another thread may read `position`.
    """

    def __init__(self, make: Callable[[], Mark]) -> None:
        """Wait for the device once, to set the reference time. ``make`` returns a new, unrecorded mark."""
        self._make = make
        self._pool: list[Mark] = []
        self._log: deque[_Entry] = deque()
        self._position, self._lock = DevicePosition(), threading.Lock()
        self._last = make()
        self._last.record()
        self._last.synchronize()
        self._last_ns = self._zero_ns = time.monotonic_ns()
        """Host times at which the device passed the newest mark read and the reference mark."""

    def _mark(self) -> Mark:
        mark = self._pool.pop() if self._pool else self._make()
        mark.record()
        return mark

    def begin(self, begun: Begun, *, follows: bool) -> bool:
        """Record the begin of a span.

        ``follows`` means that no work was issued since the last span ended. Return false if too many marks
        are pending; the caller must then not call `end` for this span.
        """
        log = self._log
        if len(log) >= _MOST_WAITING and begun.operation is None:
            return False
        if follows and log and log[-1][2] is None:
            log[-1][2] = begun
        else:
            log.append([self._mark(), None, begun])
        return True

    def end(self, ended: Ended) -> None:
        """Record the end of the innermost span."""
        self._log.append([self._mark(), ended, None])

    def collect(self, write: Callable[[int, int, int, int], None]) -> dict[int, tuple[int, int]]:
        """Call ``write`` for each span that the device has passed, in order.

        Its arguments are the start in ns by the host's monotonic clock, the duration in ns, when and what.
        Return, for each ``when``, the nanoseconds of compute and of waiting for other ranks.
        """
        sums: dict[int, tuple[int, int]] = {}
        with self._lock:
            log, pool, position = self._log, self._pool, self._position
            last, last_ns = self._last, self._last_ns
            for _ in range(_num_passed(log)):
                mark, ended, begun = log.popleft()
                last_ns += round(last.elapsed_time(mark) * 1e6)
                pool.append(last)
                last = mark
                if ended is not None:
                    when, what, busy, exposed, recorded = ended
                    start_ns = position.end()
                    took_ns = last_ns - start_ns
                    if recorded:
                        write(start_ns, took_ns, when, what)
                    if busy or exposed:
                        busy_ns, exposed_ns = sums.get(when, (0, 0))
                        sums[when] = busy_ns + busy * took_ns, exposed_ns + exposed * took_ns
                if begun is not None:
                    position.begin(begun, last_ns)
            self._last, self._last_ns = last, last_ns
        return sums

    def position(self) -> DevicePosition | None:
        """Return the device's position, for another thread. While device and host move, it may be stale.
        ``None`` if the host holds the lock."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            log, position = list(self._log), self._position.copy()
        finally:
            self._lock.release()
        count = _num_passed(log)
        for _, ended, begun in log[:count]:
            if ended is not None:
                position.end()
            if begun is not None:
                position.begin(begun, 0)
        position.is_idle = count == len(log)
        return position

    @property
    def is_due(self) -> bool:
        """Whether the reference mark is old enough to be renewed."""
        return time.monotonic_ns() - self._zero_ns > _RENEW_NS

    def align(self) -> None:
        """Renew the reference mark if the device is idle. Call it after the host has waited for the device
        and `collect` has read all marks."""
        if self._log:
            return
        before, zero = time.monotonic_ns(), self._mark()
        if not any(zero.query() for _ in range(_LOOKS)):
            self._pool.append(zero)
            return
        now_ns = (before + time.monotonic_ns()) // 2
        drift = now_ns - self._last_ns - round(self._last.elapsed_time(zero) * 1e6)
        with self._lock:
            self._position.open = [(begun, at + drift) for begun, at in self._position.open]
            self._pool.append(self._last)
            self._last, self._last_ns, self._zero_ns = zero, now_ns, now_ns


def _num_passed(log: "deque[_Entry] | list[_Entry]") -> int:
    """Return how many of the marks, which are in stream order, the device has passed."""
    if not log or not log[0][0].query():
        return 0
    return bisect_left(range(len(log)), True, lo=1, key=lambda at: not log[at][0].query())


def cuda_clock() -> DeviceClock:
    """Return a clock of this process's current GPU."""
    import torch

    return DeviceClock(lambda: torch.cuda.Event(enable_timing=True))
