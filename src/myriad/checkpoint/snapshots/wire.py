"""Message protocol between ranks and snapshot servers: JSON, an optional payload, and file descriptors.

Descriptors can be sent only on one machine, over a unix socket.
"""

import array
import json
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from myriad.checkpoint.storage.direct_io import Buffer
from myriad.errors import RunFailedError

__all__ = ["Closed", "ForeignServerError", "Message", "Wire", "connect_to_own", "user_of"]

_HEADER = struct.Struct("<IQ")
_READ_BYTES = 2**22
_MAX_TEXT_BYTES, _MAX_UNAUTHENTICATED_BYTES = 2**28, 2**10
_PART_SECONDS, _LEAST_SECONDS = 60.0, 0.001
"""Longest pause within a message that has begun to arrive, and the smallest socket timeout."""

Message = dict[str, Any]


class Closed(OSError):
    """The connection was closed."""


class ForeignServerError(RunFailedError):
    """Another user of this machine listens where a snapshot server of this user should."""


def user_of(connection: socket.socket) -> int:
    """Return the user id of the process at the other end of a unix socket, as the kernel knows it."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    user: int = struct.unpack("3i", credentials)[1]
    return user


def connect_to_own(connection: socket.socket, name: str) -> None:
    """Connect to the snapshot server ``name`` of this user.

    Names are in no folder, so any user may take a free one; weights are sent only to processes of this user.
    Raises ``OSError`` if no process listens, and `ForeignServerError`."""
    connection.connect(f"\0{name}")
    if (user := user_of(connection)) != os.getuid():
        raise ForeignServerError(
            f"user {user} of this machine listens as this run's snapshot server ({name}): end that process, "
            "or copy the run to another folder"
        )


class Wire:
    """One connection. Any thread may send; one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self.max_bytes = 2**48
        """The largest payload that `receive` accepts, in bytes."""
        self._lock = threading.Lock()
        self._deadline: float | None = None
        """Time by which a whole message must have arrived; ``None``: only pauses are limited."""

    def send(self, message: Message, payload: Buffer = b"", descriptors: Sequence[int] = ()) -> None:
        """Send a message. Raises `Closed` if the other end has closed the connection."""
        text = json.dumps(message).encode()
        payload = memoryview(payload).cast("B")
        first = _HEADER.pack(len(text), len(payload)) + text
        try:
            with self._lock:
                if descriptors:
                    carried = array.array("i", descriptors)
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, carried)]
                    sent = self._socket.sendmsg([first], rights)
                    first = first[sent:]
                self._socket.sendall(first)
                if len(payload):
                    self._socket.sendall(payload)
        except OSError as error:
            raise Closed(str(error)) from error

    def receive(self) -> tuple[Message, memoryview, list[int]]:
        """Return the next message, its payload and its descriptors.

        Raises `Closed`, also for malformed data, and ``TimeoutError`` if no message begins to arrive within
        the timeout set by `set_timeout`."""
        header, descriptors = self._first(_HEADER.size)
        if self._socket.gettimeout() is None:
            self._socket.settimeout(_PART_SECONDS)
            try:
                return *self._rest(header), descriptors
            finally:
                self._socket.settimeout(None)
        return *self._rest(header), descriptors

    def receive_unauthenticated(self, seconds: float) -> Message:
        """Return the first message of a peer that is not authenticated yet.

        It must be short, have no payload and arrive within ``seconds``. Raises `Closed` or
        ``TimeoutError``."""
        self._deadline = time.monotonic() + seconds
        self._socket.settimeout(seconds)
        try:
            header, descriptors = self._first(_HEADER.size)
            for descriptor in descriptors:
                os.close(descriptor)
            return self._rest(header, _MAX_UNAUTHENTICATED_BYTES, 0)[0]
        finally:
            self._deadline = None
            self._socket.settimeout(None)

    def _rest(
        self, header: bytes, max_text: int = _MAX_TEXT_BYTES, max_payload: int | None = None
    ) -> tuple[Message, memoryview]:
        header += bytes(self._exactly(_HEADER.size - len(header)))
        text_bytes, payload_bytes = _HEADER.unpack(header)
        max_payload = self.max_bytes if max_payload is None else max_payload
        if text_bytes > max_text or payload_bytes > max_payload:
            raise Closed(f"a message of {text_bytes} and {payload_bytes} bytes was refused")
        try:
            message = json.loads(bytes(self._exactly(text_bytes)))
            content = self._exactly(payload_bytes)
        except (ValueError, RecursionError, MemoryError, OverflowError) as error:
            raise Closed(f"received data is not a message: {error}") from error
        if not isinstance(message, dict) or not isinstance(message.get("op", ""), str):
            raise Closed("received data is not a message: not an object with an op")
        return message, content

    def has_arrived(self, seconds: float) -> bool:
        """Wait up to ``seconds`` until data, or the end of the connection, can be received."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(1000 * seconds))

    def process_socket(self) -> socket.socket:
        """Return the socket, to query the process at its other end."""
        return self._socket

    def set_timeout(self, seconds: float | None) -> None:
        """Set the timeout of `receive` and `send`; ``None``: no timeout."""
        self._socket.settimeout(seconds)

    def is_open(self) -> bool:
        """Whether the other end is still open. Not for use while another thread receives."""
        try:
            return not self.has_arrived(0.0) or bool(self._socket.recv(1, socket.MSG_PEEK))
        except (OSError, ValueError):  # closed at this end
            return False

    def close(self) -> None:
        """Close the connection. A thread blocked in `receive` returns with an error."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _first(self, count: int) -> tuple[bytes, list[int]]:
        try:
            found, descriptors, _, _ = socket.recv_fds(self._socket, count, 64)
        except TimeoutError:
            raise
        except OSError as error:
            raise Closed(str(error)) from error
        if not found:
            raise Closed("the other end is gone")
        return found, descriptors

    def _exactly(self, count: int) -> memoryview:
        content = memoryview(bytearray(count))
        done = 0
        while done < count:
            try:
                if self._deadline is not None:
                    self._socket.settimeout(max(_LEAST_SECONDS, self._deadline - time.monotonic()))
                got = self._socket.recv_into(content[done : done + _READ_BYTES])
            except OSError as error:
                raise Closed(str(error)) from error
            if not got:
                raise Closed("the other end is gone")
            done += got
        return content
