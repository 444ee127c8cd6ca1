"""Meaning of the lines in metrics.jsonl and events.jsonl.

This module determines the valid steps and events, and how many steps are done.

A resumed run goes back to its checkpoint, so a step may be written twice. The newest attempt is valid: a line
for step n invalidates every earlier line for a step >= n (`StepLines`). Lines may be missing, for example if
the disk was full and the writer was killed. So steps are counted by their numbers (`count_steps`).

Lines may also be torn, or come from another version or program. Readers get only fields of the types below:
an invalid field of a step becomes null, an invalid field of an event is dropped, and the line counts as
invalid.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from myriad.system.jsonl import JsonlTail, Record, late_events
from myriad.units import format_number

__all__ = [
    "EVENT_FIELDS",
    "STEP_FIELDS",
    "EventLines",
    "StepCount",
    "StepLines",
    "count_steps",
    "event_line",
    "figure_of",
    "lines_of_steps",
    "loss_scale_text",
    "missing_lines_text",
    "step_line",
]

STEP_FIELDS = {
    "step": "Steps done, from 1.",
    "time": "End of the step, in seconds since the epoch.",
    "loss": "Mean loss of the step's tokens, in nats; null if it is not finite.",
    "grad_norm": "Global gradient norm before clipping; null if it is not finite.",
    "learning_rate": "Learning rate of the update.",
    "tokens": "Tokens since step 1.",
    "tokens_per_second": "Tokens of the step over its time, over all ranks.",
    "step_seconds": "Time of the step, without validation and checkpoints.",
    "flops": "Model FLOPs of the step, over all ranks.",
    "mfu": "`flops` over step_seconds and the peak FLOP/s of all ranks that was known then; pages and "
    "summaries use the latest peak.",
    "memory_bytes": "Highest memory of rank 0 so far: its device, or its process on a CPU.",
    "data_wait_seconds": "Time in which rank 0 waited for its batch.",
    "checkpoint_wait_seconds": "Time in which rank 0 waited for snapshots.",
    "exposed_comm_seconds": "Communication time in which rank 0 computed nothing.",
    "data_digest": "Hash of the step's samples and tokens (`myriad data certify`), 16 hexadecimal digits.",
    "prediction_loss": "Mean loss of the prediction layers, with model.prediction_layers; training adds "
    "model.prediction_weight times it to loss.",
    "noise_scale": "Gradient noise scale in tokens, with telemetry.noise_scale; null while its denominator "
    "is not positive.",
    "noise_gradient": "Its denominator: running average of the true gradient's squared norm.",
    "noise_variance": "Its numerator: running average of the variance of one token's gradient (the trace of "
    "its covariance).",
    "layer_norms": "With telemetry.layer_norms_every, L2 norms by layer: `gradient` (before clipping), "
    "`parameter` (after the update), `update` (the change).",
    "expert_load": "Tokens of the busiest expert over those of the mean expert of its block, with "
    "model.experts.",
    "busiest_expert": "Block and number, from 0, of that expert.",
    "expert_loads": "With telemetry.expert_loads_every, the load of each expert by block: its tokens over "
    "those of the mean expert.",
    "router_entropy": "Entropy of routers' scores over ln(model.experts), mean over tokens and blocks: 1 if "
    "all experts have equal scores, 0 if one has all.",
    "dropped_share": "With model.expert_capacity, share of the pairs of a token and one of its experts that "
    "were dropped, mean over blocks.",
    "max_attention_logit": "Largest attention score of any head before the softmax, with optimizer.qk_clip.",
    "user": "Values of `myriad.log` by name: means over the calls of the step on all ranks; null if not "
    "finite.",
    "loss_scale": "Loss scale of the step, with float16.",
    "skipped": "1 if the batch was skipped.",
    "overflow": "1 if gradients overflowed, with float16.",
}
"""Fields of a step, with their meaning."""
_FIGURES = frozenset(
    {*STEP_FIELDS}
    - {"step", "skipped", "overflow", "data_digest", "layer_norms", "busiest_expert", "expert_loads", "user"}
)
_MOST_STEP, _LARGEST = 2**53, 1e100
_MOST_SECONDS = 2**33
"""Latest valid time, in seconds since the epoch: the year 2242."""


def _is_figure(value: object) -> bool:
    if type(value) is float:  # nearly all: a page reads a million lines
        return -_LARGEST < value < _LARGEST
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value is None
    return abs(value) < _LARGEST and math.isfinite(value)


def _is_time(value: object) -> bool:
    found = figure_of(value)
    return value is None or (found is not None and 0 <= found < _MOST_SECONDS)


def _is_rate(value: object) -> bool:
    found = figure_of(value)
    return found is not None and found >= 1


def _is_count(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < _MOST_STEP


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_list_of(is_right: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(map(is_right, value))


def _is_object(value: object) -> bool:
    return isinstance(value, Mapping)


def _are_figures(value: object) -> bool:
    return isinstance(value, Mapping) and all(map(_is_figure, value.values()))


def _are_layer_norms(value: object) -> bool:
    return value is None or (isinstance(value, Mapping) and all(map(_are_figures, value.values())))


def _are_expert_loads(value: object) -> bool:
    are_figures = _is_list_of(_is_figure)
    return value is None or (isinstance(value, Mapping) and all(map(are_figures, value.values())))


def _is_change(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(one, list) and len(one) == 2 for one in value.values()
    )


EVENT_FIELDS: dict[str, Callable[[object], bool]] = {
    "time": _is_time,
    **dict.fromkeys(
        (
            "loss",
            "bits_per_byte",
            "ema_loss",
            "ema_bits_per_byte",
            "seconds",
            "late_seconds",
            "hidden_seconds",
            "ratio",
        ),
        _is_figure,
    ),
    **dict.fromkeys(("peak_flops", "flops_per_token"), _is_rate),
    **dict.fromkeys(
        ("step", "epoch", "resumed_from", "nodes", "failures", "parameters", "tokens"), _is_count
    ),
    **dict.fromkeys(("windows", "padding", "split_documents"), _is_count),
    **dict.fromkeys(("num_dropped", "num_late", "bytes", "missed", "term", "steps_done"), _is_count),
    **dict.fromkeys(("rank", "node"), lambda value: _is_count(value, -1)),
    **dict.fromkeys(("world", "dp", "threads"), lambda value: _is_count(value, 1)),
    **dict.fromkeys(("offset", "drawn_prediction_layers", "unused_prediction_layers"), _is_count),
    **dict.fromkeys(("event", "problem", "peak_source", "device", "precision", "source", "cause"), _is_text),
    **dict.fromkeys(
        ("name", "verdict", "culprit", "what", "place", "text", "prompt", "fingerprint", "tier"), _is_text
    ),
    **dict.fromkeys(("key", "accused", "partition", "file", "action", "host"), _is_text),
    "unchecked": _is_list_of(_is_text),
    "shares": _is_list_of(lambda value: _is_count(value, 1)),
    "set_aside": _is_list_of(_is_text),
    **dict.fromkeys(("checks", "failed"), _is_list_of(_is_text)),
    "servers": _is_list_of(_is_object),
    **dict.fromkeys(("evidence", "software"), _is_object),
    "differs": _is_change,
    "changes": _is_object,
    **dict.fromkeys(("scores", "standard_errors"), _are_figures),
}
"""Type checks of the event fields that programs read. Other fields are only shown."""


class StepLines:
    """A growing metrics.jsonl: one line per step, in order, without those that a resumed attempt replaced.

    Invalid lines are skipped or corrected (`step_line`), and counted."""

    def __init__(self, path: Path) -> None:
        self._tail = JsonlTail(path, check=self._take)
        self.lines: list[Record] = []
        """All valid lines so far. `poll` extends this list in place."""
        self._num_wrong = 0

    @property
    def num_wrong(self) -> int:
        """Number of lines that are torn, have no step, or have an invalid figure."""
        return self._num_wrong + self._tail.num_wrong

    @property
    def problem(self) -> str:
        """Why the file cannot be read; "": it can."""
        return self._tail.problem

    @property
    def no_room_at(self) -> float:
        """Time of the last failed append, if no line was added since; 0: none failed."""
        return self._tail.no_room_at

    def poll(self) -> list[Record]:
        """Read the new lines, add them to `lines`, and return them."""
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
    """Return the line with invalid figures set to null; ``None``: it has no valid step."""
    step = line.get("step")
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < _MOST_STEP:
        return None
    wrong = {key: None for key, value in line.items() if key in _FIGURES and not _is_figure(value)}
    if not _is_time(line.get("time")):
        wrong["time"] = None
    if not _are_layer_norms(line.get("layer_norms")):
        wrong["layer_norms"] = None
    if not _are_expert_loads(line.get("expert_loads")):
        wrong["expert_loads"] = None
    if not (line.get("user") is None or _are_figures(line["user"])):
        wrong["user"] = None
    return line | wrong if wrong else line


def loss_scale_text(newest: Record, num_overflows: int) -> str:
    """Return float16's loss scale in the newest step, and the number of steps skipped for overflow.

    Return "" if the step has no loss scale."""
    scale = figure_of(newest.get("loss_scale"))
    if scale is None:
        return ""
    steps = "step" if num_overflows == 1 else "steps"
    skipped = f", {num_overflows} {steps} skipped for overflow" if num_overflows else ""
    return f"loss scale {format_number(scale, 4)}{skipped}"


class EventLines:
    """A growing events.jsonl: each line that is an event, without fields of invalid type (`event_line`)."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._tail = JsonlTail(path, from_end=from_end, check=self._take)
        self._num_wrong = 0

    @property
    def num_wrong(self) -> int:
        """Number of lines that are torn, are not events, or have a field of invalid type."""
        return self._num_wrong + self._tail.num_wrong

    @property
    def offset(self) -> int:
        """Number of bytes that have been read."""
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
    """Return the event without empty and invalid fields, and whether no field was invalid.

    The event is ``None`` if the line is not an event."""
    if not isinstance(line.get("event"), str):
        return None, False
    known = line.keys() & EVENT_FIELDS.keys()
    empty = {key for key in known if line[key] is None}
    wrong = {key for key in known - empty if not EVENT_FIELDS[key](line[key])}
    left_out = empty | wrong
    return {key: value for key, value in line.items() if key not in left_out} if left_out else line, not wrong


