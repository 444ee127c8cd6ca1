"""A clock that jumps from event to event."""

import heapq
from collections.abc import Callable
from itertools import count

__all__ = ["Clock"]


class Clock:
    """What is to be done at a time is done in the order of times, and of being asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        """Asks for something to be done."""
        heapq.heappush(self._due, (self.now + seconds, next(self._order), what))

    def run(self, until: float) -> None:
        """Does all that is due before ``until``."""
        while self._due and self._due[0][0] < until:
            self.now, _, what = heapq.heappop(self._due)
            what()
        self.now = until
