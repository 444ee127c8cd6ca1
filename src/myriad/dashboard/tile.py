"""Encode arrays of numbers for the page in binary form.

    bytes of the head u32 | head: JSON, padded with spaces to a multiple of 8 | arrays, each padded to 8 bytes

The head lists the arrays in order, with type and length, and holds their facts. The page creates typed arrays
on the bytes without a copy."""

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["finite", "pack_tile", "to_json", "unpack_tile"]

_TYPES = {
    "f4": "<f4",
    "f8": "<f8",
    "i4": "<i4",
    "u4": "<u4",
    "u2": "<u2",
    "i2": "<i2",
    "u1": "|u1",
    "i1": "|i1",
}


def pack_tile(arrays: Mapping[str, npt.NDArray[Any]], **facts: Any) -> bytes:
    """Return arrays and plain ``facts`` as bytes."""
    described, parts = [], []
    for name, array in arrays.items():
        kind = f"{array.dtype.kind}{array.dtype.itemsize}"
        data = np.ascontiguousarray(array, dtype=_TYPES[kind]).tobytes()
        described.append({"name": name, "type": kind, "length": len(array)})
        parts.append(data + bytes(-len(data) % 8))
    head = to_json({"arrays": described, **facts})
    head += b" " * (-(len(head) + 4) % 8)
    return struct.pack("<I", len(head)) + head + b"".join(parts)


def unpack_tile(data: bytes) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """Return the arrays and facts in bytes from `pack_tile`."""
    (length,) = struct.unpack_from("<I", data)
    facts = json.loads(data[4 : 4 + length])
    arrays, offset = {}, 4 + length
    for described in facts.pop("arrays"):
        array = np.frombuffer(data, _TYPES[described["type"]], described["length"], offset)
        arrays[described["name"]] = array
        offset += array.nbytes + -array.nbytes % 8
    return arrays, facts


def to_json(value: Any) -> bytes:
    """Return the value as JSON. Non-finite numbers become null, as JSON cannot express them."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(
            errors="backslashreplace"
        )
    except ValueError:
        return to_json(finite(value))


def finite(value: Any) -> Any:
    """Return the value with ``None`` for every non-finite number."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return value
