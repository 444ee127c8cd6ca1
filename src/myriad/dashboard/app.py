"""The dashboard's web application and its server: routes, the page's files, the event stream, the reader of
the run.

The page's thirty files are read and compressed once, at the start: serving them from memory is cheaper
than opening them, and no requested name reaches the file system. Server-sent events notify pages of
changes; the pages then request the data:

    event: changed
    data: {"last_step":117,"events":4,"metrics":117}

A page that reads slowly misses intermediate changes, but never the last one: the server queues nothing. A
client that reads nothing of its answer for some seconds is disconnected, because the answer stays in
memory.

A separate thread (`Follower`) reads the run's folder as it grows, so that a hung disk blocks no request.
At the start it reads the newest span files first, and then older ones until memory is full.
"""

import asyncio
import gzip
import logging
import socket
import sys
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from myriad.dashboard.analyst import Analyst
from myriad.dashboard.api import rank_api, run_api, span_api
from myriad.dashboard.api.query_parameters import QueryParameterError
from myriad.dashboard.collector import SpanCollector
from myriad.dashboard.request_guard import SPANS_PATH, Access, Guard
from myriad.dashboard.tile import to_json
from myriad.dashboard.watched_run import WatchedRun
from myriad.errors import BadInputError
from myriad.telemetry.span_io.span_batch import BatchError
from myriad.telemetry.span_io.span_files import read_span_file
from myriad.wire.listener import Listener, raise_file_limit

__all__ = [
    "Follower",
    "PageFiles",
    "answer_errors",
    "build_app",
    "json_response",
    "listen_at",
    "make_server",
    "serve",
]

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


def build_app(
    watched: WatchedRun, access: Access, collect: Path | None = None, more: Sequence[BaseRoute] = ()
) -> Guard:
    """Build the application of one run.

    ``access`` decides which requests are answered; ``collect`` is the folder for received spans; ``more`` are
    routes that other packages define.
    """
    follower, stream, collector = Follower(watched), Stream(watched), SpanCollector(watched, collect)
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

    routes: list[BaseRoute] = [Route(SPANS_PATH, collector.take, methods=["POST"])]
    routes += [
        Route(f"/api/{name}", _endpoint(watched, analyst, answer)) for name, answer in _ANSWERS.items()
    ]
    routes += [
        Route("/api/stream", changes),
        Route("/", page.index),
        Route("/static/{name:path}", page.file),
        *more,
    ]
    return Guard(answer_errors(routes, life), access)


def answer_errors(routes: Sequence[BaseRoute], life: Callable[[Starlette], Any]) -> Starlette:
    """Return an application that answers a wrong parameter and a missing file with a line of JSON. ``life``:
    what runs beside it."""
    handlers = {QueryParameterError: _wrong, HTTPException: _missing}
    return Starlette(routes=routes, exception_handlers=handlers, lifespan=life)


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


def _wrong(request: Request, error: Exception) -> Response:
    return Response(to_json({"error": str(error)}), 400, media_type="application/json")


def _missing(request: Request, error: Exception) -> Response:
    code, text = (error.status_code, error.detail) if isinstance(error, HTTPException) else (500, "a bug")
    return Response(to_json({"error": text}), code, media_type="application/json")


_PAGE = Path(__file__).parent / "page"
_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}


class PageFiles:
    """The page's files by their names in its folder."""

    def __init__(self, index: str = "index.html", folder: Path = _PAGE) -> None:
        """Read and compress the files in ``folder``. ``index``: the file with the page's HTML."""
        self._index = index
        paths = (path for path in folder.rglob("*") if path.suffix in _TYPES)
        self._files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        self._zipped = {name: gzip.compress(data, 9) for name, data in self._files.items()}

    async def index(self, request: Request) -> Response:
        """Return the page's HTML."""
        return self._answer(request, self._index)

    async def file(self, request: Request) -> Response:
        """Return a file that the page loads."""
        return self._answer(request, request.path_params["name"])

    def _answer(self, request: Request, name: str) -> Response:
        if name not in self._files:
            raise HTTPException(404, "the page has no such file")
        zips = "gzip" in request.headers.get("accept-encoding", "")
        headers = {"vary": "accept-encoding"} | ({"content-encoding": "gzip"} if zips else {})
        kind = _TYPES[Path(name).suffix]
        return Response((self._zipped if zips else self._files)[name], media_type=kind, headers=headers)


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


