"""The speed of a run: its MFU, tokens per second and step time, each with one definition.

    MFU of a step   its model FLOPs / (its step_seconds x peak)
    MFU of a run    the model FLOPs of all its steps / (their step_seconds x peak), and so are its tokens per
                    second and its step time: over the newest attempt, whose first three steps warm up
                    (allocation, compilation) and do not count

The progress line, the summary, `myriad top`, the report and the page show the MFU of the run by this module,
and the waterfall ends at it; a chart shows the MFU of each step. Time between steps (validation, checkpoints)
is in none of them: it is in the account of the run's time.

A line has the MFU for the peak that was known when it was written, and a run may measure a higher peak later.
So MFU is computed from the latest peak for the same ranks and device (`Peaks`), not read from the line. No
step exceeds the peak: one that does raises it (`myriad.train.metrics`).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from myriad.run.run_lines import figure_of
from myriad.system.jsonl import Record

__all__ = ["Peaks", "Speed", "SpeedMeter", "attempt_lines", "run_speed"]

_WARM_UP_STEPS = 3


@dataclass(frozen=True)
class _Setting:
    """Ranks, device, precision and threads, which together determine one peak."""

    world: int
    device: str
    precision: str
    threads: int

    @classmethod
    def of(cls, start: Record) -> "_Setting":
        """Return the setting of an attempt from its start event."""
        world, threads = (int(figure_of(start.get(key)) or 0) for key in ("world", "threads"))
        return cls(world, str(start.get("device")), str(start.get("precision")), threads)


class Peaks:
    """The peak FLOP/s behind the MFU of a run's steps.

    The MFU of an attempt uses the latest peak reported by any attempt with the same number of ranks, device,
    threads and precision. Peaks of other settings do not apply."""

    def __init__(self, events: Iterable[Record] = ()) -> None:
        """``events``: all events, in order."""
        self._known: dict[_Setting, tuple[float, str]] = {}
        self._begins: list[float] = []
        self._attempts: list[tuple[_Setting, float | None]] = []
        """Setting and FLOPs per token of each attempt, in parallel with ``_begins``."""
        for event in events:
            self.add(event)

    def add(self, event: Record) -> None:
        """Process one more event."""
        name = event.get("event")
        if name == "start":
            began = figure_of(event.get("time")) or 0.0
            self._begins.append(max(began, self._begins[-1]) if self._begins else began)
            self._attempts.append((_Setting.of(event), figure_of(event.get("flops_per_token"))))
        if name in ("start", "peak") and self._attempts and (flops := figure_of(event.get("peak_flops"))):
            self._known[self._attempts[-1][0]] = flops, str(event.get("peak_source") or "")

    @property
    def flops_per_second(self) -> float | None:
        """Peak FLOP/s of all ranks of the newest attempt together; ``None``: unknown."""
        return self._newest[0] or None

    @property
    def source(self) -> str:
        """Source of the peak; "": unknown."""
        return self._newest[1]

    @property
    def begins_newest_first(self) -> Sequence[float]:
        """Times at which the attempts started to train."""
        return self._begins[::-1]

    def is_of_newest(self, line: Record) -> bool:
        """Whether a step is of the newest attempt."""
        return not self._begins or _time_of(line) >= self._begins[-1]

    @property
    def _newest(self) -> tuple[float, str]:
        return self._known.get(self._attempts[-1][0], (0.0, "")) if self._attempts else (0.0, "")

    def mfu(self, line: Record) -> float | None:
        """Return the MFU of a step for the latest peak of its setting, else the MFU in the line."""
        at = bisect_right(self._begins, _time_of(line)) - 1
        setting, flops_per_token = self._attempts[max(0, at)] if self._attempts else (None, None)
        rate, peak = _flops_rate(line, flops_per_token), self._known.get(setting) if setting else None
        found = figure_of(line.get("mfu")) if rate is None or peak is None else rate / peak[0]
        return None if found is None else min(1.0, found)


def _flops_rate(line: Record, flops_per_token: float | None) -> float | None:
    """Return the model FLOP/s of a step; from its tokens if an older version wrote the line."""
    flops, seconds = figure_of(line.get("flops")), figure_of(line.get("step_seconds"))
    if flops is not None and seconds:
        return flops / seconds
    speed = figure_of(line.get("tokens_per_second"))
    return None if speed is None or flops_per_token is None else speed * flops_per_token


@dataclass(frozen=True)
class Speed:
    """The speed of a run, over its steps from ``first_step`` to ``last_step``."""

    first_step: int
    last_step: int
    step_seconds: float
    """Mean time of a step."""
    tokens_per_second: float | None
    mfu: float | None


class SpeedMeter:
    """Adds up the steps of the newest attempt, line by line; ``peaks`` must know its start event."""

    def __init__(self, peaks: Peaks) -> None:
        self.peaks = peaks
        self._early: list[Record] = []
        """The first lines: half of them count while there are no others."""
        self._sums = _Sums()

    def add(self, line: Record) -> None:
        """Add the line of the next step."""
        if len(self._early) < 2 * _WARM_UP_STEPS:
            self._early.append(line)
        else:
            self._sums.add(line, self.peaks)

    @property
    def speed(self) -> Speed | None:
        """The speed so far; ``None`` before the first step with a time."""
        found = replace(self._sums)
        early = self._early[min(_WARM_UP_STEPS, len(self._early) // 2) :]
        for line in early:
            found.add(line, self.peaks)
        if not found.num_steps:
            return None
        return Speed(
            int(early[0]["step"]),
            found.last_step,
            found.seconds / found.num_steps,
            found.tokens / found.tokens_seconds if found.tokens_seconds else None,
            found.flops / found.flops_seconds / _peak(self.peaks) if found.flops_seconds else None,
        )


@dataclass
class _Sums:
    """Sums over steps. Each ratio has the seconds of the steps whose figure is known."""

    num_steps: int = 0
    last_step: int = 0
    seconds: float = 0.0
    tokens: float = 0.0
    tokens_seconds: float = 0.0
    flops: float = 0.0
    flops_seconds: float = 0.0

    def add(self, line: Record, peaks: Peaks) -> None:
        seconds = figure_of(line.get("step_seconds"))
        if not seconds or seconds < 0:
            return
        self.num_steps, self.last_step = self.num_steps + 1, max(self.last_step, int(line["step"]))
        self.seconds += seconds
        if (speed := figure_of(line.get("tokens_per_second"))) is not None:
            self.tokens += speed * seconds
            self.tokens_seconds += seconds
        if (mfu := peaks.mfu(line)) is not None:  # as FLOPs: the peak may rise
            self.flops += mfu * seconds * _peak(peaks)
            self.flops_seconds += seconds


def _peak(peaks: Peaks) -> float:
    """Return the peak, or 1 if it is unknown and lines have the MFU only."""
    return peaks.flops_per_second or 1.0


def attempt_lines(lines: Sequence[Record], peaks: Peaks) -> Sequence[Record]:
    """Return the lines of the newest attempt that has any."""
    for began in peaks.begins_newest_first:
        if found := lines[bisect_left(lines, began, key=_time_of) :]:
            return found
    return lines


def _time_of(line: Record) -> float:
    return figure_of(line.get("time")) or 0.0


def run_speed(lines: Sequence[Record], peaks: Peaks) -> Speed | None:
    """Return the speed of a run; ``lines`` are those of `StepLines`."""
    meter = SpeedMeter(peaks)
    for line in attempt_lines(lines, peaks):
        meter.add(line)
    return meter.speed
