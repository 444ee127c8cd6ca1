"""Encode batches of spans of one node for sending, with the data that places them in time.

    "MYSP" | version u16 | bytes of the head u16 + u32 of the records | head: JSON | records, 32 bytes each

`decode` rejects input that does not have exactly this format. It executes and unpickles nothing.
`pool` merges the spans of several ranks, which number their names differently, into one batch.
"""

import json
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from myriad.telemetry.span_io.span_records import RECORD, RECORD_BYTES, Records

__all__ = [
    "MAX_BATCH_BYTES",
    "MAX_NAMES",
    "BatchError",
    "Origin",
    "SpanBatch",
    "check_names",
    "decode",
    "encode",
    "pool",
]

MAX_BATCH_BYTES = 64 * 2**20
_FIXED = struct.Struct("<4sHHI")
_MAGIC, _VERSION = b"MYSP", 1
MAX_NAMES, _MAX_NAME_CHARACTERS = 1024, 64


class BatchError(ValueError):
    """Raised for bytes that are not a valid batch; the text gives the reason."""


@dataclass(frozen=True)
class Origin:
    """Identity of a batch. A batch that is resent keeps it, so that a receiver can drop duplicates."""

    sender: str
    """Unique id of the sender."""
    number: int
    """Sequence number, ascending per sender."""
    part: int = 0
    """Number of the part, if the batch is sent in several parts."""

    @property
    def place(self) -> tuple[int, int]:
        """Order of the batch among its sender's batches."""
        return self.number, self.part


@dataclass(frozen=True)
class SpanBatch:
    """Spans that a node sends at once."""

    node: int
    attempt: int
    names: tuple[str, ...]
    records: Records
    """Spans; ``start_ns`` counts from the epoch by the cluster's reference clock."""
    num_dropped: int = 0
    """Number of spans lost since the previous batch."""
    clock_error_seconds: float = 0.0
    """Maximum error of ``start_ns`` relative to other nodes."""
    origin: Origin | None = None
    """Identity of the batch; ``None`` if duplicates need no detection."""


def encode(batch: SpanBatch) -> bytes:
    """Return the batch as bytes."""
    head_facts = {
        "node": batch.node,
        "attempt": batch.attempt,
        "names": list(batch.names),
        "num_dropped": batch.num_dropped,
        "clock_error_seconds": batch.clock_error_seconds,
    }
    if batch.origin is not None:
        head_facts["origin"] = [batch.origin.sender, *batch.origin.place]
    head = json.dumps(head_facts).encode()
    records = np.ascontiguousarray(batch.records, dtype=RECORD).tobytes()
    return _FIXED.pack(_MAGIC, _VERSION, len(head), len(records)) + head + records


def decode(data: bytes | memoryview) -> SpanBatch:
    """Decode a batch, whose records share the memory of ``data``. Raises `BatchError`."""
    if len(data) < _FIXED.size or len(data) > MAX_BATCH_BYTES:
        raise BatchError(f"{len(data)} bytes: must be between {_FIXED.size} and {MAX_BATCH_BYTES}")
    magic, version, head_bytes, record_bytes = _FIXED.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise BatchError(f"begins with {magic!r} {version}: must be {_MAGIC!r} {_VERSION}")
    if len(data) != _FIXED.size + head_bytes + record_bytes or record_bytes % RECORD_BYTES:
        raise BatchError("its length differs from the length in its head")
    records = np.frombuffer(data, RECORD, offset=_FIXED.size + head_bytes)
    batch = _batch_from_head(bytes(data[_FIXED.size : _FIXED.size + head_bytes]), records)
    if len(records) and not (records["name"].min() >= 0 and records["name"].max() < len(batch.names)):
        raise BatchError("a span has a name that is not in the head")
    if len(records) and (records["duration_ns"].min() < 0 or records["rank"].min() < 0):
        raise BatchError("a span has a negative rank or duration")
    return batch


def check_names(names: Sequence[object]) -> None:
    """Check a list of span names. Raises `BatchError`."""
    if not all(isinstance(name, str) for name in names):
        raise BatchError("names: must be a list of texts")
    if len(names) > MAX_NAMES or any(len(str(name)) > _MAX_NAME_CHARACTERS for name in names):
        raise BatchError(
            f"names: must be at most {MAX_NAMES}, each of at most {_MAX_NAME_CHARACTERS} characters"
        )


def _batch_from_head(text: bytes, records: Records) -> SpanBatch:
    try:
        head = json.loads(text)
        names = head["names"]
        if not isinstance(names, list):
            raise BatchError("names: must be a list of texts")
        check_names(names)
        node, attempt, dropped = (int(head[key]) for key in ("node", "attempt", "num_dropped"))
        error = float(head["clock_error_seconds"])
        if dropped < 0 or not 0 <= error < math.inf:
            raise BatchError("num_dropped and clock_error_seconds: must be at least 0")
        origin = None if head.get("origin") is None else _origin(head["origin"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as problem:
        if isinstance(problem, BatchError):
            raise
        raise BatchError(f"its head cannot be read: {problem!r}") from None
    return SpanBatch(node, attempt, tuple(names), records, dropped, error, origin)


def _origin(value: object) -> Origin:
    match value:
        case [str(sender), int(number), int(part)] if len(sender) <= _MAX_NAME_CHARACTERS:
            return Origin(sender, number, part)
    raise BatchError("origin: must be sender, number and part")


def pool(batches: Sequence[SpanBatch]) -> SpanBatch:
    """Merge batches of one node and attempt.

    A span counts as dropped if its name has no number or exceeds the limit of names. The clock error is the
    largest of the batches.
    """
    numbers: dict[str, int] = {}
    parts = [_renumbered(batch, numbers) for batch in batches]
    records = np.concatenate(parts) if parts else np.zeros(0, RECORD)
    lost = sum(len(batch.records) for batch in batches) - len(records)
    return SpanBatch(
        batches[0].node,
        batches[0].attempt,
        tuple(numbers),
        records,
        lost + sum(batch.num_dropped for batch in batches),
        max(batch.clock_error_seconds for batch in batches),
    )


def _renumbered(batch: SpanBatch, numbers: dict[str, int]) -> Records:
    records = batch.records
    known = (records["name"] >= 0) & (records["name"] < len(batch.names))
    if not known.all():
        records = records[known]
    if batch.names == tuple(numbers):
        return records
    to = np.fromiter(_number_names(batch.names, numbers), np.int16, len(batch.names))
    if np.array_equal(to, np.arange(len(to))):
        return records
    names = to[records["name"]]
    records = records.copy()
    records["name"] = names
    return records[names >= 0]


def _number_names(names: Iterable[str], numbers: dict[str, int]) -> Iterable[int]:
    for name in names:
        full = name not in numbers and len(numbers) >= MAX_NAMES
        yield -1 if full else numbers.setdefault(name, len(numbers))
