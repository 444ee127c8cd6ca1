"""Divide a step's time into losses, from 100 % of the peak down to the MFU. The losses add up.

    T                     mean seconds of the run's steps;   ideal = MFU x T: at the peak (`run_speed`)
    slower than peak      mean own seconds of compute actions - ideal: kernels, and recomputation
    bubble                waits for another place of the pipeline that had not sent yet
    slower ranks          waits for the last arriver of a collective whose members do the same work
    tensor, experts, context, waits while the message or the collective was in flight: exposed communication
      pipeline, data parallel
    data, optimizer
    other                 the rest: nothing was recorded, or spans that a job added

Spans are known of some steps only, and a step's time by rank 0's clock is not the mean of its spans over
ranks. So spans say how the time above the ideal is divided, as means over ranks and those steps; how much it
is follows from T. What happens between steps (evaluation, checkpoints, garbage collection) is no part of a
step, of its time or of the MFU.

The share of each wait before the last arriver follows from the program (`arrivals`) of a few steps; without
it (``split`` false) the bubble is the whole pipeline wait."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from myriad.dashboard.insight.arrivals import held_up
from myriad.dashboard.insight.phase_table import PhaseTable
from myriad.dashboard.insight.step_spans import StepSpans
from myriad.run.run_speed import Speed

__all__ = ["LOSSES", "Losses", "losses", "losses_at_speed", "of_class"]

LOSSES = (
    "slower than peak",
    "bubble",
    "slower ranks",
    "tensor",
    "experts",
    "context",
    "pipeline",
    "data parallel",
    "data",
    "optimizer",
    "other",
)
_OF_CLASS = {
    "tp": "tensor",
    "ep": "experts",
    "cp": "context",
    "pp": "pipeline",
    "dp": "data parallel",
    "data": "data",
    "optimizer": "optimizer",
    "other": "other",
}


_BETWEEN_STEPS = ("checkpoint", "garbage")
"""Classes of spans outside of steps, beside evaluations."""


@dataclass(frozen=True)
class Losses:
    """Mean seconds of a step by cause, over some steps."""

    step_seconds: float
    ideal_seconds: float | None
    """Seconds at the peak; ``None`` if no peak is known: then compute counts as no loss."""
    compute_seconds: float
    seconds: Mapping[str, float]
    """Seconds of each of `LOSSES`. With the ideal (or compute) seconds they add up to the step."""
    split: bool
    """Whether waits were divided at the last arriver."""

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization (MFU), a ratio from 0 to 1."""
        return None if self.ideal_seconds is None else self.ideal_seconds / self.step_seconds

    @property
    def shares(self) -> Mapping[str, float]:
        """Each loss as a share of the step."""
        return {name: seconds / self.step_seconds for name, seconds in self.seconds.items()}

    def waterfall(self) -> list[tuple[str, float, float]]:
        """Return name, lost share and remaining share, from the first loss to the last."""
        left, found = 1.0, []
        for name, share in self.shares.items():
            left -= share
            found.append((name, share, left))
        return found


def of_class(kind: str) -> str:
    """Return the loss to which exposed time of a class belongs."""
    return _OF_CLASS.get(kind, "slower than peak")


def losses(
    table: PhaseTable,
    steps: Sequence[StepSpans] = (),
    *,
    ideal_seconds: float | None = None,
    step_seconds: float | None = None,
    timed_seconds: float | None = None,
) -> Losses | None:
    """Return the losses of a table; ``None`` if it has no spans.

    ``steps``: some of the table's steps, matched to their programs. ``ideal_seconds``: a step's time at the
    peak. ``step_seconds``: mean time of the steps that the losses are for. ``timed_seconds``: mean time of
    the table's steps. Default of both: by the spans."""
    seen = table.seen
    if not seen.any():
        return None
    by_class = {name: float(values[seen].mean()) for name, values in table.by_class().items()}
    idle = float(table.idle_seconds[seen].mean())
    by_class["other"] -= idle + float(np.nan_to_num(table.of_phase("evaluate"))[seen].mean())
    in_steps = {name: seconds for name, seconds in by_class.items() if name not in _BETWEEN_STEPS}
    recorded, compute = sum(in_steps.values()), in_steps.pop("compute")
    timed = recorded + idle if timed_seconds is None else timed_seconds
    found = dict.fromkeys(LOSSES, 0.0)
    for kind, seconds in in_steps.items():
        found[of_class(kind)] += seconds
    found["other"] += max(0.0, timed - recorded)
    split = _split(found, steps)
    if not split:
        found["bubble"], found["pipeline"] = found["pipeline"], 0.0
    whole = timed if step_seconds is None else step_seconds
    if ideal_seconds is None:
        compute *= whole / max(timed, recorded)
    else:
        found["slower than peak"] += max(0.0, compute - ideal_seconds)
    return _closed(Losses(whole, ideal_seconds, compute, found, split))


def losses_at_speed(
    table: PhaseTable, steps: Sequence[StepSpans], speed: Speed | None, timed: Mapping[int, float | None]
) -> Losses | None:
    """Return the losses of a run whose MFU and step time are those of ``speed``. ``timed``: seconds of steps
    by its metrics."""
    known = [seconds for step in table.steps if (seconds := timed.get(int(step)))]
    timed_seconds = float(np.mean(known)) if known else None
    if speed is None:
        return losses(table, steps, timed_seconds=timed_seconds)
    ideal = None if speed.mfu is None else speed.mfu * speed.step_seconds
    return losses(
        table, steps, ideal_seconds=ideal, step_seconds=speed.step_seconds, timed_seconds=timed_seconds
    )


def _closed(found: Losses) -> Losses:
    """Scale the losses to the time that is lost, so that they and the rest add up to the step."""
    useful = found.compute_seconds if found.ideal_seconds is None else found.ideal_seconds
    lost, known = max(0.0, found.step_seconds - useful), sum(found.seconds.values())
    if known <= 0:
        return replace(found, seconds=dict(found.seconds) | {"other": lost})
    return replace(found, seconds={name: each * lost / known for name, each in found.seconds.items()})


def _split(found: dict[str, float], steps: Sequence[StepSpans]) -> bool:
    """Move waits for late ranks out of each kind of communication; return whether they are known."""
    looked = [(step, held_up(step)) for step in steps if step.matched.any()]
    if not looked:
        return False
    for to in ("bubble", "slower ranks"):
        moved = dict.fromkeys(found, 0.0)
        for step, held in looked:
            for kind, seconds in (held.bubble if to == "bubble" else held.slower).items():
                moved[of_class(kind)] += float(seconds[step.matched].mean()) / len(looked)
        for name, mean in moved.items():
            taken = min(mean, max(0.0, found[name]))
            found[name] -= taken
            found[to] += taken
    return True
