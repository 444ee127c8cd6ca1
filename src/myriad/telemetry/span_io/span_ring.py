"""Keep each rank's newest spans in memory shared by the node: one ring per rank.

    0        8          16        24    32      40           4096            8192
    version  capacity   written   pid   attempt num_names    names, 64 each  records, 32 bytes each

A rank writes with plain stores, the record first and ``written`` after it: no lock, no system call, no
growing list. A full ring overwrites the oldest spans. The reader (one thread, of the node agent or of the
rank) keeps its own position, and counts the spans that were overwritten before it read them. MYRIAD_SPANS =
DESCRIPTOR:ROW:CAPACITY names a rank's ring; without it the rank uses a private one."""

import mmap
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from myriad.telemetry.span_io.span_records import Records

__all__ = ["SPANS", "Drained", "SpanRing", "SpanRings", "own_ring", "ring_at"]

SPANS = "MYRIAD_SPANS"
DEFAULT_CAPACITY = 1 << 14
"""Spans per ring: over ten seconds of a rank that records a thousand per second."""
HEADER_BYTES = 8192
_NAMES_AT, _NAME_BYTES = 4096, 64
_RECORD_BYTES = 32
MAX_NAMES = (HEADER_BYTES - _NAMES_AT) // _NAME_BYTES
OTHER_NAME = "other"
"""Name of spans whose own names do not fit into the table of names."""
_VERSION = 1
_VERSION_WORD, _CAPACITY, _WRITTEN, _PID, _ATTEMPT, _NUM_NAMES = range(6)


def _bytes_of(capacity: int) -> int:
    return HEADER_BYTES + capacity * _RECORD_BYTES


