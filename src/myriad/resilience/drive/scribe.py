"""Writes in a thread of its own, in order, so that a disk that hangs holds up nobody for long.

    decide ──► enter(journal line) ──► settle: wait until it is on disk, half a second at most ──► act
               enter(event)            once it hangs nobody waits, until it goes on again

What hangs is written when the disk comes back; what fails is logged. Nobody is told to act on what is not
written, but a run whose disk hangs would else neither see nor repair a fault: the caller is told, and goes
on.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from myriad.run import Run

__all__ = ["Scribe", "ScribeHandler"]

_LOG = logging.getLogger(__name__)
_WAIT_SECONDS = 0.5
_MOST_WAITING = 1000


class Scribe:
    """One thread. It does not keep its process alive."""

    def __init__(self) -> None:
        self._todo: deque[tuple[str, Callable[[], object]]] = deque()
        """The first is at work."""
        self._changed = threading.Condition()
        self._hangs = False
        threading.Thread(target=self._work, name="scribe", daemon=True).start()

    def enter(self, what: str, write: Callable[[], object]) -> None:
        """To be written after all else. ``what``, for the log if it cannot be: "an event"."""
        with self._changed:
            self._todo.append((what, write))
            if len(self._todo) > _MOST_WAITING:
                del self._todo[1]  # a later journal line knows what an earlier one knew
            self._changed.notify_all()

    def enter_event(self, run: Run, event: str, **fields: Any) -> None:
        """A line of the run's events, with the time that it is now."""
        write = partial(run.append_event, event, **{"time": time.time()} | fields)
        self.enter(f"an event ({event})", write)

    def settle(self) -> bool:
        """Waits until all is written. False: the disk hangs."""
        with self._changed:
            if not self._hangs:
                self._hangs = not self._changed.wait_for(lambda: not self._todo, _WAIT_SECONDS)
            return not self._hangs

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._todo)
                what, write = self._todo[0]
            try:
                write()
            except Exception as error:  # a full disk costs what a next driver would know, never the run
                if what:
                    _LOG.warning("%s was not written: %s", what, error)
            with self._changed:
                self._todo.popleft()
                self._hangs = False
                self._changed.notify_all()


class ScribeHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Logs through a scribe: the log is mostly on the disk that hangs."""

    def __init__(self, scribe: Scribe) -> None:
        super().__init__()
        self._scribe = scribe

    def emit(self, record: logging.LogRecord) -> None:
        """Later."""
        self._scribe.enter("", lambda: super(ScribeHandler, self).emit(record))