@dataclass(frozen=True)
class StepCount:
    """Progress of a run, by the numbers of its steps."""

    done: int
    """Number of steps that are done and were not lost."""
    without_line: int
    """Number of done steps without a line in metrics.jsonl."""


def count_steps(lines: Sequence[Record], events: Sequence[Record]) -> StepCount:
    """Count the steps of a run from the lines of `StepLines` and all ``events``.

    An event after the newest line may show that more steps are done, or that an attempt resumed from an
    earlier step. A step is lost if an attempt resumed before it and has not replaced its line."""
    done = int(lines[-1]["step"]) if lines else 0
    times = (figure_of(line.get("time")) for line in reversed(lines))
    newest = next((at for at in times if at is not None), math.inf if lines else -math.inf)
    lost: list[tuple[int, int]] = []
    for event in late_events(events):
        name, at = event.get("event"), figure_of(event.get("time"))
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
    """Return `StepCount.without_line` as a sentence; "" if it is 0."""
    return f"{num_steps} steps trained without a metrics line" if num_steps else ""


def lines_of_steps(lines: Sequence[Record], first: int, last: int) -> Sequence[Record]:
    """Return the lines of the steps from ``first`` to ``last``, inclusive."""
    return lines[bisect_left(lines, first, key=_step_of) : bisect_right(lines, last, key=_step_of)]


def _step_of(line: Record) -> int:
    return int(line["step"])


def _time_of(line: Record) -> float:
    return figure_of(line.get("time")) or 0.0


def figure_of(value: object) -> float | None:
    """Return a valid figure of a line as a number, else ``None``."""
    if type(value) is float:
        return value if -_LARGEST < value < _LARGEST else None
    return float(value) if isinstance(value, int | float) and _is_figure(value) else None


def _count(value: object) -> int:
    found = figure_of(value)
    return 0 if found is None or not 0 <= found < _MOST_STEP else int(found)
