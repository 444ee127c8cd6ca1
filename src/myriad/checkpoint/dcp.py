"""What makes our files ones of torch.distributed.checkpoint: the envelope around each piece.

A file of DCP holds one ``torch.save`` archive after the other. An archive is a zip whose one large member is
the tensor's bytes, uncompressed; the rest of it depends on shape and type alone. So torch writes it once,
without data (``skip_data``), and the bytes before and after the data are kept. `dcp_metadata` makes the file
that says where every piece is.
"""

import io
import os
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import torch

from myriad.checkpoint.piece import Piece, Shape
from myriad.model.rectangle import Rectangle

__all__ = ["dtype_name", "make_pieces"]

_ALIGNMENT = 64
"""Of pieces in a snapshot."""


def dtype_name(dtype: torch.dtype) -> str:
    """``float32``."""
    return str(dtype).removeprefix("torch.")


def make_pieces(rectangles: Sequence[Rectangle]) -> list[Piece]:
    """The pieces of one rank, in the order of its rectangles; where one follows another in live memory, so it
    does in the snapshot: they are copied together."""
    found: list[Piece] = []
    start, after = 0, -1
    for part in rectangles:
        if part.values.data_ptr() != after or not part.values.is_contiguous():
            start = -(-start // _ALIGNMENT) * _ALIGNMENT
        head, tail = _envelope(tuple(part.values.shape), part.values.dtype)
        num_bytes = part.values.numel() * part.values.element_size()
        name, shape = dtype_name(part.values.dtype), tuple(part.values.shape)
        found.append(
            Piece(part.name, part.full_shape, name, part.offsets, shape, num_bytes, start, head, tail)
        )
        start += num_bytes
        after = part.values.data_ptr() + num_bytes if part.values.is_contiguous() else -1
    return found


@lru_cache(maxsize=4096)
def _envelope(shape: Shape, dtype: torch.dtype) -> tuple[bytes, bytes]:
    """What ``torch.save`` writes before and after the bytes of such a tensor."""
    if 0 in shape:
        stream = io.BytesIO()
        torch.save(torch.empty(shape, dtype=dtype), stream)
        return stream.getvalue(), b""
    stand_in = torch.empty(shape, dtype=dtype)  # never touched: takes no memory
    with tempfile.TemporaryDirectory() as folder, _without_checksums():
        path = Path(folder) / "archive.pt"  # sparse: the data is a hole
        with torch.serialization.skip_data():
            torch.save(stand_in, path)
        return _around_data(path)


@contextmanager
def _without_checksums() -> Iterator[None]:
    """torch never reads the zip's checksums, and of data that is not there they would be wrong."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _around_data(path: Path) -> tuple[bytes, bytes]:
    with zipfile.ZipFile(path) as archive:
        (data,) = (member for member in archive.infolist() if member.filename.endswith("/data/0"))
    with path.open("rb") as file:
        file.seek(data.header_offset)
        local = file.read(30)
        name_bytes, extra_bytes = (int.from_bytes(local[at : at + 2], "little") for at in (26, 28))
        start = data.header_offset + 30 + name_bytes + extra_bytes
        file.seek(0)
        head = file.read(start)
        file.seek(start + data.file_size)
        return head, file.read(os.path.getsize(path))