class SpanRing:
    """The ring as its writer sees it."""

    def __init__(self, memory: memoryview, capacity: int) -> None:
        """Use ``memory``, the bytes of a ring of ``capacity`` spans."""
        self._bytes = memory
        self.words = memory.cast("q")
        """64-bit words of header and records; `myriad.telemetry.spans` writes them."""
        self.first = HEADER_BYTES // 8
        self.end = self.first + capacity * (_RECORD_BYTES // 8)
        self.capacity = capacity
        self._names: dict[str, int] = {}

    @staticmethod
    def of_its_own(capacity: int = DEFAULT_CAPACITY) -> "SpanRing":
        """Return a ring in private memory of this process."""
        ring = SpanRing(memoryview(bytearray(_bytes_of(capacity))), capacity)
        ring.begin(0)
        return ring

    def begin(self, attempt: int) -> None:
        """Clear the ring of an earlier process's spans and names, and set its header for ``attempt``."""
        self.words[_WRITTEN] = self.words[_NUM_NAMES] = 0
        self._names.clear()
        self.words[_VERSION_WORD], self.words[_CAPACITY] = _VERSION, self.capacity
        self.words[_PID], self.words[_ATTEMPT] = os.getpid(), attempt
        self.index_of(OTHER_NAME)

    def index_of(self, name: str) -> int:
        """Return the index of a span name. Its text is stored before any record refers to it."""
        if name not in self._names:
            if len(self._names) == MAX_NAMES:
                return 0
            index = len(self._names)
            at = _NAMES_AT + index * _NAME_BYTES
            text = name.encode()[:_NAME_BYTES].decode(errors="ignore").encode()
            self._bytes[at : at + _NAME_BYTES] = text.ljust(_NAME_BYTES, b"\0")
            self.words[_NUM_NAMES] = index + 1
            self._names[name] = index
        return self._names[name]

    @property
    def num_written(self) -> int:
        """Number of spans written since `begin`."""
        return self.words[_WRITTEN]

    def since(self, read: int) -> "tuple[Drained, int]":
        """Return the spans after the first ``read``, and the number written so far. For the writing
        process."""
        return _drain(self._bytes, self.capacity, read)

    def newest(self) -> "Drained":
        """Return all spans in the ring. For the writing process."""
        return _drain(self._bytes, self.capacity, 0)[0]


@dataclass(frozen=True)
class Drained:
    """Spans read from a ring since the previous read."""

    records: "Records"
    """Spans ordered by their ends; ``start_ns`` counts from the epoch by this machine's clock."""
    names: tuple[str, ...]
    num_dropped: int
    pid: int
    attempt: int


class SpanRings:
    """The rings of a node, in anonymous memory. Processes inherit its descriptor; the last one frees it."""

    def __init__(self, num_ranks: int, capacity: int = DEFAULT_CAPACITY) -> None:
        """Allocate the rings. ``capacity`` is spans per rank, a multiple of 128 so that rings are whole
        pages."""
        self.num_ranks, self.capacity, size = num_ranks, capacity, _bytes_of(capacity)
        assert size % mmap.PAGESIZE == 0
        self.descriptor = os.memfd_create("myriad-spans", 0)
        os.ftruncate(self.descriptor, num_ranks * size)
        whole = memoryview(mmap.mmap(self.descriptor, num_ranks * size))
        self._rings = [whole[row * size : (row + 1) * size] for row in range(num_ranks)]
        self._read = [0] * num_ranks

    def address(self, row: int) -> str:
        """The value of `SPANS` for the process that writes a ring."""
        return f"{self.descriptor}:{row}:{self.capacity}"

    def clear(self, row: int) -> None:
        """Clear a ring for a rank that is about to start. Spans not yet drained are lost."""
        self._rings[row][:HEADER_BYTES] = bytes(HEADER_BYTES)
        self._read[row] = 0

    def drain(self, row: int) -> Drained:
        """Return the spans that a rank has written since the last call. It works for a dead rank too."""
        found, self._read[row] = _drain(self._rings[row], self.capacity, self._read[row])
        return found


def _drain(ring: memoryview, capacity: int, read: int) -> tuple[Drained, int]:
    """Return the spans from number ``read`` on, and the number of the next span."""
    import numpy as np

    from myriad.telemetry.span_io.span_records import RECORD

    words = np.frombuffer(ring, np.int64, _NAMES_AT // 8)
    if words[_VERSION_WORD] != _VERSION:
        return Drained(np.zeros(0, RECORD), (), 0, 0, 0), 0
    written = int(words[_WRITTEN])
    first = max(read, written - capacity)
    records = np.frombuffer(ring, RECORD, capacity, HEADER_BYTES)
    found = records.take(np.arange(first, written), mode="wrap")
    overwritten = max(0, int(words[_WRITTEN]) + 1 - capacity - first)
    found = found[overwritten:]  # drop spans overwritten during the copy, including one in progress
    found["start_ns"] += _epoch_ns()
    num_dropped = first + min(overwritten, written - first) - read
    names = _names(ring, int(words[_NUM_NAMES]))
    return Drained(found, names, num_dropped, int(words[_PID]), int(words[_ATTEMPT])), written


def _epoch_ns() -> int:
    """Return the epoch time of the monotonic clock's 0. Use the fastest of several readings: a thread
    preempted between the two clocks would shift all spans of a drain."""
    readings = [(time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(5)]
    before, now, after = min(readings, key=lambda readings: readings[2] - readings[0])
    return now - (before + after) // 2


def _names(ring: memoryview, number: int) -> tuple[str, ...]:
    starts = range(_NAMES_AT, _NAMES_AT + min(number, MAX_NAMES) * _NAME_BYTES, _NAME_BYTES)
    texts = (bytes(ring[at : at + _NAME_BYTES]) for at in starts)
    return tuple(text.rstrip(b"\0").decode(errors="replace") for text in texts)


def own_ring() -> SpanRing:
    """Return this process's ring, cleared for its attempt."""
    address, attempt = os.environ.get(SPANS, ""), int(os.environ.get("MYRIAD_EPOCH", "0"))
    return ring_at(address, attempt) if address else SpanRing.of_its_own()


def ring_at(address: str, attempt: int) -> SpanRing:
    """Return the ring at an address from `SpanRings.address`, cleared for ``attempt``."""
    descriptor, row, capacity = map(int, address.split(":"))
    size = _bytes_of(capacity)
    ring = SpanRing(memoryview(mmap.mmap(descriptor, size, offset=row * size)), capacity)
    ring.begin(attempt)
    return ring
