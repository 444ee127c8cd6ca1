"""What the lines of metrics.jsonl and events.jsonl mean: the steps and events that count, how many steps are
done, and the MFU of each.

A resumed run goes back to its checkpoint, so its steps may be written twice. The newest attempt is right: a
line for step n makes every earlier line for a step >= n void (`StepLines`). Lines may be missing: of a full
disk, whose writer was killed before there was room. So steps are counted by number (`count_steps`).

Lines may also be torn, or come from another version or a foreign program. Whoever reads them gets fields of
the types below and nothing else: a wrong field of a step becomes null, one of an event is left out, and the
line counts as wrong.

A line has the MFU by the peak that was known when it was written, and a run may raise its peak later. So MFU
is shown by the last peak that is known for the same ranks and device (`Peaks`), never as the line has it.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from myriad.jsonl import JsonlTail, Record, late_events
from myriad.units import format_number

__all__ = [
    "EventLines",
    "Peaks",
    "StepCount",
    "StepLines",
    "count_steps",
    "event_line",
    "loss_scale_text",
    "missing_lines_text",
    "step_line",
]

_FIGURES = (
    *("time", "loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second", "step_seconds", "mfu"),
    *("memory_bytes", "data_wait_seconds", "checkpoint_wait_seconds", "exposed_comm_seconds", "loss_scale"),
)
"""Numbers of a step, or null."""
_MOST_STEP, _LARGEST = 2**53, 1e100
_MOST_SECONDS = 2**33
"""From the epoch: the year 2242."""


def _is_figure(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value is None
    return abs(value) < _LARGEST and math.isfinite(value)


def _is_time(value: object) -> bool:
    found = _figure(value)
    return value is None or (found is not None and 0 <= found < _MOST_SECONDS)


def _is_rate(value: object) -> bool:
    found = _figure(value)
    return found is not None and found >= 1


def _is_count(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < _MOST_STEP


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_list_of(is_right: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(map(is_right, value))


def _is_object(value: object) -> bool:
    return isinstance(value, Mapping)


def _is_change(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(one, list) and len(one) == 2 for one in value.values()
    )


_EVENT_FIELDS: dict[str, Callable[[object], bool]] = {
    "time": _is_time,
    **dict.fromkeys(
        ("loss", "bits_per_byte", "seconds", "late_seconds", "hidden_seconds", "ratio"), _is_figure
    ),
    **dict.fromkeys(("peak_flops", "flops_per_token"), _is_rate),
    **dict.fromkeys(
        ("step", "epoch", "resumed_from", "nodes", "failures", "parameters", "tokens"), _is_count
    ),
    **dict.fromkeys(("num_dropped", "num_late", "bytes", "missed", "term", "steps_done"), _is_count),
    **dict.fromkeys(("rank", "node"), lambda value: _is_count(value, -1)),
    **dict.fromkeys(("world", "dp", "threads"), lambda value: _is_count(value, 1)),
    **dict.fromkeys(("offset",), _is_count),
    **dict.fromkeys(("event", "problem", "peak_source", "device", "precision", "source", "cause"), _is_text),
    **dict.fromkeys(
        ("verdict", "culprit", "what", "place", "text", "prompt", "fingerprint", "tier"), _is_text
    ),
    **dict.fromkeys(("key", "accused", "partition", "file", "action"), _is_text),
    "unchecked": _is_list_of(_is_text),
    "shares": _is_list_of(lambda value: _is_count(value, 1)),
    "set_aside": _is_list_of(_is_text),
    **dict.fromkeys(("checks", "failed"), _is_list_of(_is_text)),
    "servers": _is_list_of(_is_object),
    "evidence": _is_object,
    "differs": _is_change,
}
"""Fields of events that are read by programs; other fields are for people alone."""


class StepLines:
    """metrics.jsonl as it grows: one line a step, in order, without those that a resumed attempt has
    replaced. What others wrote into it breaks nothing (`step_line`), and counts."""

    def __init__(self, path: Path) -> None:
        self._tail = JsonlTail(path, check=self._take)
        self.lines: list[Record] = []
        """One list, that grows."""
        self._num_wrong = 0

    @property
    def num_wrong(self) -> int:
        """Lines that are torn, of no step, or have a figure that is no number."""
        return self._num_wrong + self._tail.num_wrong

    @property
    def problem(self) -> str:
        """Why the file cannot be read; "": it can."""
        return self._tail.problem

    @property
    def no_room_at(self) -> float:
        """When a line could not be added, if none was added since; 0: it was not so."""
        return self._tail.no_room_at

    def poll(self) -> list[Record]:
        """What is new of it."""
        new = self._tail.poll()
        for line in new:
            while self.lines and self.lines[-1]["step"] >= line["step"]:
                self.lines.pop()
            self.lines.append(line)
        return new

    def _take(self, line: Record) -> Record | None:
        right = step_line(line)
        self._num_wrong += right is not line
        return right


def step_line(line: Record) -> Record | None:
    """As it is, where it is right; ``None``: it is of no step; a figure that is no number becomes null."""
    step = line.get("step")
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < _MOST_STEP:
        return None
    wrong = {key: None for key in _FIGURES if not _is_figure(line.get(key))}
    if not _is_time(line.get("time")):
        wrong["time"] = None
    return line | wrong if wrong else line


def loss_scale_text(newest: Record, num_overflows: int) -> str:
    """Return float16's loss scale in the newest step, and how many steps were skipped for overflow; "": the
    step has no scale."""
    scale = _figure(newest.get("loss_scale"))
    if scale is None:
        return ""
    steps = "step" if num_overflows == 1 else "steps"
    skipped = f", {num_overflows} {steps} skipped for overflow" if num_overflows else ""
    return f"loss scale {format_number(scale, 4)}{skipped}"


class EventLines:
    """events.jsonl as it grows: each line that is an event, without fields of a wrong type (`event_line`)."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._tail = JsonlTail(path, from_end=from_end, check=self._take)
        self._num_wrong = 0

    @property
    def num_wrong(self) -> int:
        """Lines that are torn, of no event, or have a field of a wrong type."""
        return self._num_wrong + self._tail.num_wrong

    @property
    def offset(self) -> int:
        """Bytes of the file that were read."""
        return self._tail.offset

    @property
    def problem(self) -> str:
        """Why the file cannot be read; "": it can."""
        return self._tail.problem

    def poll(self) -> list[Record]:
        """Return the new events."""
        return self._tail.poll()

    def _take(self, line: Record) -> Record | None:
        right, is_whole = event_line(line)
        self._num_wrong += not is_whole
        return right


