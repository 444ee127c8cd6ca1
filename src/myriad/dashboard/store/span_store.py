"""The newest spans of a run, in bounded memory, and the seconds of each rank by step and phase.

    batch ──► rejected whole, or ──► columns of its step ──► timeline
                                └──► seconds [phase, rank] of its step ──► heat map (reads no span)

When memory is full, the oldest step's spans are dropped first and its sums much later; both are counted. If a
newer attempt repeats a step, its spans replace those of the older attempt. A store belongs to one layout:
when ranks move in the grid, older spans are left out and a new store starts.

Each span counts once, though it may arrive twice: in a file of the run's folder, and posted by its node. For
each rank, `SpanDeduplicator` knows the time ranges of posted spans and of spans from files; what arrives the
other way within such a range is a duplicate. Files may arrive in any order.

`OwnSeconds` computes the duration of a span without its child spans. A wait is recorded when it ends, before
the span around it, and a batch may end between the two. So spans that may belong to a later parent are kept
until their rank sends more.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from myriad.dashboard.insight.nesting import Nested, nested
from myriad.dashboard.store.step_block import COLUMNS, Columns, NameTable, StepBlock
from myriad.telemetry.span_io.span_batch import BatchError, SpanBatch
from myriad.telemetry.span_io.span_records import RECORD, Records

__all__ = ["BeyondJobError", "Counts", "SpanStore"]

Array = npt.NDArray[Any]

_CARRIED = -1
"""Name of a span that was counted before and is only kept as a possible child."""


@dataclass(frozen=True)
class Timed:
    """Spans ordered by rank and start, with their own seconds."""

    records: Records
    own_seconds: Array


class OwnSeconds:
    """Computes own seconds across batches. It keeps the last spans of each rank."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._carried: Records = np.zeros(0, RECORD)

    def of(self, records: Records, computing: Array) -> Timed:
        """Return the new spans with their own seconds. ``computing``: whether spans of a name may have
        children."""
        ranks_in_batch = np.zeros(self._world, bool)
        ranks_in_batch[records["rank"]] = True
        due = ranks_in_batch[self._carried["rank"]]
        spans = nested(joined([self._carried[due], records]))
        new = spans.records["name"] != _CARRIED
        kept = [self._carried[~due], _open(spans, new, computing[spans.records["name"]] & new, self._world)]
        self._carried = joined(kept)
        return Timed(spans.records[new], (spans.own[new] * 1e-9).astype(np.float32))


def joined(parts: list[Records]) -> Records:
    """Concatenate records, as bytes, which is faster for many small arrays."""
    whole = [np.ascontiguousarray(part).view(np.uint8) for part in parts if len(part)]
    return np.concatenate(whole).view(RECORD) if whole else np.zeros(0, RECORD)


def _open(spans: Nested, new: Array, computes: Array, world: int) -> Records:
    """Return the spans without a parent that begin after their rank's last compute span."""
    ranks = spans.records["rank"]
    computed = np.full(world, np.iinfo(np.int64).min, np.int64)
    np.maximum.at(computed, ranks[computes], spans.end[computes])
    places = np.flatnonzero(new & ~computes & (spans.parent < 0) & (spans.start >= computed[ranks]))
    carried: Records = spans.records[places]
    carried["name"] = _CARRIED
    return carried


_NEVER = np.iinfo(np.int64).max // 2
_ROUNDED_NS = 1_000
"""Maximum rounding error of times in files."""


