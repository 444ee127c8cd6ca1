"""Input that unpacks Zstandard, frame after frame, in bounded memory.

A file may have several frames, as parallel compressors write, and skippable ones. fsspec's own reader is not
used: it takes a file that ends inside a frame for a whole one. A request to a decompressor that has no limit
of its own unpacks up to 128 KiB for each 4 bytes, so each one gets few bytes.
"""

import io
from importlib.util import find_spec
from typing import IO, Any

from myriad.errors import BadInputError

__all__ = ["ZSTD_ENDING", "ZstdDamage", "ZstdInput", "check_zstd"]

ZSTD_ENDING = ".zst"
"""Ending of the names of such files."""
_REQUEST_BYTES = 1 << 10
"""Packed bytes to unpack at once: at most 32 MiB of text."""
_MOST_WINDOW_BYTES = 1 << 27
"""Largest window of a frame, which is in memory as a whole: the default limit of `zstd`, too."""


class ZstdDamage(EOFError):
    """A file that ends inside a frame, or holds what is no frame."""


def check_zstd(path: str) -> None:
    """Raise `BadInputError` for a file that needs a package that is missing."""
    if path.endswith(ZSTD_ENDING) and find_spec("zstandard") is None:
        allowed = "reading .zst needs the package zstandard (pip install 'myriad-train[zst]'); or unpack it"
        raise BadInputError("INPUT", path, allowed)


class ZstdInput(io.RawIOBase):
    """The content of a file of Zstandard; wrap it in an `io.BufferedReader`."""

    def __init__(self, packed: IO[bytes], path: str) -> None:
        """``path`` names the file in errors. Raises `BadInputError` without the package."""
        check_zstd(path)
        import zstandard

        self._packed = packed
        self._unpacker = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW_BYTES)
        self._error: type[Exception] = zstandard.ZstdError
        self._frame: Any = None
        """The decompressor of the frame that is read; ``None``: the next byte begins a frame."""
        self._unread, self._ready = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            packed = self._unread or self._packed.read(_REQUEST_BYTES)
            if not packed and self._frame is not None:
                raise ZstdDamage("it ends inside a Zstandard frame")
            if not packed:
                return 0
            self._ready = memoryview(self._unpack(packed))
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size

    def _unpack(self, packed: bytes) -> bytes:
        if self._frame is None:
            self._frame = self._unpacker.decompressobj()
        try:
            found: bytes = self._frame.decompress(packed)
        except self._error as error:
            if "too much memory" in str(error):
                most = f"a window above {_MOST_WINDOW_BYTES >> 20} MiB: pack it again without --long"
                raise ZstdDamage(f"it needs {most}") from None
            raise ZstdDamage(f"it is no Zstandard, or damaged ({error})") from None
        self._unread = self._frame.unused_data
        if self._frame.eof:
            self._frame = None
        return found
