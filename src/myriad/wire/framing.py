"""Frames on a byte stream: each has a header, a body of bounded size and, once the ends have authenticated,
a code.

    magic "MY" | version | kind | size of the body | body | code
    2 bytes    | 1       | 1    | 4                | size | 0, 16 or 32 (see `frame_codes`)

The reader names the kinds and the size that it accepts next. A header is checked before anything is stored
for it, and memory is used only for bytes that have arrived. Nothing is unpickled.
"""

import struct
from collections.abc import Collection
from enum import IntEnum

__all__ = [
    "FRAME_BYTES",
    "HEADER_BYTES",
    "VERSION",
    "FrameKind",
    "Refused",
    "check_header",
    "pack_header",
]

VERSION = 2
_HEADER = struct.Struct("!2sBBI")
_MAGIC = b"MY"
HEADER_BYTES = _HEADER.size
FRAME_BYTES = 2**32 - 1
"""Largest body that a header can announce; each protocol accepts much less."""


class Refused(ValueError):
    """A peer or a message does not follow this protocol."""


class FrameKind(IntEnum):
    """What the body of a frame is."""

    CHALLENGE = 1
    """The listener's nonce: the first frame of a connection."""
    ANSWER = 2
    """The connector's nonce and its proof."""
    PROOF = 3
    """Kind of the frame in which the listener proves that it has the secret."""
    MESSAGE = 4
    """A message without a payload."""
    MESSAGE_WITH_PAYLOAD = 5
    """The size of a payload in bytes (64 bits), then a message; `PAYLOAD` frames follow."""
    PAYLOAD = 6
    """A piece of the payload."""


def pack_header(kind: FrameKind, size: int) -> bytes:
    """Return the header of a frame with ``size`` bytes in its body."""
    return _HEADER.pack(_MAGIC, VERSION, kind, size)


def check_header(header: bytes, kinds: Collection[FrameKind], most_bytes: int) -> tuple[FrameKind, int]:
    """Return the kind and the size of a frame. Raises `Refused` unless it is one of ``kinds`` and its body
    has at most ``most_bytes``."""
    magic, version, kind, size = _HEADER.unpack(header)
    if magic != _MAGIC or version != VERSION:
        raise Refused(f"version {version} of {magic!r}; this is version {VERSION} of {_MAGIC!r}")
    if kind not in kinds:
        raise Refused(f"a frame of kind {kind} where {' or '.join(one.name for one in kinds)} belongs")
    if size > most_bytes:
        raise Refused(f"a frame of {size} bytes; at most {most_bytes}")
    return FrameKind(kind), size
