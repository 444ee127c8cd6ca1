"""Envelopes that make files of stored shards readable by torch.distributed.checkpoint (DCP).

A DCP file is a sequence of ``torch.save`` archives. An archive is a zip whose one large member is the bytes
of a tensor, uncompressed; the rest depends only on shape and dtype. So torch writes each archive once without
data (``skip_data``), and the bytes before and after the data are kept. `dcp_metadata` makes the file with the
location of every shard.
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

from myriad.checkpoint.format.stored_shard import Shape, StoredShard
from myriad.model.tensor_shard import TensorShard

__all__ = ["dtype_name", "make_stored_shards"]

_ALIGNMENT = 64
"""Alignment of shards in a snapshot, in bytes."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without ``torch.``, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def make_stored_shards(shards: Sequence[TensorShard]) -> list[StoredShard]:
    """Return the stored shards of one rank, in the order of its tensor shards.

    Neighbours in live memory are neighbours in the snapshot too, so that one copy moves both."""
    found: list[StoredShard] = []
    start, after = 0, -1
    for part in shards:
        if part.values.data_ptr() != after or not part.values.is_contiguous():
            start = -(-start // _ALIGNMENT) * _ALIGNMENT
        head, tail = _envelope(tuple(part.values.shape), part.values.dtype)
        num_bytes = part.values.numel() * part.values.element_size()
        name, shape = dtype_name(part.values.dtype), tuple(part.values.shape)
        found.append(
            StoredShard(part.name, part.full_shape, name, part.offsets, shape, num_bytes, start, head, tail)
        )
        start += num_bytes
        after = part.values.data_ptr() + num_bytes if part.values.is_contiguous() else -1
    return found


@lru_cache(maxsize=4096)
def _envelope(shape: Shape, dtype: torch.dtype) -> tuple[bytes, bytes]:
    """Return what ``torch.save`` writes before and after the data of a tensor of this shape and dtype."""
    if 0 in shape:
        stream = io.BytesIO()
        torch.save(torch.empty(shape, dtype=dtype), stream)
        return stream.getvalue(), b""
    stand_in = torch.empty(shape, dtype=dtype)  # never touched, so it uses no memory
    with tempfile.TemporaryDirectory() as folder, _without_checksums():
        path = Path(folder) / "archive.pt"  # a sparse file: the data is a hole
        with torch.serialization.skip_data():
            torch.save(stand_in, path)
        return _around_data(path)


@contextmanager
def _without_checksums() -> Iterator[None]:
    """Disable the zip checksums. torch never reads them, and without the data they would be wrong."""
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
