"""Messages between the ranks of a node and its keeper, and between keepers: JSON, bytes behind it, and on one
machine descriptors beside it.
"""

import array
import json
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from myriad.checkpoint.direct import Buffer

__all__ = ["Closed", "Message", "Wire"]

_HEADER = struct.Struct("<IQ")
_READ_BYTES = 2**22
_TEXT_BYTES = 2**28
"""Of the JSON of a message: a rank names each of its pieces."""

Message = dict[str, Any]


class Closed(OSError):
    """The other end is gone."""


class Wire:
    """One connection; any thread may send, one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self.most_bytes = 2**48
        """Of the payload of a message that is received."""
        self._lock = threading.Lock()

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
        """The next message, its bytes and its descriptors. Raises `Closed`, or ``TimeoutError`` when nothing
        begins to come within the time that `patience` set."""
        header, descriptors = self._first(_HEADER.size)
        text_bytes, payload_bytes = _HEADER.unpack(header)
        if text_bytes > _TEXT_BYTES or payload_bytes > self.most_bytes:
            raise Closed(f"a message of {text_bytes + payload_bytes} bytes: more than is allowed")
        try:
            message = json.loads(bytes(self._exactly(text_bytes)))
        except (ValueError, RecursionError) as error:
            raise Closed(f"no message: {error}") from None
        if not isinstance(message, dict) or not isinstance(message.get("op", ""), str):
            raise Closed("no message: not an object with an op")
        return message, self._exactly(payload_bytes), descriptors

    def patience(self, seconds: float | None) -> None:
        """How long `receive` and `send` wait for the other end."""
        self._socket.settimeout(seconds)

    def is_open(self) -> bool:
        """Whether the other end is still there; not while another thread receives."""
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
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
        return found + bytes(self._exactly(count - len(found))), descriptors

    def _exactly(self, count: int) -> memoryview:
        content = memoryview(bytearray(count))
        done = 0
        while done < count:
            try:
                got = self._socket.recv_into(content[done : done + _READ_BYTES])
            except OSError as error:
                raise Closed(str(error)) from error
            if not got:
                raise Closed("the other end is gone")
            done += got
        return content
