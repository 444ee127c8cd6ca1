"""The dashboard's web application and its server: routes, and the page's files.

The page's thirty files are read and compressed once, at the start: serving them from memory is cheaper
than opening them, and no requested name reaches the file system. A client that reads nothing of its answer
for some seconds is disconnected, because the answer stays in memory.
"""

import asyncio
import gzip
import socket
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from myriad.dashboard.api.query_parameters import QueryParameterError
from myriad.dashboard.collector import SpanCollector
from myriad.dashboard.request_guard import SPANS_PATH, Access, Guard
from myriad.dashboard.run_page import RunPage
from myriad.dashboard.tile import to_json
from myriad.dashboard.watched_run import WatchedRun
from myriad.errors import BadInputError
from myriad.wire.listener import Listener, raise_file_limit

__all__ = [
    "PageFiles",
    "answer_errors",
    "build_app",
    "listen_at",
    "make_server",
    "serve",
]


def build_app(
    watched: WatchedRun, access: Access, collect: Path | None = None, more: Sequence[BaseRoute] = ()
) -> Guard:
    """Build the application of one run.

    ``access`` decides which requests are answered; ``collect`` is the folder for received spans; ``more`` are
    routes that other packages define.
    """
    run, collector, page = RunPage(watched, more), SpanCollector(watched, collect), PageFiles()

    @asynccontextmanager
    async def life(app: Starlette) -> Any:
        run.start()
        collector.start()
        yield
        await run_in_threadpool(run.stop)
        await run_in_threadpool(collector.stop)

    routes = [
        Route(SPANS_PATH, collector.take, methods=["POST"]),
        *run.routes,
        Route("/", page.index),
        Route("/static/{name:path}", page.file),
    ]
    return Guard(answer_errors(routes, life), access)


def answer_errors(routes: Sequence[BaseRoute], life: Callable[[Starlette], Any] | None) -> Starlette:
    """Return an application that answers a wrong parameter and a missing file with a line of JSON. ``life``:
    what runs beside it."""
    handlers = {QueryParameterError: _wrong, HTTPException: _missing}
    return Starlette(routes=routes, exception_handlers=handlers, lifespan=life)


def _wrong(request: Request, error: Exception) -> Response:
    return Response(to_json({"error": str(error)}), 400, media_type="application/json")


def _missing(request: Request, error: Exception) -> Response:
    code, text = (error.status_code, error.detail) if isinstance(error, HTTPException) else (500, "a bug")
    return Response(to_json({"error": text}), code, media_type="application/json")


_PAGE = Path(__file__).parent / "page"
_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}


@cache
def _read_files() -> tuple[Mapping[str, bytes], Mapping[str, bytes]]:
    """Return the content of each file, and the same compressed."""
    paths = (path for path in _PAGE.rglob("*") if path.suffix in _TYPES)
    files = {path.relative_to(_PAGE).as_posix(): path.read_bytes() for path in paths}
    return files, {name: gzip.compress(data, 9) for name, data in files.items()}


class PageFiles:
    """The page's files by their names in its folder."""

    def __init__(self, index: str = "index.html") -> None:
        """Read and compress the files. ``index``: the file with the page's HTML."""
        self._index = index
        self._files, self._zipped = _read_files()

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
