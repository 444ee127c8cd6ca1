"""Messages with payloads and file descriptors on a blocking socket.

    local, unix socket     the kernel names the peer's user; no codes; descriptors may be sent
    between nodes, TCP     `accept` or `connect` authenticates; then each frame has a code

A message is a JSON object with an ``op``. Its payload follows in pieces of 1 MiB, each with its own code, so
a changed byte ends the connection within a piece. Memory for a payload is allocated only when the code of
the message that announces it is right; a message itself grows as its bytes arrive.
"""

import array
import json
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from myriad.wire.frame_codes import MESSAGE_CODE_BYTES, PAYLOAD_CODE_BYTES
from myriad.wire.framing import HEADER_BYTES, FrameKind, Refused, check_header, pack_header
from myriad.wire.handshake import (
    ANSWER_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    ConnectorHandshake,
    ListenerHandshake,
    SessionCodes,
)
from myriad.wire.pending_connections import AUTHENTICATION_SECONDS
from myriad.wire.tls import TlsIdentity, connector_context, peer_fingerprint

__all__ = ["Closed", "Message", "SocketChannel"]

_SIZE = struct.Struct("!Q")
_MESSAGE_KINDS = (FrameKind.MESSAGE, FrameKind.MESSAGE_WITH_PAYLOAD)
_PIECE_BYTES, _READ_BYTES = 2**20, 2**18
_MAX_TEXT_BYTES = 2**28
_PART_SECONDS, _LEAST_SECONDS = 60.0, 0.001
"""Longest pause within a message that has begun to arrive, and the smallest socket timeout."""

Message = dict[str, Any]
_Bytes = bytes | bytearray | memoryview


class Closed(OSError):
    """The connection was closed."""