_STALL_SECONDS = 10.0
_MOST_CONNECTIONS = 4096
_SWITCH_SECONDS = 5e-4
"""Thread switch interval: a tenth of Python's default, so that threads answer while another adds spans."""


def listen_at(host: str, port: int) -> socket.socket:
    """Listen on a port and return the socket; port 0 selects a free one. Raises `BadInputError`."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        raise BadInputError("--host", host, "an address or a name of this machine") from None
    family, _, _, _, address = found[0]
    try:
        listener = Listener.bound(family, address)
        listener.listen(1024)
    except OSError as error:
        key, value = ("--host", host) if error.errno == 99 else ("--port", str(port))
        allowed = f"cannot be used ({error.strerror}); another, or --port 0 for any that is free"
        raise BadInputError(key, value, allowed) from None
    return listener


def serve(
    app: Any,
    listener: socket.socket,
    ready: Callable[[], None],
    ending: Callable[[], None],
    certificate: tuple[Path, Path] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM.

    ``ready`` is called when requests are answered; ``ending`` is called at shutdown, so that endless
    responses end. ``certificate``: files with the certificate and the key for TLS."""
    # warnings.catch_warnings is not thread-safe, so ignore warnings about missing data for the whole process.
    warnings.filterwarnings("ignore", "All-NaN slice|Mean of empty slice", RuntimeWarning)
    sys.setswitchinterval(_SWITCH_SECONDS)
    raise_file_limit()
    with suppress(KeyboardInterrupt):  # raised again after the shutdown
        asyncio.run(make_server(app, ready, ending, certificate=certificate).serve(sockets=[listener]))


def make_server(
    app: Any,
    ready: Callable[[], None],
    ending: Callable[[], None],
    stall_seconds: float = _STALL_SECONDS,
    certificate: tuple[Path, Path] | None = None,
) -> uvicorn.Server:
    """Return a server that ends when ``should_exit`` is set."""

    class Impatient(_Impatient):
        seconds = stall_seconds

    config = uvicorn.Config(
        app,
        http=Impatient,
        ws="none",
        lifespan="on",
        log_level="error",  # a warning is a line for each wrong request, also without the token
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_keep_alive=75,  # nodes send every few seconds, and keep their connection
        timeout_graceful_shutdown=1,
        ssl_certfile=certificate and certificate[0],
        ssl_keyfile=certificate and certificate[1],
    )
    return _Server(config, ready, ending)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None], ending: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready, self._ending = ready, ending

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._ending()
        await super().shutdown(sockets)


class _Impatient(H11Protocol):
    """Closes a connection that sends no request, or reads nothing of its answer."""

    seconds = _STALL_SECONDS
    _waiting = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Set a deadline for the first request; uvicorn sets one only for later requests."""
        super().connection_made(transport)
        self.loop.call_later(self.seconds, self._look_for_request)

    def _look_for_request(self) -> None:
        if self.cycle is None:
            self.transport.abort()

    def pause_writing(self) -> None:
        """Handle a full send buffer."""
        super().pause_writing()
        self._look_again()

    def _look_again(self) -> None:
        self._waiting = self.transport.get_write_buffer_size()
        self.loop.call_later(self.seconds, self._poll)

    def _poll(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        if not waiting:
            return
        if waiting >= self._waiting:
            self.transport.abort()
        else:
            self._look_again()
