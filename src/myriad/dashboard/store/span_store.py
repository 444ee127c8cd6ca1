"""The newest spans of a run, in bounded memory, and for every step what each rank spent on each phase.

    batch ──► refused whole, or ──► columns of its step ──► timeline
                               └──► seconds [phase, rank] of its step ──► heat map (never looks at spans)

When memory is full the oldest step's spans go first, its sums much later; both are counted. A step that is
done again by a newer attempt replaces what the older one left of it. A store is of one layout: where ranks
have got other places in the grid, spans from before are left out, and another store is begun.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from myriad.dashboard.store.names import NameTable
from myriad.dashboard.store.once import Once
from myriad.dashboard.store.own_seconds import OwnSeconds, joined
from myriad.dashboard.store.step_block import COLUMNS, Columns, StepBlock
from myriad.telemetry.batch import BatchError, SpanBatch
from myriad.telemetry.records import Records

__all__ = ["BeyondJobError", "Counts", "SpanStore"]

Array = npt.NDArray[Any]
_DAY_NS = 86_400 * 10**9
_SPANS_SHARE = 0.75
"""Of the memory; the rest is for sums, which are kept longer."""


@dataclass
class Counts:
    """What became of spans, since the start."""

    kept: int = 0
    lost_before: int = 0
    """That their senders had lost."""
    too_old: int = 0
    """Of steps that memory does not reach back to, or of an attempt that was replaced."""
    refused_batches: int = 0
    repeated_batches: int = 0
    """That were sent again: taken once."""
    refused_files: int = 0
    flooded_batches: int = 0
    dropped_steps: int = 0
    """Whose spans made room for newer ones."""
    problems: list[str] = field(default_factory=list)
    """The last few, in words."""
    num_told: int = 0

    def tell(self, problem: str) -> None:
        """Keeps the newest; one that comes again and again stands there once."""
        if (text := problem[:300]) not in self.problems[-1:]:
            self.num_told += 1
            self.problems = [*self.problems, text][-20:]


class BeyondJobError(BatchError):
    """Of a rank or a step that the job does not have, as it is known here."""


class SpanStore:
    """Any number of threads may add and ask."""

    def __init__(
        self, world: int, last_step: int, memory_bytes: int = 2 * 2**30, *, since_ns: int = 0
    ) -> None:
        """``last_step``: that the job has; a span of a later one is wrong. ``since_ns``: what began earlier
        is of another layout."""
        self.world, self.limit_step, self.memory_bytes = world, last_step, memory_bytes
        self.since_ns, self.generation = since_ns, 0
        """The second: how many stores of other layouts there were before."""
        self.names, self.counts = NameTable(), Counts()
        self.version = 0
        """Grows with every change."""
        self.first_ns: int | None = None
        """Where the timeline begins: the first start of all."""
        self.clock_error_seconds = 0.0
        self.last_end_ns = np.full(world, np.iinfo(np.int64).min, np.int64)
        """Of each rank's newest span, whose name and step are the two below."""
        self.last_name, self.last_step_of = np.full(world, -1, np.int16), np.full(world, -1, np.int32)
        self._blocks: dict[int, StepBlock] = {}
        self._own, self._lock, self._once = OwnSeconds(world), threading.Lock(), Once(world)
        self._oldest_spans, self._oldest_sums = -(2**62), -(2**62)
        self._span_bytes = self._sum_bytes = 0

    def add(self, batch: SpanBatch) -> None:
        """Takes one batch, of a file. Raises `BatchError`: nothing of it was taken."""
        kept = self.of_layout(batch)
        self.check(kept)
        self.counts.too_old += len(batch.records) - len(kept.records)
        self.add_checked([kept], posted=False)

    def of_layout(self, batch: SpanBatch) -> SpanBatch:
        """Without spans that ranks of another layout have left."""
        is_now = batch.records["start_ns"] >= self.since_ns
        return batch if not self.since_ns or is_now.all() else replace(batch, records=batch.records[is_now])

    def followed_by(self, world: int, last_step: int, since_ns: int) -> "SpanStore":
        """An empty one of another layout, that goes on counting."""
        store = SpanStore(world, last_step, self.memory_bytes, since_ns=since_ns)
        store.counts, store.version, store.generation = self.counts, self.version + 1, self.generation + 1
        return store

    def check(self, batch: SpanBatch) -> None:
        """Raises `BatchError` for what no rank of this run can have sent."""
        if not (0 <= batch.node < 2**31 and 0 <= batch.attempt < 2**31):
            raise BatchError("node and attempt: numbers from 0 on")
        if not (0 <= batch.num_dropped < 2**53 and 0 <= batch.clock_error_seconds < 1e6):
            raise BatchError("num_dropped and clock_error_seconds: numbers from 0 on")
        _check(batch.records, self.world, self.limit_step)

    def add_checked(self, batches: Sequence[SpanBatch], *, posted: bool = True) -> None:
        """Many at once: what a batch costs by itself is more than what its spans do. ``posted``: by nodes,
        which may have them in files, too."""
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
        """Steps of a range that are known, ascending."""
        with self._lock:
            items = sorted(self._blocks.items())
        return [
            (step, block)
            for step, block in items
            if (first is None or step >= first) and (last is None or step <= last)
        ]

    def steps(self) -> list[int]:
        """Those with sums, ascending; without what belongs to no step."""
        with self._lock:
            return sorted(step for step in self._blocks if step >= 0)

    def columns(self, block: StepBlock) -> Columns:
        """Spans of a step as they are now."""
        with self._lock:
            return block.columns()

    @property
    def nbytes(self) -> int:
        """Memory held by spans and sums."""
        return self._span_bytes + self._sum_bytes

    def _merged(self, batches: Sequence[SpanBatch]) -> Records:
        """With names as they are numbered here."""
        records = joined([batch.records for batch in batches])
        tables = [self.names.ids(batch.names) for batch in batches]
        offsets = np.cumsum([0, *(len(table) for table in tables[:-1])])
        lengths = [len(batch.records) for batch in batches]
        records["name"] = np.concatenate(tables)[np.repeat(offsets, lengths) + records["name"]]
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
        self.names.see(np.unique(np.flatnonzero(counts) // width))
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
        """``None``: a newer attempt has done it, or it is too long ago."""
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
        """The newest step stays, whatever it takes: a batch is bounded, and so is what follows it."""
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
    """Each step and the places of its spans; ``None``: all."""
    if int(steps.min()) == int(steps.max()):
        yield int(steps[0]), None
        return
    order = np.argsort(steps, kind="stable")
    found, starts = np.unique(steps[order], return_index=True)
    yield from zip(found.tolist(), np.split(order, starts[1:]), strict=True)