def event_line(line: Record) -> tuple[Record | None, bool]:
    """Return the event without empty and wrong fields, and whether none was wrong; ``None``: no event."""
    if not isinstance(line.get("event"), str):
        return None, False
    known = line.keys() & _EVENT_FIELDS.keys()
    empty = {key for key in known if line[key] is None}
    wrong = {key for key in known - empty if not _EVENT_FIELDS[key](line[key])}
    left_out = empty | wrong
    return {key: value for key, value in line.items() if key not in left_out} if left_out else line, not wrong


@dataclass(frozen=True)
class StepCount:
    """How far a run has come, by the numbers of its steps."""

    done: int
    """Steps done, and not lost."""
    without_line: int
    """Done steps that have no line in metrics.jsonl."""


def count_steps(lines: Sequence[Record], events: Sequence[Record]) -> StepCount:
    """``lines``: of `StepLines`; ``events``: all of them. An event after the newest line may show that more
    steps are done, or that an attempt begins before that line. A line that an attempt has gone back behind,
    and not replaced, is of a step that was lost."""
    done = int(lines[-1]["step"]) if lines else 0
    times = (_figure(line.get("time")) for line in reversed(lines))
    newest = next((at for at in times if at is not None), math.inf if lines else -math.inf)
    lost: list[tuple[int, int]] = []
    for event in late_events(events):
        name, at = event.get("event"), _figure(event.get("time"))
        if at is None or name not in ("start", "finish", "interrupted"):
            continue
        if name == "start":
            resumed = _count(event.get("resumed_from"))
            after = bisect_right(lines, resumed, key=_step_of)
            # Step by step: a clock that jumped back leaves lines whose times are in no order.
            later = range(after, len(lines))
            lost.append((after, next((i for i in later if _time_of(lines[i]) >= at), len(lines))))
            if at >= newest and all(_time_of(lines[i]) <= at for i in later):
                done = resumed
        elif at >= newest:
            done = max(done, _count(event.get("step")))
    first, end = bisect_right(lines, 0, key=_step_of), bisect_right(lines, done, key=_step_of)
    num_lines, reached = end - first, first
    for start, stop in sorted(lost):
        if (ends := min(stop, end)) > (begins := max(start, reached)):
            num_lines, reached = num_lines - (ends - begins), ends
    return StepCount(done, max(0, done - num_lines))