class SocketChannel:
    """One connection. Any thread may send; one thread receives."""

    def __init__(self, connection: socket.socket, max_text_bytes: int = _MAX_TEXT_BYTES) -> None:
        """``max_text_bytes``: the largest message that `receive` accepts, without its payload."""
        self._socket, self._max_text_bytes = connection, max_text_bytes
        self._is_local = connection.family == socket.AF_UNIX
        self.max_bytes = 2**48
        """The largest payload that `receive` accepts, in bytes."""
        self._lock = threading.Lock()
        self._codes: SessionCodes | None = None
        self._deadline: float | None = None
        """Time by which a whole message must have arrived; ``None``: only pauses are limited."""

    # Authentication

    def accept(
        self,
        protocol: str,
        secrets: Iterable[bytes],
        seconds: float = AUTHENTICATION_SECONDS,
        tls: TlsIdentity | None = None,
    ) -> None:
        """Authenticate as the end that listened; the peer must prove one of the secrets within ``seconds``.
        ``tls``: encrypt. Raises `Closed`, also for a peer without them."""
        with _Within(self, seconds):
            handshake = ListenerHandshake(protocol, secrets, b"" if tls is None else tls.fingerprint)
            self._send_plain(FrameKind.CHALLENGE, handshake.challenge)
            if tls is not None:
                self._start_tls(tls.context, server_side=True)
            answer = self._receive_plain(FrameKind.ANSWER, ANSWER_BYTES)
            try:
                proof, codes = handshake.accept(answer)
            except Refused as error:
                self._send_plain(FrameKind.PROOF, handshake.refusal)
                raise Closed(str(error)) from None
            self._send_plain(FrameKind.PROOF, proof)
        self._codes = codes

    def connect(
        self, protocol: str, secret: bytes, seconds: float = AUTHENTICATION_SECONDS, *, encrypts: bool = False
    ) -> None:
        """Authenticate as the end that connected, within ``seconds``. ``encrypts``: whether the listener uses
        TLS. Raises `Closed`."""
        with _Within(self, seconds):
            challenge, certificate = self._receive_plain(FrameKind.CHALLENGE, NONCE_BYTES), b""
            if encrypts:
                certificate = peer_fingerprint(self._start_tls(connector_context(), server_side=False))
            handshake = ConnectorHandshake(protocol, secret, certificate)
            self._send_plain(FrameKind.ANSWER, handshake.answer(challenge))
            proof = self._receive_plain(FrameKind.PROOF, PROOF_BYTES)
            try:
                self._codes = handshake.finish(proof)
            except Refused as error:
                raise Closed(str(error)) from None

    def _start_tls(self, context: ssl.SSLContext, *, server_side: bool) -> ssl.SSLSocket:
        try:
            wrapped = context.wrap_socket(
                self._socket, server_side=server_side, do_handshake_on_connect=False
            )
            self._socket = wrapped  # so that `close` ends a handshake
            wrapped.do_handshake()
        except (OSError, ValueError) as error:  # ValueError: closed meanwhile
            raise Closed(str(error)) from error
        return wrapped

    def _send_plain(self, kind: FrameKind, body: bytes) -> None:
        try:
            self._socket.sendall(pack_header(kind, len(body)) + body)
        except OSError as error:
            raise Closed(str(error)) from error

    def _receive_plain(self, kind: FrameKind, num_bytes: int) -> bytes:
        header = bytes(self._text(HEADER_BYTES))
        if self._checked(header, (kind,), num_bytes)[1] != num_bytes:
            raise Closed(f"a {kind.name} of another size")
        return bytes(self._text(num_bytes))

    # Messages

    def send(
        self, message: Message, payload: bytes | bytearray | memoryview = b"", descriptors: Sequence[int] = ()
    ) -> None:
        """Send a message. Raises `Closed` if the other end has closed the connection."""
        body = json.dumps(message).encode()
        content = memoryview(payload).cast("B")
        kind = FrameKind.MESSAGE
        if len(content):
            kind, body = FrameKind.MESSAGE_WITH_PAYLOAD, _SIZE.pack(len(content)) + body
        header = pack_header(kind, len(body))
        try:
            with self._lock:
                code = b"" if self._codes is None else self._codes.sent.of_message(header, body)
                first = header + body + code
                if descriptors:
                    first = first[self._send_descriptors(first, descriptors) :]
                self._socket.sendall(first)
                if len(content):
                    self._send_payload(content)
        except OSError as error:
            raise Closed(str(error)) from error

    def _send_descriptors(self, data: bytes, descriptors: Sequence[int]) -> int:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        return self._socket.sendmsg([data], rights)

    def _send_payload(self, content: memoryview) -> None:
        """Send the payload in pieces. The authentication code of a piece is sent together with the header of
        the next one, to save a system call."""
        before = b""
        for start in range(0, len(content), _PIECE_BYTES):
            piece = content[start : start + _PIECE_BYTES]
            self._socket.sendall(before + pack_header(FrameKind.PAYLOAD, len(piece)))
            self._socket.sendall(piece)
            before = b"" if self._codes is None else self._codes.sent.of_payload(piece)
        if before:
            self._socket.sendall(before)

    def receive(self) -> tuple[Message, memoryview, list[int]]:
        """Return the next message, its payload and its descriptors.

        Raises `Closed`, also for malformed data, and ``TimeoutError`` if no message begins to arrive within
        the timeout set by `set_timeout`."""
        begun, descriptors = self._first(HEADER_BYTES)
        if self._socket.gettimeout() is None:
            self._socket.settimeout(_PART_SECONDS)
            try:
                return *self._rest(begun), descriptors
            finally:
                self._socket.settimeout(None)
        return *self._rest(begun), descriptors

    def _rest(self, begun: bytes) -> tuple[Message, memoryview]:
        header = begun + bytes(self._text(HEADER_BYTES - len(begun)))
        kind, size = self._checked(header, _MESSAGE_KINDS, self._max_text_bytes)
        body = self._text(size)
        if self._codes is not None:
            code = bytes(self._text(MESSAGE_CODE_BYTES))
            try:
                self._codes.received.check_message(header, body, code)
            except Refused as error:
                raise Closed(str(error)) from None
        content = memoryview(b"")
        try:
            if kind is FrameKind.MESSAGE_WITH_PAYLOAD:
                content = self._payload(_SIZE.unpack_from(body)[0])
                body = body[_SIZE.size :]
            message = json.loads(body)
        except (ValueError, RecursionError, MemoryError, OverflowError, struct.error) as error:
            raise Closed(f"received data is not a message: {error}") from error
        if not isinstance(message, dict) or not isinstance(message.get("op", ""), str):
            raise Closed("received data is not a message: not an object with an op")
        return message, content

    def _payload(self, count: int) -> memoryview:
        if count > self.max_bytes:
            raise Closed(f"a payload of {count} bytes was refused")
        content, done = memoryview(bytearray(count)), 0
        code_bytes = 0 if self._codes is None else PAYLOAD_CODE_BYTES
        header = bytes(self._text(HEADER_BYTES))
        while done < count:
            _, size = self._checked(header, (FrameKind.PAYLOAD,), min(_PIECE_BYTES, count - done))
            if not size:
                raise Closed("a piece of a payload without bytes")
            piece = content[done : done + size]
            self._into(piece)
            done += size
            rest = bytes(self._text(code_bytes + (HEADER_BYTES if done < count else 0)))
            if self._codes is not None:
                try:
                    self._codes.received.check_payload(piece, rest[:code_bytes])
                except Refused as error:
                    raise Closed(str(error)) from None
            header = rest[code_bytes:]
        return content

    @staticmethod
    def _checked(header: bytes, kinds: Sequence[FrameKind], most_bytes: int) -> tuple[FrameKind, int]:
        try:
            return check_header(header, kinds, most_bytes)
        except Refused as error:
            raise Closed(str(error)) from None

    # The socket

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

    def shut_down(self) -> None:
        """End the connection. A thread blocked in `receive` returns with an error."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. A thread blocked in `receive` returns with an error."""
        self.shut_down()
        self._socket.close()

    def _first(self, count: int) -> tuple[bytes, list[int]]:
        """Return the first bytes of a message, at most ``count``, and its descriptors."""
        descriptors: list[int] = []
        try:
            if self._is_local:
                found, descriptors, _, _ = socket.recv_fds(self._socket, count, 64)
            else:
                found = self._socket.recv(count)
        except TimeoutError:
            raise
        except OSError as error:
            raise Closed(str(error)) from error
        if not found:
            raise Closed("the other end is gone")
        return found, descriptors

    def _text(self, count: int) -> bytearray:
        """Return the next ``count`` bytes, in memory that grows as they arrive."""
        found = bytearray()
        while len(found) < count:
            start, more = len(found), min(_READ_BYTES, count - len(found))
            found += bytes(more)
            self._into(memoryview(found)[start:])
        return found

    def _into(self, content: memoryview) -> None:
        done = 0
        while done < len(content):
            try:
                if self._deadline is not None:
                    self._socket.settimeout(max(_LEAST_SECONDS, self._deadline - time.monotonic()))
                got = self._socket.recv_into(content[done:])
            except OSError as error:
                raise Closed(str(error)) from error
            if not got:
                raise Closed("the other end is gone")
            done += got


class _Within:
    """Limits the time of all that a channel sends and receives inside the block."""

    def __init__(self, channel: SocketChannel, seconds: float) -> None:
        self._channel, self._seconds = channel, seconds

    def __enter__(self) -> None:
        self._before = self._channel._socket.gettimeout()
        self._channel._deadline = time.monotonic() + self._seconds
        self._channel._socket.settimeout(self._seconds)

    def __exit__(self, *_: object) -> None:
        self._channel._deadline = None
        with suppress(OSError):
            self._channel._socket.settimeout(self._before)
