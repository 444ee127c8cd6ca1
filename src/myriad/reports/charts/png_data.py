"""A small picture as a data URI in a page: one pixel for each cell."""

import struct
import zlib
from base64 import b64encode
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["data_uri"]


def data_uri(pixels: npt.NDArray[Any]) -> str:
    """Encode ``[row, column, red green blue alpha]`` of uint8 as a PNG."""
    height, width = pixels.shape[:2]
    rows = np.zeros((height, 1 + 4 * width), dtype=np.uint8)  # Each row starts with a filter byte of 0.
    rows[:, 1:] = pixels.reshape(height, 4 * width)
    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b""))
    data = b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)
    return "data:image/png;base64," + b64encode(data).decode()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