def missing_lines_text(num_steps: int) -> str:
    """Return `StepCount.without_line` as a sentence; "" where there are none."""
    return f"{num_steps} steps trained without a metrics line" if num_steps else ""


def _step_of(line: Record) -> int:
    return int(line["step"])


def _time_of(line: Record) -> float:
    return _figure(line.get("time")) or 0.0


def _figure(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and _is_figure(value) else None


def _count(value: object) -> int:
    found = _figure(value)
    return 0 if found is None or not 0 <= found < _MOST_STEP else int(found)


@dataclass(frozen=True)
class _Setting:
    """Ranks that have one peak together."""

    world: int
    device: str
    precision: str
    threads: int


class Peaks:
    """The peak FLOP/s behind the MFU of a run's steps.

    Each attempt has the last peak that any attempt on as many ranks of the same device, threads and precision
    has reported. Peaks of other settings say nothing about it."""

    def __init__(self, events: Sequence[Record] = ()) -> None:
        """``events``: all of them, in order."""
        self._known: dict[_Setting, tuple[float, str]] = {}
        self._begins: list[float] = []
        self._attempts: list[tuple[_Setting, float | None]] = []
        """Setting and FLOPs of a token, of the attempt that began then."""
        for event in events:
            self.add(event)

    def add(self, event: Record) -> None:
        """Take in one more event."""
        name = event.get("event")
        if name == "start":
            setting = _Setting(
                _count(event.get("world")),
                str(event.get("device")),
                str(event.get("precision")),
                _count(event.get("threads")),
            )
            began = _figure(event.get("time")) or 0.0
            self._begins.append(max(began, self._begins[-1]) if self._begins else began)
            self._attempts.append((setting, _figure(event.get("flops_per_token"))))
        if name in ("start", "peak") and self._attempts and (flops := _figure(event.get("peak_flops"))):
            self._known[self._attempts[-1][0]] = flops, str(event.get("peak_source") or "")

    @property
    def flops_per_second(self) -> float | None:
        """Peak of all ranks of the newest attempt together."""
        return self._newest[0] or None

    @property
    def source(self) -> str:
        """Where that is from; "": unknown."""
        return self._newest[1]

    @property
    def _newest(self) -> tuple[float, str]:
        return self._known.get(self._attempts[-1][0], (0.0, "")) if self._attempts else (0.0, "")

    def mfu(self, line: Record) -> float | None:
        """Return the MFU of a step by the last peak of its setting; as the line has it where that is all."""
        at = bisect_right(self._begins, _time_of(line)) - 1
        setting, flops_per_token = self._attempts[max(0, at)] if self._attempts else (None, None)
        speed, peak = _figure(line.get("tokens_per_second")), self._known.get(setting) if setting else None
        if speed is None or flops_per_token is None or peak is None:
            return _figure(line.get("mfu"))
        return speed * flops_per_token / peak[0]
