"""Serve pages and senders of spans until the process is asked to stop.

A client that reads nothing of its answer for some seconds is disconnected, because the answer stays in
memory."""

import asyncio
import socket
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from myriad.errors import BadInputError

__all__ = ["STALL_SECONDS", "listen_at", "make_server", "serve"]

STALL_SECONDS = 10.0
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
    # Named, or asyncio does not see that it is TCP, leaves Nagle's algorithm on, and answers wait 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
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
    with suppress(KeyboardInterrupt):  # raised again after the shutdown
        asyncio.run(make_server(app, ready, ending, certificate=certificate).serve(sockets=[listener]))


def make_server(
    app: Any,
    ready: Callable[[], None],
    ending: Callable[[], None],
    stall_seconds: float = STALL_SECONDS,
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
        log_level="warning",
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

    seconds = STALL_SECONDS
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
