"""Progress of a run, from the lines that its rank 0 adds to ``metrics.jsonl`` and ``events.jsonl``."""

from collections import deque
from collections.abc import Collection
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING

from myriad.run import Run
from myriad.run.run_lines import EventLines, loss_scale_text, step_line
from myriad.run.run_speed import Peaks, SpeedMeter
from myriad.system.jsonl import JsonlTail, Record
from myriad.units import format_count

if TYPE_CHECKING:
    from myriad.job import Job
    from myriad.job.job_steps import JobSteps

__all__ = ["Progress"]

_RECENT_STEPS = 20


class Progress:
    """The progress of one attempt; `poll` updates it."""

    def __init__(self, run: Run, steps: int, quiet: Collection[str] = ()) -> None:
        """Start to follow the files at their ends, which belong to earlier attempts: create it before the
        ranks start. ``quiet``: events that `poll` does not return."""
        self._quiet, self._run = quiet, run
        self.steps = steps
        self.step = 0
        self.first_step = 0
        """Steps done before this attempt."""
        self.has_started = self.has_ended = False
        """Whether the ranks of this attempt have started to train, and whether they have ended."""
        self.bits_per_byte: float | None = None
        self._num_overflows = 0
        self._recent: deque[Record] = deque(maxlen=_RECENT_STEPS)
        self._metrics = JsonlTail(run.metrics_path, from_end=True)
        self._events = EventLines(run.events_path, from_end=True)
        self._peaks = Peaks()
        self._speed = SpeedMeter(self._peaks)

    def poll(self) -> list[Record]:
        """Read the new lines; return the new events."""
        records = [*filter(None, map(step_line, self._metrics.poll()))]
        events = self._events.poll()
        for event in events:
            self._peaks.add(event)
            if event.get("event") == "start":
                self._speed = SpeedMeter(self._peaks)
            if event.get("event") == "validation":
                self.bits_per_byte = event.get("bits_per_byte", self.bits_per_byte)
            self._note_attempt(event.get("event"))
            if event.get("event") in ("start", "resume"):
                self.first_step = event.get("resumed_from") or event.get("step") or self.first_step
                self.step = max(self.step, self.first_step)
        for record in records:
            self._recent.append(record)
            self._num_overflows += record.get("overflow") == 1
            self.step = int(record["step"])
            if self._peaks.is_of_newest(record):
                self._speed.add(record)
        return [event for event in events if event.get("event") not in self._quiet]

    def _note_attempt(self, event: object) -> None:
        if event in ("start", "restart"):
            self.has_started, self.has_ended = event == "start", False
        elif event in ("interrupted", "finish"):
            self.has_ended = True

    @property
    def seconds_left(self) -> float | None:
        """Remaining seconds at the speed of the last steps; of their tokens, if the batch changes."""
        plan, speed = self._changes, self._median("tokens_per_second")
        if plan is not None and speed:
            return (plan.tokens_before(self.steps) - plan.tokens_before(self.step)) / speed
        seconds = self._median("step_seconds")
        return None if seconds is None else (self.steps - self.step) * seconds

    @cached_property
    def _changes(self) -> "JobSteps[Job] | None":
        """The values of each step, if phases or a ramp change them."""
        job = self._run.job() if self._run.exists else None
        if job is None or not (job.phases or job.train.batch_ramp.start):
            return None
        from myriad.job.job_steps import JobSteps

        return JobSteps(job)

    def figures(self) -> list[str]:
        """Return the known figures as text: loss, bits per byte, tokens/s, MFU, time left, loss scale."""
        if not self._recent:
            return []
        loss = self._recent[-1].get("loss")
        shown = ["loss nan" if loss is None else f"loss {loss:.3f}"]
        if self.bits_per_byte is not None:
            shown.append(f"{self.bits_per_byte:.3f} bits/byte")
        speed = self._speed.speed
        if speed is not None and speed.tokens_per_second is not None:
            shown.append(f"{format_count(speed.tokens_per_second)} tokens/s")
        if speed is not None and speed.mfu is not None:
            shown.append(f"MFU {speed.mfu:.1%}")
        if (left := self.seconds_left) is not None and self.step < self.steps:
            shown.append(f"{_clock(left)} left")
        if scale := loss_scale_text(self._recent[-1], self._num_overflows):
            shown.append(scale)
        return shown

    def _median(self, key: str) -> float | None:
        """Return the median over recent steps; it ignores a slow first step that compiles or allocates."""
        values = [record[key] for record in self._recent if record.get(key) is not None]
        return median(values) if values else None


def _clock(seconds: float) -> str:
    """Return a short duration such as ``1:05`` or ``2:10:00``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
