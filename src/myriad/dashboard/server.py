"""Listens for pages and senders of spans until it is told to stop.

A client that takes nothing of its answer for some seconds is cut off: what waits for it would stay in memory.
"""

import asyncio
import socket
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from myriad.errors import BadInputError

__all__ = ["STALL_SECONDS", "listen_at", "make_server", "serve"]

STALL_SECONDS = 10.0
_MOST_CONNECTIONS = 4096
_SWITCH_SECONDS = 5e-4
"""While spans are added by one thread others answer: a tenth of the usual wait for their turn."""


def listen_at(host: str, port: int) -> socket.socket:
    """The port is ours from now on; 0: any. Raises `BadInputError`."""
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


def serve(app: Any, listener: socket.socket, ready: Callable[[], None], ending: Callable[[], None]) -> None:
    """Until SIGINT or SIGTERM. ``ready``: called when questions are answered; ``ending``: when that is over,
    and answers that go on for ever are to end."""
    # Threads that mute a warning for a moment unmute it for each other: nothing known is no news here.
    warnings.filterwarnings("ignore", "All-NaN slice|Mean of empty slice", RuntimeWarning)
    sys.setswitchinterval(_SWITCH_SECONDS)
    with suppress(KeyboardInterrupt):  # told again when all has ended
        asyncio.run(make_server(app, ready, ending).serve(sockets=[listener]))


def make_server(
    app: Any,
    ready: Callable[[], None],
    ending: Callable[[], None],
    stall_seconds: float = STALL_SECONDS,
) -> uvicorn.Server:
    """One that ends with ``should_exit``."""

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
    """Closes a connection that sends no request, or takes nothing of an answer that waits to be sent."""

    seconds = STALL_SECONDS
    _waiting = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Its first request has a deadline, which uvicorn has only for those that follow."""
        super().connection_made(transport)
        self.loop.call_later(self.seconds, self._look_for_request)

    def _look_for_request(self) -> None:
        if self.cycle is None:
            self.transport.abort()

    def pause_writing(self) -> None:
        """More waits than the transport likes to keep."""
        super().pause_writing()
        self._look_again()

    def _look_again(self) -> None:
        self._waiting = self.transport.get_write_buffer_size()
        self.loop.call_later(self.seconds, self._look)

    def _look(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        if not waiting:
            return
        if waiting >= self._waiting:
            self.transport.abort()
        else:
            self._look_again()
