"""Read parts of the tensors of a safetensors file, which may come from anyone.

    8 bytes     size of the header, little endian
    header      JSON: dtype, shape and data_offsets of each tensor
    data        the tensors, each in C order, one after another without gaps

The header is checked against the size of the file before any value is read: each tensor lies in the file, has
as many bytes as its shape and dtype say, and shares none with another tensor. A part is read with ``pread``,
and only its bytes are. The file is not mapped: reading a mapped file that is truncated meanwhile would end
the process.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from myriad.errors import BadInputError
from myriad.system.whole_file import opened_to_read, parse_json

__all__ = ["Box", "SafetensorsFile", "StoredTensor", "whole_box"]

Box = tuple[slice, ...]
"""A part of a tensor: first element and end, in each dimension."""
_MOST_HEADER_BYTES = 100_000_000
"""Largest header, as in the safetensors library."""
_MOST_DIMS = 8
_BYTES = (
    dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 1)
    | dict.fromkeys(("U16", "I16", "F16", "BF16"), 2)
    | dict.fromkeys(("U32", "I32", "F32"), 4)
    | dict.fromkeys(("U64", "I64", "F64", "C64"), 8)
)
"""Bytes of an element of each dtype."""
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16} | {
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
}
"""Dtypes of the tensors that can be read."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in its file."""

    dtype: str
    """Name of the dtype in the format: ``BF16``."""
    shape: tuple[int, ...]
    start: int
    """Offset of the first byte in the file."""

    @property
    def num_bytes(self) -> int:
        """Size of the values in bytes."""
        return math.prod(self.shape) * _BYTES[self.dtype]

    def entry(self, index: int) -> "StoredTensor":
        """Return an entry along the first dimension."""
        found = StoredTensor(self.dtype, self.shape[1:], self.start)
        return replace(found, start=self.start + index * found.num_bytes)

    def as_matrix(self) -> "StoredTensor":
        """Return the same values as rows along the first dimension."""
        return replace(self, shape=(self.shape[0], math.prod(self.shape[1:])))


def whole_box(shape: Sequence[int]) -> Box:
    """Return the part that is the whole tensor."""
    return tuple(slice(0, size) for size in shape)


class SafetensorsFile:
    """The tensors of one file."""

    def __init__(self, path: Path) -> None:
        """Read and check the header. Raises `BadInputError`."""
        self.path = path
        self.bytes_read = 0
        """Bytes of values that were read so far."""
        try:
            with opened_to_read(path) as handle:
                self._stamp = _stamp_of(handle)
                size = os.fstat(handle).st_size
                header_bytes = int.from_bytes(_exactly(handle, bytearray(8), 0), "little")
                if not 0 < header_bytes <= min(_MOST_HEADER_BYTES, size - 8):
                    raise ValueError(f"a header of {header_bytes} bytes in a file of {size}")
                header = parse_json(bytes(_exactly(handle, bytearray(header_bytes), 8)))
            self.tensors: Mapping[str, StoredTensor] = _checked(header, 8 + header_bytes, size)
        except (OSError, ValueError) as error:
            raise BadInputError("weights", str(path), f"not readable ({str(error)[:300]})") from None

    def read(self, name: str, box: Box, view: StoredTensor | None = None) -> torch.Tensor:
        """Return a part of a tensor of one or two dimensions, whose dtype is float32, float16, bfloat16,
        float8 (e4m3) or uint8. ``view``: an entry of the tensor to read from, or its values in another shape.

        Raises `BadInputError` if the file was changed since its header was read."""
        stored = self.tensors[name] if view is None else view
        assert 1 <= len(stored.shape) == len(box) <= 2, "rows, or rows and columns"
        assert all(0 <= one.start <= one.stop <= size for one, size in zip(box, stored.shape, strict=True))
        part = torch.empty([one.stop - one.start for one in box], dtype=_DTYPES[stored.dtype])
        if not part.numel():
            return part
        row_bytes = stored.num_bytes // stored.shape[0]
        first = stored.start + box[0].start * row_bytes
        target = part.view(-1).view(torch.uint8).numpy().data
        try:
            with opened_to_read(self.path) as handle:
                if _stamp_of(handle) != self._stamp:
                    raise OSError("was changed while it was read")
                if part[0].numel() == math.prod(stored.shape[1:]):
                    _exactly(handle, target, first)
                else:
                    first += box[1].start * part.element_size()
                    _strips(handle, target, first, row_bytes, part[0].nbytes)
        except OSError as error:
            raise BadInputError("weights", str(self.path), f"{name} is not readable ({error})") from None
        self.bytes_read += part.nbytes
        return part


def _stamp_of(handle: int) -> tuple[int, int, int]:
    """Return what changes if a file is replaced or written."""
    found = os.fstat(handle)
    return found.st_ino, found.st_size, found.st_mtime_ns


def _exactly(handle: int, target: Any, start: int) -> Any:
    """Fill a buffer with the bytes at ``start``, and return it. Raises ``OSError`` if the file ends early."""
    rest = memoryview(target)
    while len(rest):
        count = os.preadv(handle, [rest], start)
        if not count:
            raise OSError("ends before its values")
        rest, start = rest[count:], start + count
    return target


def _strips(handle: int, target: memoryview, start: int, stride: int, width: int) -> None:
    """Fill a buffer with strips of ``width`` bytes that are ``stride`` bytes apart."""
    for filled in range(0, len(target), width):
        _exactly(handle, target[filled : filled + width], start)
        start += stride


def _checked(header: Any, data: int, size: int) -> dict[str, StoredTensor]:
    """Return the tensors of a header whose values begin at byte ``data``. Raises ``ValueError``."""
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    found = {name: _stored(name, entry, data) for name, entry in header.items() if name != "__metadata__"}
    end = data
    for name, stored in sorted(found.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if stored.start != end:
            raise ValueError(f"{name[:200]} begins at byte {stored.start}, not where the tensor before ends")
        end += stored.num_bytes
    if end != size:
        raise ValueError(f"its tensors end at byte {end} of {size}")
    return found


def _stored(name: str, entry: Any, data: int) -> StoredTensor:
    """Return one tensor of the header. Raises ``ValueError``."""
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    values: list[Any] = [fields.get(key) for key in ("dtype", "shape", "data_offsets")]
    dtype, shape, offsets = values
    if not isinstance(dtype, str) or dtype not in _BYTES:
        raise ValueError(f"{name[:200]} has the dtype {str(dtype)[:50]!r}")
    if not _is_sizes(shape) or len(shape) > _MOST_DIMS or not _is_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{name[:200]} has no shape or no data_offsets")
    stored = StoredTensor(dtype, tuple(shape), data + offsets[0])
    if stored.num_bytes != offsets[1] - offsets[0]:
        raise ValueError(f"{name[:200]} needs {stored.num_bytes} bytes, has {offsets[1] - offsets[0]}")
    return stored


def _is_sizes(value: Any) -> bool:
    """Whether a value is a list of whole numbers from 0 to 2^62."""
    return isinstance(value, list) and all(type(one) is int and 0 <= one <= 2**62 for one in value)
