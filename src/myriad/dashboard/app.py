"""The routes of the dashboard, and what each answers with."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from myriad.dashboard.analyst import Analyst
from myriad.dashboard.api import about, ranks, spans, time
from myriad.dashboard.api.questions import QuestionError
from myriad.dashboard.collector import Collector
from myriad.dashboard.follower import Follower
from myriad.dashboard.guard import Guard
from myriad.dashboard.page_files import PageFiles
from myriad.dashboard.stream import Stream
from myriad.dashboard.tile import to_json
from myriad.dashboard.watched import Watched

__all__ = ["build_app"]

_Answer = Callable[[Watched, Analyst, Mapping[str, str]], Any]
_ANSWERS: dict[str, _Answer] = {
    "run": about.run,
    "overview": lambda watched, analyst, query: about.overview(watched, query),
    "faults": lambda watched, analyst, query: about.faults(watched, query),
    "heat": lambda watched, analyst, query: spans.heat(watched, query),
    "steps": lambda watched, analyst, query: spans.steps(watched, query),
    "worst": spans.worst,
    "timeline": spans.timeline,
    "rank/{rank}": ranks.rank,
    "silent": ranks.silent,
    "waterfall": time.waterfall,
    "losses": time.shares,
}


def build_app(
    watched: Watched, token: str | None = None, collect: Path | None = None, more: Sequence[BaseRoute] = ()
) -> Guard:
    """For one run. ``token``: needed of whoever asks; ``collect``: where posted spans are kept; ``more``:
    what this room does not know."""
    follower, stream, collector = Follower(watched), Stream(watched), Collector(watched, collect)
    analyst, page = Analyst(watched), PageFiles()

    @asynccontextmanager
    async def life(app: Starlette) -> Any:
        follower.start()
        collector.start()
        analyst.start()
        yield
        await run_in_threadpool(follower.stop)
        await run_in_threadpool(analyst.stop)
        await run_in_threadpool(collector.stop)

    async def changes(request: Request) -> Response:
        return stream.open()

    routes: list[BaseRoute] = [Route("/api/spans", collector.take, methods=["POST"])]
    routes += [
        Route(f"/api/{name}", _endpoint(watched, analyst, answer)) for name, answer in _ANSWERS.items()
    ]
    routes += [
        Route("/api/stream", changes),
        Route("/", page.index),
        Route("/static/{name:path}", page.file),
        *more,
    ]
    handlers = {QuestionError: _wrong, HTTPException: _missing}
    return Guard(Starlette(routes=routes, exception_handlers=handlers, lifespan=life), token)


def _endpoint(watched: Watched, analyst: Analyst, answer: _Answer) -> Callable[[Request], Response]:
    """Not async: answered in a thread, beside others."""

    def ask(request: Request) -> Response:
        return _response(answer(watched, analyst, {**request.query_params, **request.path_params}))

    return ask


def _response(found: Any) -> Response:
    if isinstance(found, bytes):
        return Response(found, media_type="application/octet-stream")
    return Response(to_json(found), media_type="application/json")


def _wrong(request: Request, error: Exception) -> Response:
    return Response(to_json({"error": str(error)}), 400, media_type="application/json")


def _missing(request: Request, error: Exception) -> Response:
    code, text = (error.status_code, error.detail) if isinstance(error, HTTPException) else (500, "a bug")
    return Response(to_json({"error": text}), code, media_type="application/json")
