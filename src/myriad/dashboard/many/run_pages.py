"""The pages of single runs below the page of many runs.

    GET /run/ID/             the page, the same as that of `myriad watch RUN`
    GET /run/ID/api/...      answers about that run

ID is one of the table, so no request names a folder. The first question about a run opens it: its files are
read and followed as they grow. It is closed when there was no request for two minutes and no page listens for
its changes. At most four runs are open. The one whose last request is oldest makes room, unless a page
listens.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from myriad.dashboard.app import PageFiles, answer_errors
from myriad.dashboard.many.live_table import LiveTable
from myriad.dashboard.run_page import RunPage
from myriad.dashboard.tile import to_json
from myriad.errors import MyriadError
from myriad.run import Run

__all__ = ["MOST_OPEN", "RunPages"]

_LOG = logging.getLogger(__name__)
MOST_OPEN = 4
_UNUSED_SECONDS, _LOOK_EVERY_SECONDS = 120.0, 10.0


@dataclass
class _Open:
    """A run that is open."""

    page: RunPage
    app: ASGIApp
    used_at: float
    num_requests: int = 0
    """Requests that are being answered; a page that listens for changes is one."""


class RunPages:
    """The pages of the runs of a table, as an application below /run/{id}."""

    def __init__(
        self, table: LiveTable, open_run: Callable[[Run], RunPage], unused_seconds: float = _UNUSED_SECONDS
    ) -> None:
        """``open_run`` reads a run; it raises `MyriadError` for one that cannot be read. ``unused_seconds``:
        how long a run stays open without a request."""
        self._table, self._open_run, self._unused_seconds = table, open_run, unused_seconds
        self._open: dict[str, _Open] = {}
        self._files = PageFiles()
        self._opening = asyncio.Lock()
        self._closer: asyncio.Task[None] | None = None

    @property
    def open_runs(self) -> list[str]:
        """The ids of the runs that are open."""
        return list(self._open)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request about a run."""
        name = str(scope["path_params"]["id"])
        row = self._table.row(name)
        if row is None:
            return await _refusal(404, "the table has no such run")(scope, receive, send)
        if scope["path"].removeprefix(scope["root_path"]) in ("", "/"):
            return await (await self._files.index(Request(scope)))(scope, receive, send)
        try:
            found = await self._opened(name, Run(row.path))
        except (MyriadError, OSError) as error:
            return await _refusal(409, str(error))(scope, receive, send)
        if found is None:
            text = f"{MOST_OPEN} runs are open in other tabs: close the tab of one of them"
            return await _refusal(503, text)(scope, receive, send)
        found.num_requests += 1
        try:
            await found.app(scope, receive, send)
        finally:
            found.num_requests -= 1
            found.used_at = time.monotonic()

    async def _opened(self, name: str, run: Run) -> _Open | None:
        """Return an open run; ``None`` if pages listen to as many as can be open."""
        async with self._opening:
            if name not in self._open:
                if len(self._open) >= MOST_OPEN and not await self._close_oldest():
                    return None
                page = await run_in_threadpool(self._open_run, run)
                page.start()
                self._open[name] = _Open(page, answer_errors(page.routes, None), time.monotonic())
            return self._open[name]

    async def _close_oldest(self) -> bool:
        unused = [(one.used_at, name) for name, one in self._open.items() if not one.num_requests]
        if unused:
            await self._close(min(unused)[1])
        return bool(unused)

    async def _close(self, name: str) -> None:
        await run_in_threadpool(self._open.pop(name).page.stop)

    async def close_unused(self) -> None:
        """Close the runs that are no longer used."""
        async with self._opening:
            limit = time.monotonic() - self._unused_seconds
            for name, one in list(self._open.items()):
                if not one.num_requests and one.used_at <= limit:
                    await self._close(name)

    async def _close_from_time_to_time(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_SECONDS)
            try:
                await self.close_unused()
            except Exception as error:  # a thread that does not end: the others are closed later
                _LOG.warning("a run was not closed: %r", error)

    def start(self) -> None:
        """Begin to close unused runs. Call it once, in the server's loop."""
        self._closer = asyncio.create_task(self._close_from_time_to_time())

    def end(self) -> None:
        """Mark all open runs as shutting down, so that endless answers end."""
        for one in self._open.values():
            one.page.watched.end()

    async def stop(self) -> None:
        """Stop closing unused runs, and close every run that is open."""
        if self._closer is not None:
            self._closer.cancel()
            with suppress(asyncio.CancelledError):
                await self._closer
        for name in list(self._open):
            await self._close(name)


def _refusal(code: int, text: str) -> Response:
    return Response(to_json({"error": text}), code, media_type="application/json")
