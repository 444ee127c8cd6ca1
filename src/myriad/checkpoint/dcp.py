"""What makes our files ones of torch.distributed.checkpoint: the envelope around each piece, and
``.metadata``.

A file of DCP holds one ``torch.save`` archive after the other. An archive is a zip whose one large member is
the tensor's bytes, uncompressed; the rest of it depends on shape and type alone. So torch writes it once,
without data (``skip_data``), and the bytes before and after the data are kept. ``.metadata`` says where every
piece is; since nothing in it changes from save to save, it is made once as well.
"""

import io
import os
import pickle
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from myriad.checkpoint.piece import Piece, Shape, files_of_rank, place_in_file
from myriad.model.rectangle import Rectangle

__all__ = ["METADATA", "dtype_name", "make_metadata", "make_pieces"]

METADATA = ".metadata"

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


def make_metadata(pieces_of_rank: Sequence[Sequence[Piece]]) -> bytes:
    """The content of ``.metadata`` for files of all ranks' pieces."""
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    where: dict[MetadataIndex, _StorageInfo] = {}
    files = (files_of_rank(rank, own) for rank, own in enumerate(pieces_of_rank))
    for file, pieces in chain.from_iterable(files):
        for piece, start in place_in_file(pieces):
            if piece.tensor not in tensors:
                properties = TensorProperties(dtype=getattr(torch, piece.dtype))
                tensors[piece.tensor] = TensorStorageMetadata(properties, torch.Size(piece.full_shape), [])
            kept = tensors[piece.tensor]
            assert isinstance(kept, TensorStorageMetadata)
            index = MetadataIndex(piece.tensor, torch.Size(piece.offsets), len(kept.chunks))
            kept.chunks.append(ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.shape)))
            where[index] = _StorageInfo(file, start, piece.file_bytes)
    return pickle.dumps(Metadata(tensors, storage_data=where))
