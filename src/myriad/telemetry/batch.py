"""Spans on their way: of some ranks of one node, with what a reader must know to place them in time.

    "MYSP" | version u16 | bytes of the head u16 + u32 of the records | head: JSON | records, 32 bytes each

What comes in is refused when it is not exactly this; nothing in it is run or unpickled.
"""

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from myriad.telemetry.records import RECORD, RECORD_BYTES, Records

__all__ = [
    "MAX_BATCH_BYTES",
    "MAX_NAMES",
    "BatchError",
    "Origin",
    "SpanBatch",
    "check_names",
    "decode",
    "encode",
]

MAX_BATCH_BYTES = 64 * 2**20
_FIXED = struct.Struct("<4sHHI")
_MAGIC, _VERSION = b"MYSP", 1
MAX_NAMES, _MAX_NAME_CHARACTERS = 1024, 64


class BatchError(ValueError):
    """These bytes are no batch; says why."""


@dataclass(frozen=True)
class Origin:
    """Which batch of whom: one that is sent again, because nobody knows whether it arrived, has the same."""

    sender: str
    """A word that nobody else has."""
    number: int
    """Ascending."""
    part: int = 0
    """Of a batch that is sent in several."""

    @property
    def place(self) -> tuple[int, int]:
        """Among its sender's."""
        return self.number, self.part


@dataclass(frozen=True)
class SpanBatch:
    """What a node ships."""

    node: int
    attempt: int
    names: tuple[str, ...]
    records: Records
    """``start_ns`` from the epoch, by the clock that all nodes agreed on."""
    num_dropped: int = 0
    """Spans that were lost since the batch before."""
    clock_error_seconds: float = 0.0
    """How far off ``start_ns`` may be from other nodes', at most."""
    origin: Origin | None = None
    """``None``: is not known again."""


def encode(batch: SpanBatch) -> bytes:
    """As bytes."""
    told = {
        "node": batch.node,
        "attempt": batch.attempt,
        "names": list(batch.names),
        "num_dropped": batch.num_dropped,
        "clock_error_seconds": batch.clock_error_seconds,
    }
    if batch.origin is not None:
        told["origin"] = [batch.origin.sender, *batch.origin.place]
    head = json.dumps(told).encode()
    records = np.ascontiguousarray(batch.records, dtype=RECORD).tobytes()
    return _FIXED.pack(_MAGIC, _VERSION, len(head), len(records)) + head + records


def decode(data: bytes | memoryview) -> SpanBatch:
    """The batch in these bytes; its records lie in them. Raises `BatchError`."""
    if len(data) < _FIXED.size or len(data) > MAX_BATCH_BYTES:
        raise BatchError(f"{len(data)} bytes: between {_FIXED.size} and {MAX_BATCH_BYTES}")
    magic, version, head_bytes, record_bytes = _FIXED.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise BatchError(f"begins with {magic!r} {version}: {_MAGIC!r} {_VERSION}")
    if len(data) != _FIXED.size + head_bytes + record_bytes or record_bytes % RECORD_BYTES:
        raise BatchError("its length is not what its head says")
    records = np.frombuffer(data, RECORD, offset=_FIXED.size + head_bytes)
    batch = _of_head(bytes(data[_FIXED.size : _FIXED.size + head_bytes]), records)
    if len(records) and not (records["name"].min() >= 0 and records["name"].max() < len(batch.names)):
        raise BatchError("a span has a name that is not in the head")
    if len(records) and (records["duration_ns"].min() < 0 or records["rank"].min() < 0):
        raise BatchError("a span has a negative rank or duration")
    return batch


def check_names(names: Sequence[object]) -> None:
    """Raises `BatchError` for what are no names of spans."""
    if not all(isinstance(name, str) for name in names):
        raise BatchError("names: a list of texts")
    if len(names) > MAX_NAMES or any(len(str(name)) > _MAX_NAME_CHARACTERS for name in names):
        raise BatchError(f"names: at most {MAX_NAMES} of at most {_MAX_NAME_CHARACTERS} characters")


def _of_head(text: bytes, records: Records) -> SpanBatch:
    try:
        head = json.loads(text)
        names = head["names"]
        if not isinstance(names, list):
            raise BatchError("names: a list of texts")
        check_names(names)
        node, attempt, dropped = (int(head[key]) for key in ("node", "attempt", "num_dropped"))
        error = float(head["clock_error_seconds"])
        if dropped < 0 or not 0 <= error < math.inf:
            raise BatchError("num_dropped and clock_error_seconds: from 0 on")
        origin = None if head.get("origin") is None else _origin(head["origin"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as problem:
        if isinstance(problem, BatchError):
            raise
        raise BatchError(f"its head cannot be read: {problem!r}") from None
    return SpanBatch(node, attempt, tuple(names), records, dropped, error, origin)


def _origin(told: object) -> Origin:
    match told:
        case [str(sender), int(number), int(part)] if len(sender) <= _MAX_NAME_CHARACTERS:
            return Origin(sender, number, part)
    raise BatchError("origin: sender, number and part")
