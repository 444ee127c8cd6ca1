"""Nest spans, and compute the own time of each: its duration without its child spans.

    forward      [0 ........................ 9]        total 9, own 6
    tensor_comm         [3 .. 5]     [7 . 8]           total 2 and 1, own the same

A span of a rank that ends before the latest end so far lies inside an earlier span. Any other span begins at
the earliest at that end (clocks of spans differ by microseconds). So no nanosecond counts twice: own times
and idle time add up to a rank's wall time. There is one pass per level of nesting, for all ranks at once."""

from dataclasses import dataclass

import numpy as np

from myriad.dashboard.insight.rank_arrays import Array
from myriad.telemetry.span_io.span_records import RECORD, Records

__all__ = ["Nested", "nested"]

_CLOSE_NS = 500
"""Maximum apparent overlap of spans: a start as float64 seconds since the epoch is rounded by 240 ns."""


@dataclass(frozen=True)
class Nested:
    """Spans by rank, then by start, the outer one first. All in nanoseconds."""

    records: Records
    start: Array
    """Start of each span; the end of the previous span if they overlapped."""
    end: Array
    parent: Array
    """Index of the enclosing span; -1 if there is none."""
    own: Array
    """Duration without the child spans."""

    @property
    def total(self) -> Array:
        """Duration with the child spans."""
        return self.end - self.start


def nested(records: Records) -> Nested:
    """Return the nesting of records in any order."""
    if len(records) == 0:
        none = np.zeros(0, dtype=np.int64)
        return Nested(np.zeros(0, dtype=RECORD), none, none, none, none)
    records, key, end, shift = _in_order(records)
    start, parent = _levels(key, end)
    own = end - start
    inside = np.flatnonzero(parent >= 0)
    if len(inside):
        # Sums of nanoseconds below 2^53 are whole in float64.
        inner = np.bincount(parent[inside], weights=own[inside], minlength=len(records))
        own -= inner.astype(np.int64)
    start += shift
    end += shift
    return Nested(records, start, end, parent, own)


def _in_order(records: Records) -> tuple[Records, Array, Array, Array]:
    """Return the records sorted by rank and start, their starts and ends on one axis on which ranks follow
    each other, and the shift back to nanoseconds."""
    start, duration = (np.ascontiguousarray(records[field]) for field in ("start_ns", "duration_ns"))
    first, width = int(start.min()), int((start + duration).max()) + 1
    shift = first - records["rank"].astype(np.int64) * (width - first)
    key, came = start - shift, None
    if np.any(key[1:] < key[:-1]):
        came = np.argsort(key)
        records, key, duration, shift = records[came], key[came], duration[came], shift[came]
    ties = np.flatnonzero(key[1:] == key[:-1])
    if len(ties):
        tied = np.union1d(ties, ties + 1)
        order = np.lexsort((tied if came is None else came[tied], _turns(duration[tied]), key[tied]))
        if np.any(order[1:] < order[:-1]):
            records = records.copy()
            records[tied], duration[tied] = records[tied[order]], duration[tied[order]]
    duration += key
    return records, key, duration, shift


def _turns(duration: Array) -> Array:
    """Return sort keys for spans that began together: spans without length come first (a device's clock is
    coarse), then parents before their children."""
    return np.where(duration <= _CLOSE_NS, np.iinfo(np.int64).min, -duration)


def _levels(start: Array, end: Array) -> tuple[Array, Array]:
    """Return starts without overlaps, and each span's parent. Both arguments are adjusted in place."""
    parent = np.full(len(start), -1, dtype=np.int64)
    before, outer = _outer(start, end)
    late = np.flatnonzero(outer & (start < before))
    start[late] = before[late]
    end[late] = np.maximum(end[late], before[late])
    inside, tops = np.flatnonzero(~outer), np.flatnonzero(outer)
    turn = np.cumsum(outer, dtype=np.int32)[inside] - 1
    while len(inside):
        around = tops[turn]
        parent[inside] = around
        first, last = start[around], end[around]
        starts = np.clip(start[inside], first, last)
        ends = np.clip(end[inside], starts, last)
        before, outer = _outer(starts, ends)
        starts[outer] = np.maximum(starts[outer], before[outer])
        np.maximum(ends, starts, out=ends)
        start[inside], end[inside] = starts, ends
        tops = inside[outer]
        inside, turn = inside[~outer], np.cumsum(outer, dtype=np.int32)[~outer] - 1
    return start, parent


def _outer(start: Array, end: Array) -> tuple[Array, Array]:
    """Return, for spans of one level, the latest end before each, and whether each lies in no other span."""
    before = np.empty_like(end)
    before[0] = start[0]
    np.maximum.accumulate(end[:-1], out=before[1:])
    before -= _CLOSE_NS
    outer = start >= before
    before += 2 * _CLOSE_NS
    outer |= end > before
    before -= _CLOSE_NS
    return before, outer
