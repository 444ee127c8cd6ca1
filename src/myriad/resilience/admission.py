"""Admission of connections to a listener: an unauthenticated connection has a deadline, and there are few.

    accept ──► waiting (at most `limit`, each at most `seconds`) ──► authenticated: no longer counted
                  │ one more than `limit`
                  └──► the oldest connection of the address that has most is closed

A real node authenticates within milliseconds, so the oldest waiting connection is almost never a node.
Closing the oldest instead of refusing the newest lets nodes in while a stranger opens connections as fast as
it can. What is refused is counted, and reported at most once in `_REPORT_SECONDS`: a flood must not fill the
log.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

__all__ = ["Admission"]

_LOG = logging.getLogger(__name__)
_REPORT_SECONDS = 10.0


class Admission:
    """The connections of one listener that have not authenticated yet."""

    def __init__(self, limit: int, seconds: float) -> None:
        """Allow ``limit`` connections at a time, and each of them ``seconds`` to authenticate."""
        self._limit, self._seconds = limit, seconds
        self._waiting: dict[asyncio.StreamWriter, str] = {}
        """Oldest first, with the address of the other end."""
        self._num_refused, self._reported_at = 0, -_REPORT_SECONDS

    @property
    def num_waiting(self) -> int:
        """Return the number of connections that have not authenticated."""
        return len(self._waiting)

    @asynccontextmanager
    async def authenticating(self, writer: asyncio.StreamWriter) -> AsyncIterator[None]:
        """Count a connection while it authenticates. Raises ``TimeoutError`` when it takes too long."""
        self._waiting[writer] = str((writer.get_extra_info("peername") or [""])[0])
        if len(self._waiting) > self._limit:
            self._close_oldest()
        try:
            async with asyncio.timeout(self._seconds):
                yield
        except Exception as error:
            if writer in self._waiting:
                self._refused("not authenticated in time" if isinstance(error, TimeoutError) else str(error))
            raise
        finally:
            self._waiting.pop(writer, None)

    def _refused(self, reason: str) -> None:
        """Count a refused connection, and log how many there were since the last report."""
        self._num_refused += 1
        if time.monotonic() - self._reported_at < _REPORT_SECONDS:
            return
        _LOG.warning("refused %d unauthenticated connections; the last one: %s", self._num_refused, reason)
        self._num_refused, self._reported_at = 0, time.monotonic()

    def _close_oldest(self) -> None:
        ((crowded, _),) = Counter(self._waiting.values()).most_common(1)
        oldest = next(writer for writer, address in self._waiting.items() if address == crowded)
        del self._waiting[oldest]
        oldest.transport.abort()
        self._refused(f"{crowded} has too many")
