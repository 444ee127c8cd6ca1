"""Routes that do not serve the page's views: metrics for Prometheus, traces and their files.

GET /metrics                      metrics for Prometheus
POST /api/trace                   what `myriad trace` does, requested by the page:
    {"ranks": [3, 7], "seconds": 5, "what": "profile"} -> {"files": [...], "found": [...], "problems":
    [...]}
GET /api/traces/NAME              one of these files, as a download
GET /api/around/NAME              link counters around an anomaly, as a download
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from myriad.dashboard.api.query_parameters import QueryParameterError, json_body
from myriad.dashboard.prometheus import CONTENT_TYPE, RunMetrics
from myriad.dashboard.tile import to_json
from myriad.dashboard.watched_run import WatchedRun
from myriad.errors import MyriadError
from myriad.telemetry.traces.trace_request import MOST_SECONDS, What

__all__ = ["Ask", "more_routes", "trace_endpoint", "trace_file"]

Ask = Callable[[Sequence[int], float, What], Mapping[str, Any]]
"""Requests a trace of ranks (none: all), for some seconds, of a kind. It returns when the trace is complete,
and raises `MyriadError`."""


def more_routes(watched: WatchedRun, ask: Ask | None) -> list[Route]:
    """Return the routes. ``ask`` requests a trace from the run; ``None`` if this server cannot reach the
    run."""
    return [
        Route("/metrics", _metrics(watched)),
        Route("/api/trace", trace_endpoint(ask), methods=["POST"]),
        Route("/api/traces/{name}", trace_file(watched.files.run.traces_path)),
        Route("/api/around/{name}", trace_file(watched.files.run.counters_path / "around")),
    ]


def _metrics(watched: WatchedRun) -> Callable[[Request], Response]:
    """Return the endpoint of Prometheus. It is synchronous, so the server runs it in a thread. Requests run
    one at a time, because each reads the new lines."""
    metrics = RunMetrics(watched.files.run, lambda: watched.account, NodePhases(watched))
    one_at_a_time = threading.Lock()

    def answer(request: Request) -> Response:
        with one_at_a_time:
            return Response(metrics.text(), headers={"content-type": CONTENT_TYPE})

    return answer


_MOST_BYTES, _MOST_RANKS, _MOST_RANK = 2**16, 1024, 2**20


def trace_endpoint(ask: Ask | None) -> Callable[[Request], Any]:
    """Return the endpoint that requests traces. ``ask`` is ``None`` if this server only receives spans and
    cannot reach the run."""

    async def answer(request: Request) -> Response:
        if ask is None:
            return _json_response({"error": "this server cannot reach the run's driver"}, 409)
        ranks, seconds, what = await _asked(request)
        try:
            return _json_response(dict(await run_in_threadpool(ask, ranks, seconds, what)), 200)
        except MyriadError as error:
            return _json_response({"error": str(error)}, 400 if error.exit_code == 2 else 502)

    return answer


def trace_file(folder: Path) -> Callable[[Request], Response]:
    """Return the endpoint that serves the regular files of a folder by name. It follows no link, and no name
    leads out of the folder."""

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
    found = await json_body(request, _MOST_BYTES, "a JSON object with ranks, seconds and what")
    return _ranks(found.get("ranks")), _seconds(found.get("seconds")), _what(found.get("what", "profile"))


def _ranks(given: Any) -> list[int]:
    if not isinstance(given, list) or not 0 < len(given) <= _MOST_RANKS:
        raise QueryParameterError("ranks", str(given), f"a list of 1 to {_MOST_RANKS} numbers")
    if not all(type(one) is int and 0 <= one < _MOST_RANK for one in given):
        raise QueryParameterError("ranks", str(given), "must be rank numbers")
    return given


def _seconds(given: Any) -> float:
    if type(given) not in (int, float) or not 0 < given <= MOST_SECONDS:
        raise QueryParameterError("seconds", str(given), f"above 0, at most {MOST_SECONDS:g}")
    return float(given)


def _what(given: Any) -> What:
    for what in get_args(What):
        if given == what:
            chosen: What = what
            return chosen
    raise QueryParameterError("what", str(given), f"one of {', '.join(get_args(What))}")


def _json_response(found: dict[str, Any], status: int) -> Response:
    return Response(to_json(found), status, media_type="application/json")


_STEPS, _MOST_PHASES = 10, 16


class NodePhases:
    """Phase times of one run by node."""

    def __init__(self, watched: WatchedRun) -> None:
        self._watched = watched

    def num_dropped(self) -> int:
        """Return the spans lost by senders, by late arrival, and with rejected batches."""
        counts = self._watched.store.counts
        return counts.lost_before + counts.too_old

    def node_phase_seconds(self) -> Iterator[tuple[int, str, float, float]]:
        """Yield node, phase, and the mean and highest seconds of its ranks, where known."""
        watched, last = self._watched, self._watched.last_step
        if last is None:
            return
        node = watched.ranks.node
        nodes = int(node.max()) + 1
        for phase in watched.store.names.phases_in_order()[:_MOST_PHASES]:
            seconds = watched.heat.heat(phase, max(0, last - _STEPS + 1), last).seconds
            known = np.isfinite(seconds)
            count = np.bincount(node[known], minlength=nodes)
            total = np.bincount(node[known], weights=seconds[known], minlength=nodes)
            highest = np.full(nodes, -np.inf)
            np.maximum.at(highest, node[known], seconds[known])
            for number in np.flatnonzero(count).tolist():
                yield number, phase, float(total[number] / count[number]), float(highest[number])
