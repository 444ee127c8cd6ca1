"""Background threads for work that may hang: writes in order (`AsyncWriter`), and single calls
(`run_in_thread`).

    decide ──► enter(journal line) ──► settle: wait until it is on disk, half a second at most ──► act
               enter(event)            once the disk hangs, nothing waits until it works again

What hangs is written when the disk is back; failures are logged. If a decision cannot be written in time,
`settle` returns false and the caller acts anyway: otherwise a run on a hung disk could not recover from a
fault. No thread delays the end of the process.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from myriad.run import Run

__all__ = ["AsyncLogHandler", "AsyncWriter", "run_in_thread"]

_LOG = logging.getLogger(__name__)
_WAIT_SECONDS = 0.5
_MOST_WAITING = 1000


class AsyncWriter:
    """A thread that writes in order. It does not keep its process alive."""

    def __init__(self) -> None:
        self._todo: deque[tuple[str, Callable[[], object]]] = deque()
        """Pending writes; the first is in progress."""
        self._changed = threading.Condition()
        self._hangs = False
        threading.Thread(target=self._work, name="disk writer", daemon=True).start()

    def enter(self, what: str, write: Callable[[], object]) -> None:
        """Append a write to the queue. ``what`` names it in the log if it fails, as in "an event"."""
        with self._changed:
            self._todo.append((what, write))
            if len(self._todo) > _MOST_WAITING:
                del self._todo[1]  # a later journal line has all that an earlier one has
            self._changed.notify_all()

    def enter_event(self, run: Run, event: str, **fields: Any) -> None:
        """Append an event to the run's events, with the present time."""
        write = partial(run.append_event, event, **{"time": time.time()} | fields)
        self.enter(f"an event ({event})", write)

    def wait_written(self) -> bool:
        """Wait until all is written. Return false if the disk hangs."""
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
            # a full disk costs log entries, never the run
            except Exception as error:
                if what:
                    _LOG.warning("%s was not written: %s", what, error)
            with self._changed:
                self._todo.popleft()
                self._hangs = False
                self._changed.notify_all()


class AsyncLogHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes log records in the writer thread, because the log is usually on the disk that may hang."""

    def __init__(self, disk_writer: AsyncWriter) -> None:
        super().__init__()
        self._disk_writer = disk_writer

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record in the writer thread."""
        self._disk_writer.enter("", lambda: super(AsyncLogHandler, self).emit(record))


T = TypeVar("T")


async def run_in_thread(work: Callable[[], T]) -> T:
    """Run ``work`` in a thread, and return or raise its result. If the caller is cancelled, the thread
    continues."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def complete(result: T | None, error: Exception | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, problem = None, None
        try:
            result = work()
        except Exception as error:
            problem = error
        with suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(complete, result, problem)

    threading.Thread(target=run, name="run_in_thread", daemon=True).start()
    return await future
