"""Frames with their codes, as bytes to send and from bytes that arrive in parts. No input or output."""

from myriad.wire.frame_codes import MESSAGE_CODE_BYTES, DirectionCodes
from myriad.wire.framing import HEADER_BYTES, FrameKind, check_header, pack_header

__all__ = ["FrameReader", "packed_frame"]


def packed_frame(kind: FrameKind, body: bytes, codes: DirectionCodes | None = None) -> bytes:
    """Return a frame. ``codes``: those of the direction, once the ends have authenticated."""
    header = pack_header(kind, len(body))
    return header + body + (b"" if codes is None else codes.of_message(header, body))


class FrameReader:
    """Splits received bytes into frames. Uses memory only for bytes that have arrived."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.codes: DirectionCodes | None = None
        """Checks the code of each frame; ``None``: frames have none yet."""

    def add(self, data: bytes) -> None:
        """Append bytes received from the socket; a frame may arrive in parts."""
        self._buffer += data

    def next_body(self, kind: FrameKind, most_bytes: int) -> bytes | None:
        """Return the body of the next frame; ``None``: it is not complete yet. Raises `Refused` if it is of
        another kind, larger than ``most_bytes``, or its code is wrong."""
        if len(self._buffer) < HEADER_BYTES:
            return None
        header = bytes(self._buffer[:HEADER_BYTES])
        _, size = check_header(header, (kind,), most_bytes)
        code_start = HEADER_BYTES + size
        end = code_start + (0 if self.codes is None else MESSAGE_CODE_BYTES)
        if len(self._buffer) < end:
            return None
        body, code = bytes(self._buffer[HEADER_BYTES:code_start]), bytes(self._buffer[code_start:end])
        del self._buffer[:end]
        if self.codes is not None:
            self.codes.check_message(header, body, code)
        return body
