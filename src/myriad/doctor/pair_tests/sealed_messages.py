"""Messages between the nodes of a pairwise test: JSON of bounded size, authenticated with the shared secret.

    hello       "MYRD" version nonce, from both ends; then from both, for as long as the connection lives
    message     length (4 bytes), HMAC-SHA256 of (direction's key, number of the message, text), text

The key of each direction derives from the secret and both nonces, and the HMAC of each message covers its
number: a message recorded on another connection, or earlier on this one, is refused. A message that is too
long, of another version or not authentic ends the connection and nothing else. Nothing is unpickled. The
content is not secret: rates, and which of the known nodes test each other.
"""

import hashlib
import hmac
import json
import os
import struct
from typing import Any

__all__ = [
    "HEADER_BYTES",
    "HELLO_BYTES",
    "MOST_BYTES",
    "Message",
    "Seal",
    "UnauthenticatedError",
    "hello",
    "proof",
]

Message = dict[str, Any]

_MAGIC, _VERSION = b"MYRD", 1
_HELLO, _HEADER = struct.Struct("<4sH16s"), struct.Struct("<I32s")
HELLO_BYTES, HEADER_BYTES = _HELLO.size, _HEADER.size
MOST_BYTES = 2**16


class UnauthenticatedError(OSError):
    """The peer does not know the secret or speaks another version."""


def hello() -> bytes:
    """Return the first bytes of either end."""
    return _HELLO.pack(_MAGIC, _VERSION, os.urandom(16))


def proof(secret: bytes, token: str, end: str) -> bytes:
    """Return a proof that the end of a test connection knows the secret; ``token`` is new for each test."""
    return hmac.digest(secret, f"pair {end} {token}".encode(), "sha256")


class Seal:
    """Authenticates messages in both directions of one connection."""

    def __init__(self, secret: bytes, mine: bytes, theirs: bytes, *, connects: bool) -> None:
        """``mine`` and ``theirs`` are the hellos. Raises `UnauthenticatedError` for another version."""
        magic, version, _ = _HELLO.unpack(theirs)
        if (magic, version) != (_MAGIC, _VERSION):
            raise UnauthenticatedError("not a node of this version of myriad")
        first, second = (mine, theirs) if connects else (theirs, mine)
        keys = [hmac.digest(secret, way + first + second, hashlib.sha256) for way in (b"there", b"back")]
        self._out, self._in = keys if connects else keys[::-1]
        self._sent = self._received = 0

    def close(self, message: Message) -> bytes:
        """Return the bytes of a message to send."""
        text = json.dumps(message).encode()
        assert len(text) <= MOST_BYTES, "messages are bounded where they are made"
        seal = _seal(self._out, self._sent, text)
        self._sent += 1
        return _HEADER.pack(len(text), seal) + text

    @staticmethod
    def length(header: bytes) -> int:
        """Return the length of the text that follows. Raises `UnauthenticatedError` before more is read."""
        count: int = _HEADER.unpack(header)[0]
        if count > MOST_BYTES:
            raise UnauthenticatedError(f"a message of {count} bytes")
        return count

    def open(self, header: bytes, text: bytes) -> Message:
        """Return the message that was sent. Raises `UnauthenticatedError`."""
        if not hmac.compare_digest(_HEADER.unpack(header)[1], _seal(self._in, self._received, text)):
            raise UnauthenticatedError("a message that is not sealed with the secret")
        self._received += 1
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            raise UnauthenticatedError("a message that is not JSON") from None
        if not isinstance(message, dict):
            raise UnauthenticatedError("a message that is not an object")
        return message


def _seal(key: bytes, number: int, text: bytes) -> bytes:
    return hmac.digest(key, struct.pack("<Q", number) + text, "sha256")