class _Times:
    """First and last end of the spans of each rank that arrived one way, in ns since the epoch."""

    def __init__(self, world: int) -> None:
        self._first, self._last = np.full(world, _NEVER), np.full(world, -_NEVER)

    def hold(self, ranks: npt.NDArray[Any], ends: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return which of these ends lie in the range of their rank."""
        between: npt.NDArray[Any] = ends >= self._first[ranks] - _ROUNDED_NS
        between &= ends <= self._last[ranks] + _ROUNDED_NS
        return between

    def add(self, ranks: npt.NDArray[Any], ends: npt.NDArray[Any]) -> None:
        """Extend the ranges by these ends."""
        np.minimum.at(self._first, ranks, ends)
        np.maximum.at(self._last, ranks, ends)


class SpanDeduplicator:
    """Finds duplicates among the spans of all ranks."""

    def __init__(self, world: int) -> None:
        self._posted, self._filed = _Times(world), _Times(world)

    def new(self, records: Records, *, posted: bool) -> npt.NDArray[Any]:
        """Return which spans did not arrive the other way before."""
        mine, others = (self._posted, self._filed) if posted else (self._filed, self._posted)
        ranks, ends = records["rank"], records["start_ns"] + records["duration_ns"]
        new = ~others.hold(ranks, ends)
        mine.add(ranks[new], ends[new])
        return new


_DAY_NS = 86_400 * 10**9
_SPANS_SHARE = 0.75
"""Share of the memory for spans; the rest is for sums, which are kept longer."""


@dataclass
class Counts:
    """Counts of kept, lost and rejected spans since the start."""

    kept: int = 0
    lost_before: int = 0
    """Spans that their senders lost."""
    too_old: int = 0
    """Spans of steps that are no longer in memory, or of an attempt that was replaced."""
    refused_batches: int = 0
    repeated_batches: int = 0
    """Batches that were resent and counted once."""
    refused_files: int = 0
    flooded_batches: int = 0
    dropped_steps: int = 0
    """Steps whose spans were dropped for newer ones."""
    problems: list[str] = field(default_factory=list)
    """Texts of the newest problems."""
    num_problems: int = 0

    def add_problem(self, problem: str) -> None:
        """Add a problem to the newest ones. A repeated problem is kept once."""
        if (text := problem[:300]) not in self.problems[-1:]:
            self.num_problems += 1
            self.problems = [*self.problems, text][-20:]


class BeyondJobError(BatchError):
    """Raised for a rank or a step beyond the known job."""


class SpanStore:
    """The spans and sums of one layout. It is thread-safe."""

    def __init__(
        self, world: int, last_step: int, memory_bytes: int = 2 * 2**30, *, since_ns: int = 0
    ) -> None:
        """``last_step``: last step of the job; spans of later steps are rejected. ``since_ns``: spans that
        began earlier belong to another layout."""
        self.world, self.limit_step, self.memory_bytes = world, last_step, memory_bytes
        self.since_ns, self.generation = since_ns, 0
        """``generation``: number of earlier stores, of other layouts."""
        self.names, self.counts = NameTable(), Counts()
        self.version = 0
        """Number that grows with each change."""
        self.first_ns: int | None = None
        """Begin of the timeline: the first start of all spans."""
        self.clock_error_seconds = 0.0
        self.last_end_ns = np.full(world, np.iinfo(np.int64).min, np.int64)
        """End of each rank's newest span, whose name and step are in the next two arrays."""
        self.last_name, self.last_step_of = np.full(world, -1, np.int16), np.full(world, -1, np.int32)
        self._blocks: dict[int, StepBlock] = {}
        self._own, self._lock, self._once = OwnSeconds(world), threading.Lock(), SpanDeduplicator(world)
        self._oldest_spans, self._oldest_sums = -(2**62), -(2**62)
        self._span_bytes = self._sum_bytes = 0

    def add(self, batch: SpanBatch) -> None:
        """Add a batch from a file completely, or raise `BatchError`."""
        kept = self.of_layout(batch)
        self.check(kept)
        self.counts.too_old += len(batch.records) - len(kept.records)
        self.add_checked([kept], posted=False)

    def of_layout(self, batch: SpanBatch) -> SpanBatch:
        """Return the batch without spans of an earlier layout."""
        is_now = batch.records["start_ns"] >= self.since_ns
        return batch if not self.since_ns or is_now.all() else replace(batch, records=batch.records[is_now])

    def followed_by(self, world: int, last_step: int, since_ns: int) -> "SpanStore":
        """Return an empty store for another layout, with the same counts."""
        store = SpanStore(world, last_step, self.memory_bytes, since_ns=since_ns)
        store.counts, store.version, store.generation = self.counts, self.version + 1, self.generation + 1
        return store

    def check(self, batch: SpanBatch) -> None:
        """Raise `BatchError` for a batch that no rank of this run can have sent."""
        if not (0 <= batch.node < 2**31 and 0 <= batch.attempt < 2**31):
            raise BatchError("node and attempt: numbers from 0 on")
        if not (0 <= batch.num_dropped < 2**53 and 0 <= batch.clock_error_seconds < 1e6):
            raise BatchError("num_dropped and clock_error_seconds: numbers from 0 on")
        _check(batch.records, self.world, self.limit_step)

    def add_checked(self, batches: Sequence[SpanBatch], *, posted: bool = True) -> None:
        """Add many checked batches at once, as the cost per batch exceeds that of its spans. ``posted``:
        nodes sent them, and may also write them to files."""
        with self._lock:
            for attempt in sorted({batch.attempt for batch in batches}):
                of_attempt = [batch for batch in batches if batch.attempt == attempt]
                records = self._merged(of_attempt)
                records = records[self._once.new(records, posted=posted)]
                kept = self._add(attempt, records) if len(records) else 0
                self.counts.kept += kept
                self.counts.too_old += len(records) - kept
            self.counts.lost_before += sum(batch.num_dropped for batch in batches)
            errors = (batch.clock_error_seconds for batch in batches)
            self.clock_error_seconds = max(self.clock_error_seconds, *errors)
            self.version += 1

    def blocks(self, first: int | None = None, last: int | None = None) -> list[tuple[int, StepBlock]]:
        """Return the known steps of a range, ascending."""
        with self._lock:
            items = sorted(self._blocks.items())
        return [
            (step, block)
            for step, block in items
            if (first is None or step >= first) and (last is None or step <= last)
        ]

    def steps(self) -> list[int]:
        """Return the steps with sums, ascending, without the spans that belong to no step."""
        with self._lock:
            return sorted(step for step in self._blocks if step >= 0)

    def columns(self, block: StepBlock) -> Columns:
        """Return the current spans of a step."""
        with self._lock:
            return block.columns()

    @property
    def nbytes(self) -> int:
        """Memory held by spans and sums."""
        return self._span_bytes + self._sum_bytes

    def _merged(self, batches: Sequence[SpanBatch]) -> Records:
        """Return the records of the batches with this store's numbers of names."""
        records = joined([batch.records for batch in batches])
        tables = [self.names.ids(batch.names) for batch in batches]
        offsets = np.cumsum([0, *(len(table) for table in tables[:-1])])
        lengths = [len(batch.records) for batch in batches]
        names: npt.NDArray[np.int16] = records["name"]
        records["name"] = np.concatenate(tables)[np.repeat(offsets, lengths) + names]
        return records

    def _add(self, attempt: int, records: Records) -> int:
        first_ns = int(records["start_ns"].min())  # files come newest first
        self.first_ns = first_ns if self.first_ns is None else min(self.first_ns, first_ns)
        timed = self._own.of(records, self.names.computing)
        records, own = timed.records, timed.own_seconds
        spans: Columns = {key: records[key] for key in COLUMNS if key != "duration"}
        spans["duration"] = (records["duration_ns"] * 1e-9).astype(np.float32)
        self._note_last(records)
        kept = 0
        for step, chosen in _by_step(records["step"]):
            part = spans if chosen is None else {key: column[chosen] for key, column in spans.items()}
            kept += self._add_step(step, attempt, part, own if chosen is None else own[chosen])
        self._make_room()
        return kept

    def _add_step(self, step: int, attempt: int, spans: Columns, own: Array) -> int:
        block = self._block(step, attempt)
        if block is None:
            return 0
        before = block.sum_bytes, block.nbytes
        phases, first = self.names.phase_ids(spans["name"]), int(spans["rank"].min())
        width = int(spans["rank"].max()) - first + 1
        num_phases = len(self.names.phases)
        cells = phases * width + (spans["rank"] - first)
        shape, size = (num_phases, width), num_phases * width
        totals, counts = np.bincount(cells, own, size), np.bincount(cells, minlength=size)
        block.add_seconds(first, totals.reshape(shape), counts.reshape(shape))
        self.names.add(np.unique(np.flatnonzero(counts) // width))
        ends = spans["start_ns"] + (spans["duration"] * 1e9).astype(np.int64)
        block.add_ends(spans["rank"], spans["start_ns"], ends)
        has_room = step >= self._oldest_spans
        if has_room:
            block.append(spans)
        sums = block.sum_bytes
        self._sum_bytes += sums - before[0]
        self._span_bytes += block.nbytes - sums - (before[1] - before[0])
        return len(own) if has_room else 0

    def _block(self, step: int, attempt: int) -> StepBlock | None:
        """Return the block of a step; ``None`` if a newer attempt replaced it, or it is too old."""
        block = self._blocks.get(step)
        if step < self._oldest_sums or (block is not None and attempt < block.attempt):
            return None
        if block is None or attempt > block.attempt:
            self._forget(block)
            block = self._blocks[step] = StepBlock(self.world, attempt)
            self._sum_bytes += block.sum_bytes
            if (before := self._blocks.get(step - 2)) is not None:
                old = before.nbytes
                before.trim()
                self._span_bytes += before.nbytes - old
        return block

    def _forget(self, block: StepBlock | None) -> None:
        if block is not None:
            self._sum_bytes -= block.sum_bytes
            self._span_bytes -= block.nbytes - block.sum_bytes

    def _make_room(self) -> None:
        """Drop the oldest spans and sums beyond the memory limit, but keep the newest step."""
        spans_limit = int(self.memory_bytes * _SPANS_SHARE)
        while self._span_bytes > spans_limit:
            oldest = min(step for step, block in self._blocks.items() if block.count)
            block = self._blocks[oldest]
            before = block.nbytes
            block.drop_spans()
            self._span_bytes += block.nbytes - before
            self._oldest_spans = max(self._oldest_spans, oldest + 1)
            self.counts.dropped_steps += 1
        while self._sum_bytes > self.memory_bytes - spans_limit and len(self._blocks) > 1:
            oldest = min(self._blocks)
            self._forget(self._blocks.pop(oldest))
            self._oldest_sums = self._oldest_spans = max(self._oldest_spans, oldest + 1)

    def _note_last(self, records: Records) -> None:
        ranks, ends = records["rank"], records["start_ns"] + records["duration_ns"]
        np.maximum.at(self.last_end_ns, ranks, ends)
        newest = ends == self.last_end_ns[ranks]
        self.last_name[ranks[newest]] = records["name"][newest]
        self.last_step_of[ranks[newest]] = records["step"][newest]


def _check(records: Records, world: int, last_step: int) -> None:
    if not len(records):
        return
    ranks, steps, starts = records["rank"], records["step"], records["start_ns"]
    if int(ranks.max()) >= world or int(ranks.min()) < 0:
        raise BeyondJobError(f"rank {int(ranks.max())}: the run has {world} ranks")
    if int(steps.max()) > last_step or int(steps.min()) < -1:
        wrong = int(steps.max()) if int(steps.max()) > last_step else int(steps.min())
        raise BeyondJobError(f"step {wrong}: between 0 and {last_step}, or -1 for none")
    if int(starts.min()) <= 0 or int(starts.max()) > time.time_ns() + _DAY_NS:
        raise BatchError("a span begins before 1970 or after tomorrow")
    if int(records["duration_ns"].max()) > 365 * _DAY_NS:
        raise BatchError("a span lasts longer than a year")


def _by_step(steps: Array) -> Iterator[tuple[int, Array | None]]:
    """Yield each step and the indices of its spans; ``None`` for all spans."""
    if int(steps.min()) == int(steps.max()):
        yield int(steps[0]), None
        return
    order = np.argsort(steps, kind="stable")
    found, starts = np.unique(steps[order], return_index=True)
    yield from zip(found.tolist(), np.split(order, starts[1:]), strict=True)
