"""A look at a run's folder: its state, its newest steps, and what their spans say. Only reads, as often as
one likes; works while the run trains, when it has stopped, and when half of it is gone."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING

from myriad.comm.attempt_layout import AttemptLayout
from myriad.dashboard.at_work import is_at_work
from myriad.dashboard.gpu_looks import GpuLook, GpuLooks
from myriad.dashboard.insight.findings import Findings
from myriad.dashboard.insight.state import State, run_state, state_sentence
from myriad.dashboard.run_spans import NewestSpans, SpanFolder
from myriad.errors import MyriadError
from myriad.jsonl import Record, late_events
from myriad.run import Run
from myriad.run_lines import EventLines, Peaks, StepCount, StepLines, count_steps

if TYPE_CHECKING:
    from myriad.job import Job

__all__ = ["Look", "RunWatch", "attempt_of"]

_RECENT_STEPS = 20


def attempt_of(job: "Job", events: Sequence[Record]) -> "Job":
    """The job as its newest attempt computes it. What a person starts anew is the job again."""
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
class Look:
    """At one moment."""

    run: Run
    job: "Job"
    """Of the newest attempt."""
    metrics: Sequence[Record]
    events: Sequence[Record]
    spans: NewestSpans
    held: bool
    now: float
    at_work: bool = False
    """Somebody has it, here or on another machine."""
    num_wrong_lines: int = 0
    """Number of lines of metrics.jsonl and events.jsonl that are torn, wrong or have a wrong figure."""
    no_room_at: float = 0.0
    """When rank 0 last tried in vain to add a line; 0: it was not in vain."""
    gpus: Mapping[int, GpuLook] = field(default_factory=dict)
    """What the accelerators of each node measured last."""

    @cached_property
    def steps(self) -> StepCount:
        """Done, and those without a line."""
        return count_steps(self.metrics, self.events)

    @property
    def step(self) -> int:
        """Steps done."""
        return self.steps.done

    def _recent(self, key: str) -> float | None:
        values = [line.get(key) for line in self.metrics[-_RECENT_STEPS:]]
        known = [float(value) for value in values if isinstance(value, int | float)]
        return median(known) if known else None

    @property
    def step_seconds(self) -> float:
        """Median of the newest steps; 0: unknown."""
        return self._recent("step_seconds") or 0.0

    @property
    def mfu(self) -> float | None:
        """Median of the newest steps, by the peak that is known now."""
        known = [mfu for mfu in map(self.peaks.mfu, self.metrics[-_RECENT_STEPS:]) if mfu is not None]
        return median(known) if known else None

    @cached_property
    def peaks(self) -> Peaks:
        """Behind the MFU of each step."""
        return Peaks(self.events)

    @property
    def tokens_per_second(self) -> float | None:
        """Median of the newest steps."""
        return self._recent("tokens_per_second")

    @property
    def loss(self) -> float | None:
        """Of the newest step."""
        found = self.metrics[-1].get("loss") if self.metrics else None
        return float(found) if isinstance(found, int | float) else None

    @cached_property
    def num_overflows(self) -> int:
        """Steps that were skipped as gradients overflowed float16."""
        return sum(line.get("overflow") == 1 for line in self.metrics)

    @cached_property
    def start(self) -> Record:
        """The event with which the newest attempt began; empty: there was none."""
        return next((one for one in reversed(self.events) if one.get("event") == "start"), {})

    @property
    def peak_flops(self) -> float | None:
        """FLOP/s of all ranks together, which may rise as the run trains."""
        return self.peaks.flops_per_second

    @property
    def quiet_seconds(self) -> float:
        """Since the newest sign of life."""
        times = [one.get("time") for one in (*self.metrics[-1:], *self.events[-1:])]
        newest = max((float(at) for at in times if isinstance(at, int | float)), default=0.0)
        records = self.spans.records
        if len(records):
            newest = max(newest, float((records["start_ns"] + records["duration_ns"]).max()) * 1e-9)
        return max(0.0, self.now - max(newest, self.no_room_at)) if newest else 0.0

    @property
    def state(self) -> State:
        """In a word."""
        quiet, seconds = self.quiet_seconds, self.step_seconds
        return run_state(
            self.events, quiet_seconds=quiet, step_seconds=seconds, held=self.held, at_work=self.at_work
        )

    @cached_property
    def findings(self) -> Findings:
        """What the spans say."""
        return Findings(self.spans.records, self.spans.names, self.job, self.peak_flops)

    @property
    def sentence(self) -> str:
        """How it goes, and the first thing that is wrong."""
        steps = self.job.train.steps
        told = state_sentence(self.state, self.step, steps, self.step_seconds, self.quiet_seconds)
        if self.state == "hangs" and self.findings.standstill is not None:
            return f"{told}; {self.findings.standstill.sentence}"
        wrong = [one.sentence for one in self.findings.culprits[:1]]
        if self.no_room_at:
            told += f"; {self.run.metrics_path} takes no lines since then: make room there"
        return "; ".join([told, *wrong])


class RunWatch:
    """Looks again and again, reading what is new. Raises `BadInputError` where there is no run."""

    def __init__(self, run: Run, most_steps: int = 50) -> None:
        self.run, self._job = run, run.job()
        self._spans = SpanFolder(run.spans_path, most_steps)
        self._steps, self._events_tail = StepLines(run.metrics_path), EventLines(run.events_path)
        self._events: list[Record] = []
        self._gpus = GpuLooks(run.counters_path)

    def look(self) -> Look:
        """As it is now."""
        self._steps.poll()
        events = self._events_tail.poll()
        self._events = late_events(self._events + events)
        if any(event.get("event") == "start" for event in events):
            with suppress(MyriadError, OSError):
                self._job = self.run.job()  # it may have been changed when the run was resumed
        job = attempt_of(self._job, self._events)
        spans, held = self._spans.newest(), self.run.is_locked
        steps = self._steps
        return Look(
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
