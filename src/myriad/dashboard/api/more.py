"""Routes for other programs than the page, and those that reach the run: given to the app from outside.

GET /metrics        the run for Prometheus
POST /api/trace     a look into ranks (`myriad.dashboard.api.trace`)
GET /api/traces/F   the file that it has made
"""

import threading
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from myriad.dashboard.api.trace import Ask, trace_endpoint, trace_file
from myriad.dashboard.node_phases import NodePhases
from myriad.dashboard.prometheus import CONTENT_TYPE, RunMetrics
from myriad.dashboard.watched import Watched

__all__ = ["more_routes"]


def more_routes(watched: Watched, ask: Ask | None) -> list[Route]:
    """``ask``: has the run make a trace; ``None``: this server cannot reach it."""
    return [
        Route("/metrics", _metrics(watched)),
        Route("/api/trace", trace_endpoint(ask), methods=["POST"]),
        Route("/api/traces/{name}", trace_file(watched.files.run.traces_path)),
        Route("/api/around/{name}", trace_file(watched.files.run.counters_path / "around")),
    ]


def _metrics(watched: Watched) -> Callable[[Request], Response]:
    """Not async: answered in a thread; one at a time, as each reads what has come since."""
    metrics = RunMetrics(watched.files.run, lambda: watched.account, NodePhases(watched))
    one_at_a_time = threading.Lock()

    def answer(request: Request) -> Response:
        with one_at_a_time:
            return Response(metrics.text(), headers={"content-type": CONTENT_TYPE})

    return answer
