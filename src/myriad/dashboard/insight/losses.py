"""Divide a step's time into losses, from 100 % of the peak down to the measured MFU. The losses add up.

    T                     seconds of a step;   ideal = model FLOPs / (ranks x peak);   MFU = ideal / T
    slower than peak      mean own seconds of compute actions - ideal: kernels, and recomputation
    bubble                waits for another place of the pipeline that had not sent yet
    slower ranks          waits for the last arriver of a collective whose members do the same work
    tensor, experts,      waits while the message or the collective was in flight: exposed communication
      pipeline, data parallel
    data, optimizer, checkpoint, garbage, evaluation
    other                 the rest: nothing was recorded, or spans that a job added

Seconds are means over ranks and steps. The share of each wait before the last arriver follows from the
program (`arrivals`) of a few steps; without it (``split`` false) the bubble is the whole pipeline wait."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from myriad.dashboard.insight.arrivals import held_up
from myriad.dashboard.insight.phase_table import PhaseTable
from myriad.dashboard.insight.step_spans import StepSpans

__all__ = ["LOSSES", "Losses", "losses", "of_class"]

LOSSES = (
    "slower than peak",
    "bubble",
    "slower ranks",
    "tensor",
    "experts",
    "pipeline",
    "data parallel",
    "data",
    "optimizer",
    "checkpoint",
    "garbage",
    "evaluation",
    "other",
)
_OF_CLASS = {
    "tp": "tensor",
    "ep": "experts",
    "pp": "pipeline",
    "dp": "data parallel",
    "data": "data",
    "optimizer": "optimizer",
    "checkpoint": "checkpoint",
    "garbage": "garbage",
    "other": "other",
}


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
) -> Losses | None:
    """Return the losses of a table; ``None`` if it has no spans.

    ``steps``: some of the table's steps, matched to their programs. ``ideal_seconds``: a step's time at the
    peak. ``step_seconds``: the step time, if it is known better than from spans."""
    seen = table.seen
    if not seen.any():
        return None
    by_class = {name: float(values[seen].mean()) for name, values in table.by_class().items()}
    whole = float(table.wall_seconds[seen].mean()) if step_seconds is None else step_seconds
    found = dict.fromkeys(LOSSES, 0.0)
    for kind, seconds in by_class.items():
        if kind != "compute":
            found[of_class(kind)] += seconds
    found["other"] = 0.0  # what is left, below
    found["evaluation"] = float(np.nan_to_num(table.of_phase("evaluate"))[seen].mean())
    split = _split(found, steps)
    if not split:
        found["bubble"], found["pipeline"] = found["pipeline"], 0.0
    found["slower than peak"] = 0.0 if ideal_seconds is None else by_class["compute"] - ideal_seconds
    useful = by_class["compute"] if ideal_seconds is None else ideal_seconds
    found["other"] = whole - useful - sum(found.values())
    return Losses(whole, ideal_seconds, by_class["compute"], found, split)


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
