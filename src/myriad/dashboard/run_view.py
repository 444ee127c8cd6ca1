"""Read a run's folder once: its state, its newest steps, and the findings from their spans. It never writes.
It works while the run trains, after it has stopped, and if files are missing.

While the run writes files, the folder is read repeatedly: `SpanFolder` reads each span file once and keeps it
while its steps are needed. For a run with many ranks, fewer steps are read. Incomplete files are skipped and
counted.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from myriad.comm.attempt_layout import AttemptLayout
from myriad.dashboard.insight.findings import SpanAnalysis
from myriad.dashboard.node_measurements import GpuSample, GpuSampleReader
from myriad.errors import MyriadError
from myriad.run import Run
from myriad.run.run_lines import EventLines, StepCount, StepLines, count_steps
from myriad.run.run_speed import Peaks, Speed, run_speed
from myriad.run.run_status import State, is_at_work, run_state, state_sentence
from myriad.system.jsonl import Record, late_events
from myriad.telemetry.span_io.span_batch import BatchError, SpanBatch
from myriad.telemetry.span_io.span_files import FileFacts, read_facts, read_span_file, span_files
from myriad.telemetry.span_io.span_records import RECORD, Records

if TYPE_CHECKING:
    from myriad.job import Job

__all__ = ["RunReader", "RunView", "attempt_of"]


@dataclass(frozen=True)
class NewestSpans:
    """Spans of the newest steps of the newest attempt."""

    records: Records
    names: tuple[str, ...]
    attempt: int = 0
    num_dropped: int = 0
    """Number of lost spans according to all files that were read."""
    num_unreadable: int = 0
    """Number of files that cannot be read."""
    clock_error_seconds: float = 0.0


@dataclass
class SpanFolder:
    """The folder ``RUN/spans`` of a run."""

    folder: Path
    most_steps: int = 50
    most_spans: int = 3_000_000
    _facts: dict[Path, FileFacts | None] = field(default_factory=dict)
    """Facts of each file; ``None`` if it cannot be read."""
    _batches: dict[Path, SpanBatch] = field(default_factory=dict)

    def newest(self) -> NewestSpans:
        """Read new files and return the newest spans."""
        paths = [path for path in span_files(self.folder) if not path.is_symlink()]
        self._facts = {path: self._facts_of(path) for path in paths}
        known = [one for one in self._facts.values() if one is not None and one.num_spans]
        unreadable = sum(one is None for one in self._facts.values())
        if not known:
            return NewestSpans(np.zeros(0, RECORD), (), num_unreadable=unreadable)
        attempt = max(one.attempt for one in known)
        wanted = self._wanted([one for one in known if one.attempt == attempt])
        return self._read(wanted, attempt, unreadable)

    def _facts_of(self, path: Path) -> FileFacts | None:
        if self._facts.get(path) is None:
            try:
                return read_facts(path)
            except (BatchError, OSError, ImportError):
                return None
        return self._facts[path]

    def _wanted(self, facts: list[FileFacts]) -> list[tuple[FileFacts, int]]:
        """Return files, newest first within the memory limit, each with the first step to read."""
        last = max(one.last_step for one in facts)
        first = last - self.most_steps + 1
        facts = sorted((one for one in facts if one.last_step >= first), key=lambda one: -one.last_step)
        spans = 0
        for one in facts:
            spans += one.num_spans
            if spans > self.most_spans and one.last_step < last - 2:
                first = max(first, one.last_step + 1)
                break
        return [(one, first) for one in facts if one.last_step >= first]

    def _read(self, wanted: list[tuple[FileFacts, int]], attempt: int, unreadable: int) -> NewestSpans:
        kept: dict[Path, SpanBatch] = {}
        numbers: dict[str, int] = {}
        parts: list[Records] = []
        for one, first in wanted:
            batch = self._batches.get(one.path) or self._batch(one.path)
            if batch is None:
                unreadable += 1
                continue
            kept[one.path] = batch
            codes = [numbers.setdefault(name, len(numbers)) for name in batch.names]
            records = batch.records[batch.records["step"] >= first]
            names: npt.NDArray[np.int16] = records["name"]
            records["name"] = np.array(codes, dtype=np.int16)[names] if codes else 0
            parts.append(records)
        self._batches = kept
        return NewestSpans(
            np.concatenate(parts) if parts else np.zeros(0, RECORD),
            tuple(numbers),
            attempt,
            sum(one.num_dropped for one in self._facts.values() if one is not None),
            unreadable,
            max((one.clock_error_seconds for one, _ in wanted), default=0.0),
        )

    @staticmethod
    def _batch(path: Path) -> SpanBatch | None:
        try:
            return read_span_file(path)
        except (BatchError, OSError):
            return None


_RECENT_STEPS = 20
_TIMED_STEPS = 10_000
"""Newest lines whose step times go with the spans."""


def attempt_of(job: "Job", events: Sequence[Record]) -> "Job":
    """Return the job in the layout of its newest attempt. A run that an operator resumes has the original
    job."""
    started: Record | None = None
    for event in reversed(events):
        name = event.get("event")
        if name == "start" and started is None:
            started = event
        elif name in ("interrupted", "finish") and started is not None:
            return job
        elif name == "restart":
            changed = AttemptLayout(event.get("dp"), tuple(event.get("shares") or ()), event.get("partition"))
            try:
                found = job.in_attempt(changed)
            except (MyriadError, TypeError, ValueError):
                return job
            is_it = started is None or started.get("world", found.layout.world) == found.layout.world
            return found if is_it else job
    return job


@dataclass(frozen=True)
class RunView:
    """The state of a run at one time."""

    run: Run
    job: "Job"
    """Job in the layout of the newest attempt."""
    metrics: Sequence[Record]
    events: Sequence[Record]
    spans: NewestSpans
    held: bool
    now: float
    at_work: bool | None = None
    """Whether a process trains the run, on this or another machine; see `is_at_work`."""
    num_wrong_lines: int = 0
    """Number of lines of metrics.jsonl and events.jsonl that are torn, wrong or have a wrong figure."""
    no_room_at: float = 0.0
    """Time of rank 0's last failed attempt to add a line; 0 if the last attempt succeeded."""
    gpus: Mapping[int, GpuSample] = field(default_factory=dict)
    """Last measurements of each node's accelerators."""

    @cached_property
    def steps(self) -> StepCount:
        """Number of steps done and of steps without a line."""
        return count_steps(self.metrics, self.events)

    @property
    def step(self) -> int:
        """Number of steps done."""
        return self.steps.done

    def _recent(self, key: str) -> float | None:
        values = [line.get(key) for line in self.metrics[-_RECENT_STEPS:]]
        known = [float(value) for value in values if isinstance(value, int | float)]
        return median(known) if known else None

    @property
    def step_seconds(self) -> float:
        """Median seconds of the newest steps; 0 if unknown."""
        return self._recent("step_seconds") or 0.0

    @cached_property
    def speed(self) -> Speed | None:
        """Speed of the newest attempt; ``None`` if it has no step."""
        return run_speed(self.metrics, self.peaks)

    @property
    def mfu(self) -> float | None:
        """MFU of the newest attempt, relative to the currently known peak."""
        return self.speed.mfu if self.speed else None

    @cached_property
    def peaks(self) -> Peaks:
        """Peak FLOP/s for the MFU of each step."""
        return Peaks(self.events)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of the newest attempt."""
        return self.speed.tokens_per_second if self.speed else None

    @property
    def loss(self) -> float | None:
        """Loss of the newest step."""
        found = self.metrics[-1].get("loss") if self.metrics else None
        return float(found) if isinstance(found, int | float) else None

    @cached_property
    def num_overflows(self) -> int:
        """Number of steps skipped because gradients overflowed float16."""
        return sum(line.get("overflow") == 1 for line in self.metrics)

    @cached_property
    def start(self) -> Record:
        """The start event of the newest attempt; empty if there is none."""
        return next((one for one in reversed(self.events) if one.get("event") == "start"), {})

    @property
    def peak_flops(self) -> float | None:
        """Peak FLOP/s of all ranks together. The known peak may rise as the run trains."""
        return self.peaks.flops_per_second

    @property
    def quiet_seconds(self) -> float:
        """Seconds since the newest step, event or span; 0 if there is none."""
        return self._quiet_seconds or 0.0

    @cached_property
    def _quiet_seconds(self) -> float | None:
        times = [one.get("time") for one in (*self.metrics[-1:], *self.events[-1:])]
        newest = max((float(at) for at in times if isinstance(at, int | float)), default=0.0)
        records = self.spans.records
        if len(records):
            newest = max(newest, float((records["start_ns"] + records["duration_ns"]).max()) * 1e-9)
        return max(0.0, self.now - max(newest, self.no_room_at)) if newest else None

    @property
    def state(self) -> State:
        """State of the run in a word."""
        return run_state(
            self.events,
            steps=self.step,
            planned=self.job.train.steps,
            quiet_seconds=self._quiet_seconds,
            step_seconds=self.step_seconds,
            held=self.held,
            at_work=self.at_work,
        )

    @cached_property
    def findings(self) -> SpanAnalysis:
        """Findings from the spans."""
        timed = {int(line["step"]): line.get("step_seconds") for line in self.metrics[-_TIMED_STEPS:]}
        return SpanAnalysis(self.spans.records, self.spans.names, self.job, self.speed, timed)

    @property
    def sentence(self) -> str:
        """State of the run in a sentence, with the first problem."""
        steps = self.job.train.steps
        sentence = state_sentence(self.state, self.step, steps, self.step_seconds, self.quiet_seconds)
        if self.state == "hangs" and self.findings.hang is not None:
            return f"{sentence}; {self.findings.hang.sentence}"
        wrong = [one.sentence for one in self.findings.suspects[:1]]
        if self.no_room_at:
            sentence += f"; {self.run.metrics_path} takes no lines since then: make room there"
        return "; ".join([sentence, *wrong])


class RunReader:
    """Follows a run's folder and reads only new data. Raises `BadInputError` if there is no run."""

    def __init__(self, run: Run, most_steps: int = 50) -> None:
        self.run, self._job = run, run.job()
        self._spans = SpanFolder(run.spans_path, most_steps)
        self._steps, self._events_tail = StepLines(run.metrics_path), EventLines(run.events_path)
        self._events: list[Record] = []
        self._gpus = GpuSampleReader(run.counters_path)

    def read(self) -> RunView:
        """Read new data and return the current state."""
        self._steps.poll()
        events = self._events_tail.poll()
        self._events = late_events(self._events + events)
        if any(event.get("event") == "start" for event in events):
            with suppress(MyriadError, OSError):
                self._job = self.run.job()  # it may have been changed when the run was resumed
        job = attempt_of(self._job, self._events)
        spans, held = self._spans.newest(), self.run.is_locked
        steps = self._steps
        return RunView(
            self.run,
            job,
            steps.lines,
            self._events,
            spans,
            held,
            time.time(),
            is_at_work(self.run),
            steps.num_wrong + self._events_tail.num_wrong,
            steps.no_room_at,
            self._gpus.newest(),
        )
