"""When a GPU did what a span asked it to: events on the current stream, looked at once they have passed.

An event is recorded where a span begins and where it ends, taken from a pool, and read at the start of a
later step: nothing waits for the device. Its times count from an event whose time by the host is known, as it
passed at once when nothing else was under way. That is renewed every few seconds, where the host has waited
for the device in any case (`DeviceClock.settle`): events give milliseconds as float32, 8 ms apart after a
day, and two clocks do not run alike for long.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

__all__ = ["Counted", "DeviceClock", "Mark", "cuda_clock"]

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


class Counted(NamedTuple):
    """What a span counts as, besides being one: 1, 0, or -1 for what is taken off the span around it."""

    busy: int
    """It counts as computing."""
    exposed: int
    """It counts as waiting for other ranks."""


class DeviceClock:
    """Marks from a pool, and the spans between them."""

    def __init__(self, make: Callable[[], Mark]) -> None:
        """``make``: a mark that was not recorded yet. Waits for the device, once."""
        self._make = make
        self._pool: list[Mark] = []
        self._waiting: deque[tuple[Mark, Mark, int, int, Counted]] = deque()
        self._zero = make()
        self._zero.record()
        self._zero.synchronize()
        self._zero_ns = time.monotonic_ns()

    def mark(self) -> Mark:
        """Here."""
        mark = self._pool.pop() if self._pool else self._make()
        mark.record()
        return mark

    def add(self, begun: Mark, ended: Mark, when: int, what: int, counted: Counted) -> bool:
        """Keep a span until the device has passed it. False: too many are kept."""
        if len(self._waiting) == _MOST_WAITING:
            self._pool += (begun, ended)
            return False
        self._waiting.append((begun, ended, when, what, counted))
        return True

    def collect(self, write: Callable[[int, int, int, int], None]) -> tuple[int, int]:
        """Write (start in ns by the host's monotonic clock, duration in ns, when, what) of the spans that
        the device has passed, in their order. Returns the nanoseconds that it computed in them, and those
        that it waited for other ranks."""
        busy_ns = exposed_ns = 0
        while self._waiting and self._waiting[0][1].query():
            begun, ended, when, what, counted = self._waiting.popleft()
            took_ns = round(begun.elapsed_time(ended) * 1e6)
            # by its end: it may have begun before what times count from
            write(self._zero_ns + round(self._zero.elapsed_time(ended) * 1e6) - took_ns, took_ns, when, what)
            busy_ns += counted.busy * took_ns
            exposed_ns += counted.exposed * took_ns
            self._pool += (begun, ended)
        return busy_ns, exposed_ns

    @property
    def is_due(self) -> bool:
        """Times have counted from the same event for long enough."""
        return time.monotonic_ns() - self._zero_ns > _RENEW_NS

    def settle(self) -> None:
        """Count from now, if the device has nothing to do: to be called where the host has waited for it, and
        when all that it has passed was collected."""
        before, zero = time.monotonic_ns(), self.mark()
        if any(zero.query() for _ in range(_LOOKS)):
            self._zero, zero = zero, self._zero
            self._zero_ns = (before + time.monotonic_ns()) // 2
        self._pool.append(zero)


def cuda_clock() -> DeviceClock:
    """Of this process's GPU."""
    import torch

    return DeviceClock(lambda: torch.cuda.Event(enable_timing=True))
