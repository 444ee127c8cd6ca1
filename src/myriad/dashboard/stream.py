"""Tells pages that something has changed; what, they ask.

    event: changed
    data: {"last_step":117,"events":4,"metrics":117}

A page that reads slowly misses changes, never the last one: nothing is kept for it.
"""

import asyncio
import time
from collections.abc import AsyncIterator

from starlette.responses import PlainTextResponse, Response, StreamingResponse

from myriad.dashboard.tile import to_json
from myriad.dashboard.watched import Watched

__all__ = ["Stream"]

_AT_MOST_EVERY_SECONDS, _ALIVE_EVERY_SECONDS = 0.5, 15.0
_MOST_PAGES = 100


class Stream:
    """Of one run, for any number of pages up to a bound."""

    def __init__(self, watched: Watched) -> None:
        self._watched, self._pages = watched, 0

    def open(self) -> Response:
        """Goes on until the page leaves."""
        if self._pages >= _MOST_PAGES:
            return PlainTextResponse(f"{_MOST_PAGES} pages are open already\n", 429)
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[bytes]:
        seen, told = None, time.monotonic()
        self._pages += 1
        try:
            yield b"retry: 1000\n\n"
            while not self._watched.ending:
                if (now := self._watched.changes) != seen:
                    seen, told = now, time.monotonic()
                    yield b"event: changed\ndata: " + to_json(self._facts()) + b"\n\n"
                elif time.monotonic() - told > _ALIVE_EVERY_SECONDS:
                    told = time.monotonic()
                    yield b": alive\n\n"
                await asyncio.sleep(_AT_MOST_EVERY_SECONDS)
        finally:
            self._pages -= 1

    def _facts(self) -> dict[str, int | None]:
        files = self._watched.files
        return {
            "last_step": self._watched.last_step,
            "events": len(files.events),
            "metrics": len(files.metrics),
        }
