"""When a GPU did what a span asked it to: events on the current stream, looked at once they have passed.

An event is recorded where a span begins and where it ends, taken from a pool, and read at the start of a
later step: nothing waits for the device. Its times count from an event whose time by the host is known, as it
passed at once when nothing else was under way. That is renewed every few seconds: events tell milliseconds as
float32, and two clocks do not run alike for long.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["DeviceClock", "Mark", "cuda_clock"]

_RENEW_NS = 5_000_000_000
_LOOKS = 20
"""At an event that should pass at once."""
_MOST_WAITING = 1 << 16
"""Spans whose device has not come to them: beyond, the host's times are taken."""


class Mark(Protocol):
    """A point on a stream: `torch.cuda.Event` with timing."""

    def record(self) -> None:
        """Here."""
        ...

    def query(self) -> bool:
        """The device has passed it."""
        ...

    def synchronize(self) -> None:
        """Waits for that."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds to another of its kind."""
        ...


class DeviceClock:
    """Marks from a pool, and the spans between them."""

    def __init__(self, make: Callable[[], Mark]) -> None:
        """``make``: a mark that was not recorded yet. Waits for the device, once."""
        self._make = make
        self._pool: list[Mark] = []
        self._waiting: deque[tuple[Mark, Mark, int, int, int]] = deque()
        self._zero = make()
        self._zero.record()
        self._zero.synchronize()
        self._zero_ns = time.monotonic_ns()

    def mark(self) -> Mark:
        """Here."""
        mark = self._pool.pop() if self._pool else self._make()
        mark.record()
        return mark

    def add(self, begun: Mark, ended: Mark, when: int, what: int, busy: int = 0) -> bool:
        """Keep a span until the device has passed it. False: too many are kept.

        ``busy``: 1 if its duration counts as computing, -1 if it is taken off that of the span around it.
        """
        if len(self._waiting) == _MOST_WAITING:
            self._pool += (begun, ended)
            return False
        self._waiting.append((begun, ended, when, what, busy))
        return True

    def collect(self, write: Callable[[int, int, int, int], None]) -> int:
        """Write (start in ns by the host's monotonic clock, duration in ns, when, what) of the spans that
        the device has passed, in their order. Returns the nanoseconds that it computed in them."""
        busy_ns = 0
        while self._waiting and self._waiting[0][1].query():
            begun, ended, when, what, busy = self._waiting.popleft()
            start_ns = self._zero_ns + round(self._zero.elapsed_time(begun) * 1e6)
            took_ns = round(begun.elapsed_time(ended) * 1e6)
            write(start_ns, took_ns, when, what)
            busy_ns += busy * took_ns
            self._pool += (begun, ended)
        if not self._waiting and time.monotonic_ns() - self._zero_ns > _RENEW_NS:
            self._renew()
        return busy_ns

    def _renew(self) -> None:
        """Counts from now, if the device has nothing to do; all that was waited for has been read."""
        before, zero = time.monotonic_ns(), self.mark()
        if any(zero.query() for _ in range(_LOOKS)):
            self._zero, zero = zero, self._zero
            self._zero_ns = (before + time.monotonic_ns()) // 2
        self._pool.append(zero)


def cuda_clock() -> DeviceClock:
    """Of this process's GPU."""
    import torch

    return DeviceClock(lambda: torch.cuda.Event(enable_timing=True))
