"""POST /api/trace: the page asks for what `myriad trace` does, by the same way.

{"ranks": [3, 7], "seconds": 5, "what": "profile"}  ──►  {"files": [...], "found": [...], "problems": [...]}
GET /api/traces/NAME                                ──►  one of these files, to be kept
GET /api/around/NAME                                ──►  link counters around an anomaly, the same way
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from myriad.dashboard.api.questions import QuestionError
from myriad.dashboard.tile import to_json
from myriad.errors import MyriadError
from myriad.telemetry.trace_request import MOST_SECONDS, What

__all__ = ["Ask", "trace_endpoint", "trace_file"]

Ask = Callable[[Sequence[int], float, What], Mapping[str, Any]]
"""Ranks (none: all), seconds and what; returns when it is done. Raises `MyriadError`."""
_MOST_BYTES, _MOST_RANKS, _MOST_RANK = 2**16, 1024, 2**20


def trace_endpoint(ask: Ask | None) -> Callable[[Request], Any]:
    """``None``: this server only has what a run sends to it, and cannot ask it for anything."""

    async def answer(request: Request) -> Response:
        if ask is None:
            return _told({"error": "this server cannot reach the run's driver"}, 409)
        ranks, seconds, what = await _asked(request)
        try:
            return _told(dict(await run_in_threadpool(ask, ranks, seconds, what)), 200)
        except MyriadError as error:
            return _told({"error": str(error)}, 400 if error.exit_code == 2 else 502)

    return answer


def trace_file(folder: Path) -> Callable[[Request], Response]:
    """A file of a folder of the run, by its name there: a link leads nowhere, no name out of it."""

    def answer(request: Request) -> Response:
        name = request.path_params["name"]
        try:
            with os.scandir(folder) as entries:
                there = {entry.name for entry in entries if entry.is_file(follow_symlinks=False)}
        except OSError:
            there = set()
        if name not in there or folder.is_symlink():
            raise HTTPException(404, "the run has no such trace")
        return FileResponse(folder / name, media_type="application/octet-stream", filename=name)

    return answer


async def _asked(request: Request) -> tuple[list[int], float, What]:
    length = request.headers.get("content-length", "")
    if not (length.isdecimal() and len(length) < 8 and int(length) <= _MOST_BYTES):
        raise QuestionError("content-length", length, f"at most {_MOST_BYTES}")
    try:
        found = json.loads(await request.body())
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise QuestionError("body", "", "a JSON object with ranks, seconds and what")
    return _ranks(found.get("ranks")), _seconds(found.get("seconds")), _what(found.get("what", "profile"))


def _ranks(given: Any) -> list[int]:
    if not isinstance(given, list) or not 0 < len(given) <= _MOST_RANKS:
        raise QuestionError("ranks", str(given), f"a list of 1 to {_MOST_RANKS} numbers")
    if not all(type(one) is int and 0 <= one < _MOST_RANK for one in given):
        raise QuestionError("ranks", str(given), "numbers of ranks")
    return given


def _seconds(given: Any) -> float:
    if type(given) not in (int, float) or not 0 < given <= MOST_SECONDS:
        raise QuestionError("seconds", str(given), f"above 0, at most {MOST_SECONDS:g}")
    return float(given)


def _what(given: Any) -> What:
    for what in get_args(What):
        if given == what:
            chosen: What = what
            return chosen
    raise QuestionError("what", str(given), f"one of {', '.join(get_args(What))}")


def _told(found: dict[str, Any], status: int) -> Response:
    return Response(to_json(found), status, media_type="application/json")
