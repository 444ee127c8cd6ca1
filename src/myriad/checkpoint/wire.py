"""Messages between the ranks of a node and its keeper, and between keepers: JSON, bytes behind it, and on one
machine descriptors beside it.
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

from myriad.checkpoint.direct import Buffer

__all__ = ["Closed", "Message", "Wire"]

_HEADER = struct.Struct("<IQ")
_READ_BYTES = 2**22
_MOST_TEXT_BYTES, _MOST_STRANGER_BYTES = 2**28, 2**10
_PART_SECONDS, _LEAST_SECONDS = 60.0, 0.001
"""A message that has begun to arrive goes on within this time."""

Message = dict[str, Any]


class Closed(OSError):
    """The other end is gone."""


class Wire:
    """One connection; any thread may send, one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self.most_bytes = 2**48
        """The largest payload that `receive` accepts."""
        self._lock = threading.Lock()
        self._deadline: float | None = None
        """When a whole message must have arrived; ``None``: each part of it has a time of its own."""

    def send(self, message: Message, payload: Buffer = b"", descriptors: Sequence[int] = ()) -> None:
        """Raises `Closed` when nobody is there."""
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
        """The next message, its bytes and its descriptors. Raises `Closed`, also for what is no message, and
        ``TimeoutError`` when nothing begins to come within the time that `patience` set."""
        header, descriptors = self._first(_HEADER.size)
        if self._socket.gettimeout() is None:
            self._socket.settimeout(_PART_SECONDS)
            try:
                return *self._rest(header), descriptors
            finally:
                self._socket.settimeout(None)
        return *self._rest(header), descriptors

    def receive_from_stranger(self, seconds: float) -> Message:
        """The first message of an end that has proved nothing yet: short, without bytes, and complete within
        this time. Raises `Closed`, ``TimeoutError``."""
        self._deadline = time.monotonic() + seconds
        self._socket.settimeout(seconds)
        try:
            header, descriptors = self._first(_HEADER.size)
            for descriptor in descriptors:
                os.close(descriptor)
            return self._rest(header, _MOST_STRANGER_BYTES, 0)[0]
        finally:
            self._deadline = None
            self._socket.settimeout(None)

    def _rest(
        self, header: bytes, most_text: int = _MOST_TEXT_BYTES, most_payload: int | None = None
    ) -> tuple[Message, memoryview]:
        header += bytes(self._exactly(_HEADER.size - len(header)))
        text_bytes, payload_bytes = _HEADER.unpack(header)
        most_payload = self.most_bytes if most_payload is None else most_payload
        if text_bytes > most_text or payload_bytes > most_payload:
            raise Closed(f"a message of {text_bytes} and {payload_bytes} bytes was refused")
        try:
            message = json.loads(bytes(self._exactly(text_bytes)))
            content = self._exactly(payload_bytes)
        except (ValueError, RecursionError, MemoryError, OverflowError) as error:
            raise Closed(f"what came is no message: {error}") from error
        if not isinstance(message, dict) or not isinstance(message.get("op", ""), str):
            raise Closed("what came is no message: not an object with an op")
        return message, content

    def has_arrived(self, seconds: float) -> bool:
        """Waits until something can be received, which may be the end of the connection; at most so long."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(1000 * seconds))

    def process_socket(self) -> socket.socket:
        """The socket, to ask the kernel which process is at the other end."""
        return self._socket

    def patience(self, seconds: float | None) -> None:
        """How long `receive` and `send` wait for the other end."""
        self._socket.settimeout(seconds)

    def is_open(self) -> bool:
        """Whether the other end is still there; not while another thread receives."""
        try:
            return not self.has_arrived(0.0) or bool(self._socket.recv(1, socket.MSG_PEEK))
        except (OSError, ValueError):  # closed, at this end too
            return False

    def close(self) -> None:
        """Also wakes whoever receives."""
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
