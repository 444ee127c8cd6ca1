"""Where batches of spans go, each place with a thread and a bounded queue: whoever offers never waits.

    offer ──► [ batches that wait: at most MAX_WAITING spans, the oldest are dropped ] ──► deliver

A place that fails is tried again, less and less often; one that hangs has its own thread to hang in. What was
dropped is counted, told when the place fails, and written with the next batch that arrives.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

from myriad.telemetry.batch import SpanBatch

__all__ = ["Outlet", "RefusedError", "Tell"]

_LOG = logging.getLogger(__name__)
MAX_WAITING = 2**20
"""Spans of 32 bytes."""
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 1.0, 30.0
_TELL_SECONDS = 30.0

Tell = Callable[[str, str, int], None]
"""Of a place: its name, what is wrong with it ("" when it is over), and how many spans that has cost."""


class RefusedError(Exception):
    """It does not take this, and never will."""


class Outlet:
    """One place."""

    def __init__(
        self,
        name: str,
        deliver: Callable[[Sequence[SpanBatch]], None],
        tell: Tell,
        *,
        every_seconds: float = 0.0,
        at_once: int | None = None,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        """``deliver`` does all or nothing; it raises ``OSError`` for what may work later, `RefusedError` for
        what will not. ``every_seconds``: how long batches are gathered before; ``at_once``: how many it
        takes, at most."""
        self.name, self._deliver, self._tell = name, deliver, tell
        self._every, self._at_once, self._max_waiting = every_seconds, at_once, max_waiting
        self._changed = threading.Condition()
        self._waiting: deque[SpanBatch] = deque()
        self._num_waiting = self._num_lost = 0
        self._due, self._pause, self._closing = 0.0, 0.0, False
        self._problem, self._told_problem, self._untold, self._tell_at = "", False, 0, 0.0
        self._thread = threading.Thread(target=self._run, name=f"myriad-{name}", daemon=True)
        self._thread.start()

    def offer(self, batch: SpanBatch) -> None:
        """To be delivered; returns at once."""
        with self._changed:
            first = not self._waiting
            self._add([batch])
            if first or self._is_due():  # else the thread knows when: it is not woken for nothing
                self._changed.notify()

    def close(self, seconds: float) -> None:
        """What waits is delivered, if that takes no longer."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(seconds)

    def _add(self, batches: Sequence[SpanBatch], *, first: bool = False) -> None:
        """Beyond the limit the oldest go, but never all."""
        if not self._waiting and not self._pause:
            self._due = time.monotonic() + self._every
        if first:
            self._waiting.extendleft(reversed(batches))
        else:
            self._waiting.extend(batches)
        self._num_waiting += sum(len(batch.records) for batch in batches)
        while self._num_waiting > self._max_waiting and len(self._waiting) > 1:
            oldest = self._waiting.popleft()
            self._num_waiting -= len(oldest.records)
            self._lose([oldest])

    def _lose(self, batches: Sequence[SpanBatch]) -> None:
        lost = sum(len(batch.records) for batch in batches)
        self._num_lost += lost + sum(batch.num_dropped for batch in batches)
        self._untold += lost

    def _run(self) -> None:
        while batches := self._take():
            try:
                self._deliver(batches)
            except RefusedError as error:
                with self._changed:
                    self._lose(batches)
                self._note(str(error))
            except Exception as error:  # whatever it is, the run goes on
                if not isinstance(error, OSError):
                    _LOG.warning("spans to %s", self.name, exc_info=error)
                if self._fail(batches):
                    break
                self._note(str(error) or type(error).__name__)
            else:
                self._pause = 0.0
                self._note("")
        if self._untold:
            self._tell(self.name, self._problem or "closed", self._untold)

    def _take(self) -> list[SpanBatch]:
        """What waits, once it is due; none: no more will."""
        with self._changed:
            while not (self._closing or self._is_due()):
                seconds = self._due - time.monotonic()
                self._changed.wait(max(0.001, seconds) if self._waiting else None)
            batches = list(islice(self._waiting, self._at_once))
            for batch in batches:
                self._waiting.popleft()
                self._num_waiting -= len(batch.records)
            if batches:
                first, lost = batches[0], self._num_lost
                batches[0], self._num_lost = replace(first, num_dropped=first.num_dropped + lost), 0
            return batches

    def _is_due(self) -> bool:
        late = time.monotonic() >= self._due
        return bool(self._waiting) and (
            late or (not self._pause and self._num_waiting * 2 > self._max_waiting)
        )

    def _fail(self, batches: Sequence[SpanBatch]) -> bool:
        """They wait again; at the end they are lost."""
        with self._changed:
            if self._closing:
                self._lose(batches)
                return True
            self._pause = min(_LONGEST_WAIT_SECONDS, max(_FIRST_WAIT_SECONDS, 2 * self._pause))
            self._due = time.monotonic() + self._pause
            self._add(batches, first=True)
            return False

    def _note(self, problem: str) -> None:
        """Tells that it begins to fail, or that this is over; not each second what changes each second."""
        self._problem = problem
        if (bool(problem) != self._told_problem or self._untold) and time.monotonic() >= self._tell_at:
            self._tell_at, self._told_problem = time.monotonic() + _TELL_SECONDS, bool(problem)
            untold, self._untold = self._untold, 0
            self._tell(self.name, problem, untold)
