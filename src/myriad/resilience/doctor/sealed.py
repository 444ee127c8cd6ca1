"""Messages between the nodes of a pairwise test: JSON of bounded size, each sealed with the shared secret.

    hello       "MYRD" version nonce, from both ends; then from both, for as long as the connection lives
    message     length (4 bytes), HMAC-SHA256 of (direction's key, number of the message, text), text

The key of each direction is made of the secret and both nonces, and each message carries its number in its
seal: nothing that was heard on another connection, or earlier on this one, is taken. A message that is too
long, of another version or wrongly sealed ends the connection and nothing else. Nothing is unpickled. The
content is not secret: rates, and which of the nodes that all know is to be tested with which.
"""

import hashlib
import hmac
import json
import os
import struct
from typing import Any

__all__ = ["HEADER_BYTES", "HELLO_BYTES", "MOST_BYTES", "Message", "Refused", "Seal", "hello", "proof"]

Message = dict[str, Any]

_MAGIC, _VERSION = b"MYRD", 1
_HELLO, _HEADER = struct.Struct("<4sH16s"), struct.Struct("<I32s")
HELLO_BYTES, HEADER_BYTES = _HELLO.size, _HEADER.size
MOST_BYTES = 2**16


class Refused(OSError):
    """What came is not from a peer that knows the secret and speaks this version."""


def hello() -> bytes:
    """The first bytes of either end."""
    return _HELLO.pack(_MAGIC, _VERSION, os.urandom(16))


def proof(secret: bytes, token: str, end: str) -> bytes:
    """That the end of a test connection knows the secret; ``token`` is new for each test."""
    return hmac.digest(secret, f"pair {end} {token}".encode(), "sha256")


class Seal:
    """Both directions of one connection."""

    def __init__(self, secret: bytes, mine: bytes, theirs: bytes, *, connects: bool) -> None:
        """``mine`` and ``theirs``: the hellos. Raises `Refused` for one of another version."""
        magic, version, _ = _HELLO.unpack(theirs)
        if (magic, version) != (_MAGIC, _VERSION):
            raise Refused("not a node of this version of myriad")
        first, second = (mine, theirs) if connects else (theirs, mine)
        keys = [hmac.digest(secret, way + first + second, hashlib.sha256) for way in (b"there", b"back")]
        self._out, self._in = keys if connects else keys[::-1]
        self._sent = self._received = 0

    def close(self, message: Message) -> bytes:
        """The bytes to send."""
        text = json.dumps(message).encode()
        assert len(text) <= MOST_BYTES, "messages are bounded where they are made"
        seal = _seal(self._out, self._sent, text)
        self._sent += 1
        return _HEADER.pack(len(text), seal) + text

    @staticmethod
    def length(header: bytes) -> int:
        """Of the text that follows. Raises `Refused` before anything is read for it."""
        count: int = _HEADER.unpack(header)[0]
        if count > MOST_BYTES:
            raise Refused(f"a message of {count} bytes")
        return count

    def open(self, header: bytes, text: bytes) -> Message:
        """What was sent. Raises `Refused`."""
        if not hmac.compare_digest(_HEADER.unpack(header)[1], _seal(self._in, self._received, text)):
            raise Refused("a message that is not sealed with the secret")
        self._received += 1
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            raise Refused("a message that is not JSON") from None
        if not isinstance(message, dict):
            raise Refused("a message that is not an object")
        return message


def _seal(key: bytes, number: int, text: bytes) -> bytes:
    return hmac.digest(key, struct.pack("<Q", number) + text, "sha256")
