"""Where a step's time goes, from 100 % of the peak down to the measured MFU. Parts of one whole.

    T                     seconds of a step;   ideal = model FLOPs / (ranks x peak);   MFU = ideal / T
    slower than peak      mean own seconds of computes - ideal: kernels, and what is computed again
    bubble                waits for another place of the pipeline that had nothing to send yet
    slower ranks          waits for the last arriver of a collective whose members do the same
    tensor, pipeline,     waits while the message or the collective travelled: exposed communication
      data parallel
    data, optimizer, checkpoint, garbage, evaluation
    other                 the rest: nothing was recorded, or spans that a job added

Seconds are means over ranks and steps. How much of a wait was for somebody who had not come follows from the
program (`arrivals`) of a few steps; without it (``split`` false) the bubble is the whole pipeline wait.
"""

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
    """Mean over some steps."""

    step_seconds: float
    ideal_seconds: float | None
    """At the peak; ``None``: no peak is known, and computes are no loss."""
    compute_seconds: float
    seconds: Mapping[str, float]
    """Of each of `LOSSES`: with the ideal (or the computes) they are the step."""
    split: bool
    """Waits were divided by who had not come."""

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization."""
        return None if self.ideal_seconds is None else self.ideal_seconds / self.step_seconds

    @property
    def shares(self) -> Mapping[str, float]:
        """Of the step, of each loss: points of the peak."""
        return {name: seconds / self.step_seconds for name, seconds in self.seconds.items()}

    def waterfall(self) -> list[tuple[str, float, float]]:
        """Name, share lost and share left after it, from the first loss to the last."""
        left, found = 1.0, []
        for name, share in self.shares.items():
            left -= share
            found.append((name, share, left))
        return found


def of_class(kind: str) -> str:
    """The loss that exposed time of a class is."""
    return _OF_CLASS.get(kind, "slower than peak")


def losses(
    table: PhaseTable,
    steps: Sequence[StepSpans] = (),
    *,
    ideal_seconds: float | None = None,
    step_seconds: float | None = None,
) -> Losses | None:
    """``steps``: some of the table's, with their programs; ``ideal_seconds``: of a step at the peak;
    ``step_seconds``: where it is known better than from spans. ``None``: nothing was seen."""
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
    """Moves what was waiting for somebody out of each kind of communication; whether that was known."""
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
