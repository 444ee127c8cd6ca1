"""Each rank's newest spans, in memory that its node shares: one ring a rank.

    0        8          16        24    32      40           4096            8192
    version  capacity   written   pid   attempt num_names    names, 64 each  records, 32 bytes each

A rank writes with plain stores, a record first and ``written`` after it: no lock, no system call, no list
that grows. Full, the ring drops the oldest. Whoever reads (one thread, of the node's executor or of the rank)
keeps to itself how far it has come, and counts what was gone before it came. A rank finds its ring by
MYRIAD_SPANS = DESCRIPTOR:ROW:CAPACITY; without that it has one of its own.
"""

import mmap
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from myriad.telemetry.records import Records

__all__ = ["SPANS", "Drained", "SpanRing", "SpanRings", "own_ring", "ring_at"]

SPANS = "MYRIAD_SPANS"
DEFAULT_CAPACITY = 1 << 14
"""Spans: some ten seconds of a rank that makes a thousand a second."""
HEADER_BYTES = 8192
_NAMES_AT, _NAME_BYTES = 4096, 64
_RECORD_BYTES = 32
MAX_NAMES = (HEADER_BYTES - _NAMES_AT) // _NAME_BYTES
OTHER_NAME = "other"
"""What spans are called whose names found no place."""
_VERSION = 1
_VERSION_WORD, _CAPACITY, _WRITTEN, _PID, _ATTEMPT, _NUM_NAMES = range(6)


def _bytes_of(capacity: int) -> int:
    return HEADER_BYTES + capacity * _RECORD_BYTES


class SpanRing:
    """The writer's side."""

    def __init__(self, memory: memoryview, capacity: int) -> None:
        """``memory``: of a ring of ``capacity`` spans, as bytes."""
        self._bytes = memory
        self.words = memory.cast("q")
        """Of header and records; `myriad.telemetry.spans` writes them."""
        self.first = HEADER_BYTES // 8
        self.end = self.first + capacity * (_RECORD_BYTES // 8)
        self.capacity = capacity
        self._names: dict[str, int] = {}

    @staticmethod
    def of_its_own(capacity: int = DEFAULT_CAPACITY) -> "SpanRing":
        """One that this process alone sees."""
        ring = SpanRing(memoryview(bytearray(_bytes_of(capacity))), capacity)
        ring.begin(0)
        return ring

    def begin(self, attempt: int) -> None:
        """Forgets what an earlier process wrote here."""
        self.words[_WRITTEN] = self.words[_NUM_NAMES] = 0
        self._names.clear()
        self.words[_VERSION_WORD], self.words[_CAPACITY] = _VERSION, self.capacity
        self.words[_PID], self.words[_ATTEMPT] = os.getpid(), attempt
        self.index_of(OTHER_NAME)

    def index_of(self, name: str) -> int:
        """Of a span's name; the text is there before a record that needs it."""
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
        """Spans, since it was begun."""
        return self.words[_WRITTEN]

    def since(self, read: int) -> "tuple[Drained, int]":
        """What was written after so many, for this process itself, and how many there are now."""
        return _drain(self._bytes, self.capacity, read)

    def newest(self) -> "Drained":
        """All that is in it, for this process itself."""
        return _drain(self._bytes, self.capacity, 0)[0]


@dataclass(frozen=True)
class Drained:
    """What a ring gave since the look before."""

    records: "Records"
    """In order of their ends; ``start_ns`` from the epoch, by this machine's clock."""
    names: tuple[str, ...]
    num_dropped: int
    pid: int
    attempt: int


class SpanRings:
    """Those of a node: anonymous memory with a descriptor, which processes inherit; gone with the last."""

    def __init__(self, num_ranks: int, capacity: int = DEFAULT_CAPACITY) -> None:
        """``capacity``: spans of each rank, a multiple of 128: rings are whole pages."""
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
        """For a rank that is about to start: what was not drained is gone."""
        self._rings[row][:HEADER_BYTES] = bytes(HEADER_BYTES)
        self._read[row] = 0

    def drain(self, row: int) -> Drained:
        """What a rank has written since the last look; also when it is dead."""
        found, self._read[row] = _drain(self._rings[row], self.capacity, self._read[row])
        return found


def _drain(ring: memoryview, capacity: int, read: int) -> tuple[Drained, int]:
    """From span number ``read`` on; and the number of the next one."""
    import numpy as np

    from myriad.telemetry.records import RECORD

    words = np.frombuffer(ring, np.int64, _NAMES_AT // 8)
    if words[_VERSION_WORD] != _VERSION:
        return Drained(np.zeros(0, RECORD), (), 0, 0, 0), 0
    written = int(words[_WRITTEN])
    first = max(read, written - capacity)
    records = np.frombuffer(ring, RECORD, capacity, HEADER_BYTES)
    found = records.take(np.arange(first, written), mode="wrap")
    overwritten = max(0, int(words[_WRITTEN]) + 1 - capacity - first)
    found = found[overwritten:]  # while they were copied; one may have been under way
    found["start_ns"] += _epoch_ns()
    num_dropped = first + min(overwritten, written - first) - read
    names = _names(ring, int(words[_NUM_NAMES]))
    return Drained(found, names, num_dropped, int(words[_PID]), int(words[_ATTEMPT])), written


def _epoch_ns() -> int:
    """Of the monotonic clock's 0. The quickest of a few looks: who is stopped between two clocks would move
    all spans of a drain by as long as that."""
    looks = [(time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(5)]
    before, now, after = min(looks, key=lambda look: look[2] - look[0])
    return now - (before + after) // 2


def _names(ring: memoryview, number: int) -> tuple[str, ...]:
    starts = range(_NAMES_AT, _NAMES_AT + min(number, MAX_NAMES) * _NAME_BYTES, _NAME_BYTES)
    texts = (bytes(ring[at : at + _NAME_BYTES]) for at in starts)
    return tuple(text.rstrip(b"\0").decode(errors="replace") for text in texts)


def own_ring() -> SpanRing:
    """This process's, begun anew."""
    address, attempt = os.environ.get(SPANS, ""), int(os.environ.get("MYRIAD_EPOCH", "0"))
    return ring_at(address, attempt) if address else SpanRing.of_its_own()


def ring_at(address: str, attempt: int) -> SpanRing:
    """The one at `SpanRings.address`, begun anew."""
    descriptor, row, capacity = map(int, address.split(":"))
    size = _bytes_of(capacity)
    ring = SpanRing(memoryview(mmap.mmap(descriptor, size, offset=row * size)), capacity)
    ring.begin(attempt)
    return ring
