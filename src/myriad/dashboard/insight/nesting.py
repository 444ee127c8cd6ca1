"""Spans inside spans: whose time is whose.

    forward      [0 ........................ 9]        total 9, own 6
    tensor_comm         [3 .. 5]     [7 . 8]           total 2 and 1, own the same

Of one rank, a span that ends before the latest end so far lies inside of one; any other begins, at the
earliest, where that one ended (clocks of spans differ by microseconds). So no nanosecond counts twice: own
times of a rank and its idle time are its wall time, in whole nanoseconds. One pass for each level of nesting,
all ranks at once.
"""

from dataclasses import dataclass

import numpy as np

from myriad.dashboard.insight.ranks import Array
from myriad.telemetry.records import RECORD, Records

__all__ = ["Nested", "nested"]

_CLOSE_NS = 500
"""By which spans may seem to overlap, or to stand out of the one around them: a start as float64 seconds
since the epoch is rounded by 240 ns."""


@dataclass(frozen=True)
class Nested:
    """Spans by rank, then by start, the outer one first. All in nanoseconds."""

    records: Records
    start: Array
    """Where a span before it overlapped: the end of that one."""
    end: Array
    parent: Array
    """Index of the span around it; -1: none."""
    own: Array
    """Its length without what lies in it."""

    @property
    def total(self) -> Array:
        """Its length."""
        return self.end - self.start


def nested(records: Records) -> Nested:
    """Of any records, in any order."""
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
    """Sorted; with starts and ends on one axis on which the ranks follow each other, and what is to be added
    to come back from there."""
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
    """Of spans that began together: those of no length came first (a device's clock is coarse), then the one
    that holds the others."""
    return np.where(duration <= _CLOSE_NS, np.iinfo(np.int64).min, -duration)


def _levels(start: Array, end: Array) -> tuple[Array, Array]:
    """Starts where nothing overlaps, and the span around each; both arrays are set to fit."""
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
    """Of spans of one level: the latest end before each, and whether it lies in none of them."""
    before = np.empty_like(end)
    before[0] = start[0]
    np.maximum.accumulate(end[:-1], out=before[1:])
    before -= _CLOSE_NS
    outer = start >= before
    before += 2 * _CLOSE_NS
    outer |= end > before
    before -= _CLOSE_NS
    return before, outer
