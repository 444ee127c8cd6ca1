"""The application of the page of many runs.

    GET /api/run            the states of all runs in a sentence
    GET /api/runs           the table: filter, sort, group
    GET /api/runs/curves    curves of chosen runs, by one axis
    GET /api/runs/diff      what differs between chosen runs
    POST /api/runs/...      notes, archive, deletion: `runs_writes`
    GET /run/ID/            the page of one run: `run_pages`

`myriad.dashboard.request_guard` checks every request. No route takes a path: runs are named by ids from the
table.
"""

from collections.abc import Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route

from myriad.dashboard.app import PageFiles, answer_errors
from myriad.dashboard.many.live_table import LiveTable
from myriad.dashboard.many.run_pages import RunPages
from myriad.dashboard.many.runs_api import RunsApi
from myriad.dashboard.many.runs_writes import write_routes
from myriad.dashboard.request_guard import Access, Guard
from myriad.dashboard.run_page import json_response

__all__ = ["build_runs_app"]


def build_runs_app(table: LiveTable, access: Access, pages: RunPages, *, may_write: bool = False) -> Guard:
    """Build the application for the runs of a table.

    ``access`` decides which requests are answered; ``pages``: those of single runs; ``may_write``: whether
    the page may write notes, archive and delete."""
    api, page = RunsApi(table, may_write=may_write), PageFiles("runs.html")

    @asynccontextmanager
    async def life(app: Starlette) -> Any:
        table.start()
        pages.start()
        yield
        await run_in_threadpool(table.stop)
        await pages.stop()

    routes: list[BaseRoute] = [
        Route("/api/run", _endpoint(api.run)),
        Route("/api/runs", _endpoint(api.runs)),
        Route("/api/runs/curves", _endpoint(api.curves)),
        Route("/api/runs/diff", _endpoint(api.diff)),
        *write_routes(table, may_write=may_write),
        Mount("/run/{id}", app=pages),
        Route("/", page.index),
        Route("/static/{name:path}", page.file),
    ]
    return Guard(answer_errors(routes, life), access)


def _endpoint(answer: Callable[[Mapping[str, str]], Any]) -> Callable[[Request], Response]:
    """Return a synchronous endpoint, which the server runs in a thread."""

    def ask(request: Request) -> Response:
        return json_response(answer(request.query_params))

    return ask
