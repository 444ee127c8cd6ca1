"""The code of each frame: proof that the other end of this connection sent it, unchanged and in this place.

    message      HMAC-SHA256(key, number + header + body)       32 bytes; in the standard library
    payload      AES-256-GMAC(key, nonce = number, piece)       16 bytes; ten times as fast as HMAC-SHA256

Each direction of a connection has its own keys and its own count of frames, so a frame that was changed,
injected, repeated, left out, moved, or recorded on another connection is refused. GMAC needs a nonce that is
never used twice with a key: the number of the frame is one, because a key belongs to one direction of one
connection. The header of a payload frame holds nothing but its size, which GMAC covers.
"""

import hmac
import struct
from typing import TYPE_CHECKING

from myriad.wire.framing import Refused

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

__all__ = ["KEY_BYTES", "MESSAGE_CODE_BYTES", "PAYLOAD_CODE_BYTES", "DirectionCodes"]

MESSAGE_CODE_BYTES, PAYLOAD_CODE_BYTES = 32, 16
KEY_BYTES = 64
"""Half of it for messages, half for payloads."""
_NUMBER, _NONCE = struct.Struct("!Q"), struct.Struct("!IQ")


class DirectionCodes:
    """Computes or checks the codes of the frames of one direction, in their order."""

    def __init__(self, key: bytes) -> None:
        self._message_key, self._payload_key = key[: KEY_BYTES // 2], key[KEY_BYTES // 2 : KEY_BYTES]
        self._number = 0
        self._gmac: AESGCM | None = None

    def of_message(self, header: bytes, body: bytes | bytearray) -> bytes:
        """Return the code of the next frame, a message."""
        number, self._number = self._number, self._number + 1
        return hmac.digest(self._message_key, _NUMBER.pack(number) + header + body, "sha256")

    def of_payload(self, piece: bytes | memoryview) -> bytes:
        """Return the code of the next frame, a piece of a payload."""
        if self._gmac is None:  # the import takes tens of milliseconds, and the driver sends no payload
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM

            self._gmac = AESGCM(self._payload_key)
        number, self._number = self._number, self._number + 1
        return self._gmac.encrypt(_NONCE.pack(0, number), b"", piece)

    def check_message(self, header: bytes, body: bytes | bytearray, code: bytes) -> None:
        """Check the next frame, a message. Raises `Refused`."""
        if not hmac.compare_digest(self.of_message(header, body), code):
            raise Refused("a message that the other end has not sent so, or not now")

    def check_payload(self, piece: bytes | memoryview, code: bytes) -> None:
        """Check the next frame, a piece of a payload. Raises `Refused`."""
        if not hmac.compare_digest(self.of_payload(piece), code):
            raise Refused("a payload that the other end has not sent so, or not now")
