"""What a server does for one run: answers about it, the event stream, and the reader of its files.

Server-sent events notify pages of changes; the pages then request the data:

    event: changed
    data: {"last_step":117,"events":4,"metrics":117}

A page that reads slowly misses intermediate changes, but never the last one: the server queues nothing.

A separate thread (`Follower`) reads the run's folder as it grows, so that a hung disk blocks no request.
At the start it reads the newest span files first, and then older ones until memory is full.
"""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from myriad.dashboard.analyst import Analyst
from myriad.dashboard.api import rank_api, run_api, span_api
from myriad.dashboard.tile import to_json
from myriad.dashboard.watched_run import WatchedRun
from myriad.telemetry.span_io.span_batch import BatchError
from myriad.telemetry.span_io.span_files import read_span_file

__all__ = ["Follower", "RunPage", "json_response"]

_Answer = Callable[[WatchedRun, Analyst, Mapping[str, str]], Any]
_ANSWERS: dict[str, _Answer] = {
    "run": run_api.run,
    "overview": lambda watched, analyst, query: run_api.overview(watched, query),
    "norms": lambda watched, analyst, query: run_api.norms(watched, query),
    "faults": lambda watched, analyst, query: run_api.faults(watched, query),
    "heat": lambda watched, analyst, query: span_api.heat(watched, query),
    "steps": lambda watched, analyst, query: span_api.steps(watched, query),
    "worst": span_api.worst,
    "timeline": span_api.timeline,
    "rank/{rank}": rank_api.rank,
    "silent": rank_api.silent,
    "waterfall": run_api.waterfall,
    "losses": run_api.shares,
}


class RunPage:
    """The routes of one run's page, without its files, and the threads behind them."""

    def __init__(self, watched: WatchedRun, more: Sequence[BaseRoute] = ()) -> None:
        """``more``: routes that other packages define."""
        self.watched = watched
        self._follower, self._analyst, self._stream = Follower(watched), Analyst(watched), Stream(watched)
        answers = [
            Route(f"/api/{name}", _endpoint(watched, self._analyst, answer))
            for name, answer in _ANSWERS.items()
        ]
        self.routes: Sequence[BaseRoute] = [*answers, Route("/api/stream", self._changes), *more]

    def start(self) -> None:
        """Start the threads. Call it once."""
        self._follower.start()
        self._analyst.start()

    def stop(self) -> None:
        """End the streams and the threads."""
        self.watched.end()
        self._follower.stop()
        self._analyst.stop()

    async def _changes(self, request: Request) -> Response:
        return self._stream.open()


def _endpoint(watched: WatchedRun, analyst: Analyst, answer: _Answer) -> Callable[[Request], Response]:
    """Return a synchronous endpoint, which the server runs in a thread."""

    def ask(request: Request) -> Response:
        return json_response(answer(watched, analyst, {**request.query_params, **request.path_params}))

    return ask


def json_response(found: Any) -> Response:
    """Return an answer as JSON; bytes as they are."""
    if isinstance(found, bytes):
        return Response(found, media_type="application/octet-stream")
    return Response(to_json(found), media_type="application/json")


_AT_MOST_EVERY_SECONDS, _ALIVE_EVERY_SECONDS = 0.5, 15.0
_MOST_PAGES = 100


class Stream:
    """The event stream of one run, for up to `_MOST_PAGES` pages."""

    def __init__(self, watched: WatchedRun) -> None:
        self._watched, self._pages = watched, 0

    def open(self) -> Response:
        """Return a response that streams until the page disconnects."""
        if self._pages >= _MOST_PAGES:
            return PlainTextResponse(f"{_MOST_PAGES} pages are open already\n", 429)
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[bytes]:
        seen, notified_at = None, time.monotonic()
        self._pages += 1
        try:
            yield b"retry: 1000\n\n"
            while not self._watched.ending:
                if (now := self._watched.changes) != seen:
                    seen, notified_at = now, time.monotonic()
                    yield b"event: changed\ndata: " + to_json(self._facts()) + b"\n\n"
                elif time.monotonic() - notified_at > _ALIVE_EVERY_SECONDS:
                    notified_at = time.monotonic()
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


_LOG = logging.getLogger(__name__)
_EVERY_SECONDS, _REST_TIMES = 1.0, 4.0
_MOST_FILE_BYTES = 2**30


class Follower:
    """Follows the files of one run."""

    def __init__(self, watched: WatchedRun) -> None:
        self._watched = watched
        self._seen: dict[Path, tuple[int, int]] = {}
        self._looked = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="follower", daemon=True)

    def start(self) -> None:
        """Start the thread. Call it once."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, after the file that it is reading."""
        self._stop.set()
        self._thread.join(5.0)

    def poll(self) -> None:
        """Read new data once."""
        files, began = self._watched.files, time.monotonic()
        with self._watched.reading():
            files.poll()
        if self._watched.follow_layout():
            self._seen.clear()
            self._looked = False
        store = self._watched.store
        store.limit_step = files.job.train.steps
        left_out = 0
        for path, state in files.span_paths():
            if self._stop.is_set():
                return
            if self._seen.get(path) == state:
                continue
            if not self._looked and store.counts.dropped_steps:
                left_out += 1  # memory is full of newer ones
            else:
                self._read(path, state[1])
            self._seen[path] = state
        self._looked = True
        if left_out:
            store.counts.add_problem(f"{left_out} older files of spans are not read: --memory is full")
        self._watched.looked(began)

    def _read(self, path: Path, size: int) -> None:
        store = self._watched.store
        try:
            if size > _MOST_FILE_BYTES:
                raise BatchError(f"{size} bytes: at most {_MOST_FILE_BYTES}")
            store.add(read_span_file(path))
        except FileNotFoundError:
            return
        except (BatchError, OSError) as error:
            store.counts.refused_files += 1
            store.counts.add_problem(f"{path.name}: {error}")

    def _work(self) -> None:
        rest = 0.0
        while not self._stop.wait(rest):
            began = time.monotonic()
            try:
                self.poll()
            except Exception as error:  # whatever a folder holds: the next poll may find it well
                _LOG.warning("the run's folder cannot be read: %s", error)
                self._watched.store.counts.add_problem(f"the run's folder: {error}")
            rest = max(_EVERY_SECONDS, _REST_TIMES * (time.monotonic() - began))
