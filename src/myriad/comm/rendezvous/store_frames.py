"""Messages between a rank and the rendezvous store of its attempt, on an authenticated connection.

    connect ──► challenge, answer, proof (`myriad.wire.handshake`)
            ──► request: an operation and byte strings     ◄── reply: a status and byte strings, one for each

A request for keys that do not exist yet is answered when they do. A rank that no longer wants the answer
closes its connection. Each message is a frame with a code (`myriad.wire.frame_reader`).
"""

import struct
from collections.abc import Sequence
from enum import IntEnum

from myriad.wire.framing import Refused

__all__ = ["MOST_BYTES", "PROTOCOL", "StoreOp", "StoreStatus", "pack", "unpack"]

PROTOCOL = "rendezvous store"
MOST_BYTES = 2**26
"""Largest request or reply."""
_HEAD, _SIZE = struct.Struct("!BI"), struct.Struct("!I")


class StoreOp(IntEnum):
    """What a rank asks of the store; in brackets: the byte strings of the request."""

    JOIN = 1
    """[rank]: the rank has connected."""
    SET = 2
    """[key, value, key, value, ...]: an empty reply, once all are written."""
    GET = 3
    """[key, ...]: the values, once all exist."""
    WAIT = 4
    """[key, ...]: an empty reply, once all exist."""
    ADD = 5
    """[key, number]: the sum."""
    APPEND = 6
    """[key, bytes]: an empty reply, once they are appended to the value."""
    COMPARE_SET = 7
    """[key, expected, desired]: the value afterwards."""
    CHECK = 8
    """[key, ...]: 1 if all exist, else 0."""
    DELETE = 9
    """[key]: 1 if it existed, else 0."""
    LIST = 10
    """[]: the names of all keys."""
    COUNT = 11
    """[]: the number of keys."""


class StoreStatus(IntEnum):
    """Whether a request was carried out."""

    DONE = 0
    REFUSED = 1
    """The one byte string of the reply is the reason."""


def pack(code: int, items: Sequence[bytes]) -> bytes:
    """Return the body of a request or a reply."""
    parts = [_HEAD.pack(code, len(items))]
    for item in items:
        parts += _SIZE.pack(len(item)), item
    return b"".join(parts)


def unpack(body: bytes) -> tuple[int, list[bytes]]:
    """Return the operation or status and the byte strings. Raises `Refused`."""
    try:
        code, count = _HEAD.unpack_from(body)
        at, items = _HEAD.size, []
        for _ in range(count):
            (size,) = _SIZE.unpack_from(body, at)
            at += _SIZE.size
            items.append(body[at : at + size])
            at += size
    except struct.error:
        raise Refused("a message that is cut off") from None
    if at != len(body):
        raise Refused("a message with bytes that are missing or left over")
    return code, items
