"""Messages between the driver and its agents: length, version, JSON. First, each end proves that it has
the secret.

    driver  ──"driver's nonce"──────────────► agent
            ◄─"agent's nonce", proof─────────           proof = HMAC-SHA256(secret, role + both nonces)
            ──proof──────────────────────────►
            ◄──────── messages, either way ──►

A frame of another version, longer than `MAX_BYTES`, or without a JSON object of a known kind ends the
connection, never the process. Nothing is unpickled, and nothing that a message names is run.
"""

import asyncio
import hashlib
import hmac
import json
import logging
import secrets
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from myriad.errors import BadInputError
from myriad.supervise.message_codec import decode, encode
from myriad.system.pending_connections import AUTHENTICATION_SECONDS
from myriad.system.secret_place import SECRET_FILE, secret_place
from myriad.system.whole_file import write_whole

__all__ = [
    "MAX_BYTES",
    "MAX_UNREAD_BYTES",
    "SECRET_FILE",
    "AuthenticatedLink",
    "FrameReader",
    "Refused",
    "frame",
    "run_secret",
    "secret_place",
]

_LOG = logging.getLogger(__name__)

VERSION = 1
MAX_BYTES = 2**22
MAX_UNREAD_BYTES = 2**24
"""Most bytes that a peer may leave unread; a peer that leaves more counts as lost."""
_SECRET_BYTES = 64
_LEAST_SECRET_BYTES = 32
_HEADER = struct.Struct("!2sHI")
_MAGIC = b"MY"
_STRANGER_BYTES = 2**10
"""Longest message from a peer that has not yet proved to have the secret."""
_READ_BYTES = 2**16


class Refused(ValueError):
    """A peer or a message does not follow this protocol."""


def frame(message: dict[str, Any]) -> bytes:
    """Encode a message as a frame."""
    text = json.dumps(message).encode()
    assert len(text) <= MAX_BYTES, "what is sent is known, and short"
    return _HEADER.pack(_MAGIC, VERSION, len(text)) + text


class FrameReader:
    """Splits a byte stream into messages."""

    def __init__(self, most_bytes: int = MAX_BYTES) -> None:
        """``most_bytes``: largest size of a message."""
        self._buffer = bytearray()
        self.most_bytes = most_bytes

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Append received bytes and yield the messages that are complete. Raises `Refused`."""
        self._buffer += data
        while (message := self.next_message()) is not None:
            yield message

    def add(self, data: bytes) -> None:
        """Append received bytes."""
        self._buffer += data

    def next_message(self) -> dict[str, Any] | None:
        """Return the next message, or ``None`` if it is not complete yet. Raises `Refused`."""
        if len(self._buffer) < _HEADER.size:
            return None
        magic, version, size = _HEADER.unpack_from(self._buffer)
        if magic != _MAGIC or version != VERSION:
            raise Refused(f"version {version} of {magic!r}; this is version {VERSION}")
        if size > self.most_bytes:
            raise Refused(f"{size} bytes; at most {self.most_bytes}")
        end = _HEADER.size + size
        if len(self._buffer) < end:
            return None
        text = bytes(self._buffer[_HEADER.size : end])
        del self._buffer[:end]
        return _parse(text)


def _parse(text: bytes) -> dict[str, Any]:
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused(f"no JSON: {error}") from None
    if not isinstance(message, dict):
        raise Refused("not an object")
    return message


def run_secret(path: Path) -> bytes:
    """Return the run's secret. It is created if it is missing, readable only by its owner. Raises
    `BadInputError` if the file that `SECRET_FILE` names has no valid secret."""
    if (given := secret_place(path)) != path:
        return _read_given(given)
    if not path.exists() or path.stat().st_size != _SECRET_BYTES:  # missing, or cut off by a full disk
        write_whole(path, secrets.token_hex(_SECRET_BYTES // 2), mode=0o600)
    return path.read_bytes()


def _read_given(path: Path) -> bytes:
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise BadInputError(SECRET_FILE, str(path), f"cannot be read: {error.strerror}") from None
    if len(secret) < _LEAST_SECRET_BYTES:
        raise BadInputError(SECRET_FILE, str(path), f"a file with {_LEAST_SECRET_BYTES} characters or more")
    return secret


class AuthenticatedLink:
    """A connection on which both ends have proved to have the run's secret."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._frames = FrameReader(_STRANGER_BYTES)

    async def prove(self, secret: bytes, role: str, other: str) -> None:
        """Prove to the peer that this end has the secret, and check the peer's proof. Raises `Refused`,
        ``OSError``."""
        async with asyncio.timeout(AUTHENTICATION_SECONDS):
            mine = secrets.token_hex(16)
            self._send({"nonce": mine})
            theirs = await self._receive()
            nonce = str(theirs.get("nonce", ""))
            self._send({"proof": _proof(secret, role, mine, nonce)})
            answer = await self._receive()
        proof, expected = str(answer.get("proof", "")), _proof(secret, other, nonce, mine)
        if not hmac.compare_digest(_encoded(proof), _encoded(expected)):
            raise Refused(f"the peer does not know the secret of this run's {other}")
        self._frames.most_bytes = MAX_BYTES

    def send(self, message: Any) -> None:
        """Send a dataclass, without waiting."""
        self._send(encode(message))

    async def receive(self, kinds: Iterable[type]) -> Any:
        """Return the next message, which must be one of these dataclasses. Raises `Refused`, ``OSError``."""
        message = await self._receive()
        try:
            return decode(message, kinds)
        except ValueError as error:
            raise Refused(str(error)) from None

    def _send(self, message: dict[str, Any]) -> None:
        if self._writer.is_closing():
            return
        self._writer.write(frame(message))
        if self._unread_bytes() > MAX_UNREAD_BYTES:
            peer = self._writer.get_extra_info("peername")
            _LOG.warning("%s reads nothing, and its connection is ended", peer)
            self._writer.transport.abort()

    def _unread_bytes(self) -> int:
        return self._writer.transport.get_write_buffer_size()

    async def _receive(self) -> dict[str, Any]:
        while (message := self._frames.next_message()) is None:
            data = await self._reader.read(_READ_BYTES)
            if not data:
                raise ConnectionError("the other end is gone")
            self._frames.add(data)
        return message

    def is_closing(self) -> bool:
        """Return whether the connection can no longer be used."""
        return self._writer.is_closing()

    def close(self) -> None:
        """Close, which also wakes a pending receive; the other end may never read what is in flight."""
        if self._unread_bytes():
            self._writer.transport.abort()
        else:
            self._writer.close()

    def abort(self) -> None:
        """Close at once; unsent messages may be lost."""
        self._writer.transport.abort()


def _proof(secret: bytes, role: str, own: str, other: str) -> str:
    return hmac.new(secret, _encoded(f"{role}:{own}:{other}"), hashlib.sha256).hexdigest()


def _encoded(text: str) -> bytes:
    """Encode any text that an unauthenticated peer may send."""
    return text.encode(errors="surrogatepass")
