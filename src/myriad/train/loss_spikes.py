"""Detect steps whose loss or gradient norm is far above those of the steps before.

A spike is found in the same step, on every rank alike, before the update.

    gradient norm   0.9 1.1 1.0 0.9 1.0  31.2      a spike: computed once more in place
                                          1.0      gone: it was chance, and this is the step
                                         31.2      again: it is of the batch, the model or a node that is
                                                   wrong the same way each time; skipped, or rolled back

All ranks know the same sums to the bit, so no communication is needed. Far above is more than seven standard
deviations. OLMo 2 (arXiv 2501.00656) counts spikes so, from a rolling mean. Here the median replaces the
mean, and the median absolute deviation the standard deviation, so that a spike hides no other one. A window
in which nothing changes has hardly any deviation. A spike is therefore also more than twice the median norm,
or 1.1 times the median loss. A falling loss is no spike. The history starts empty in each attempt.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from myriad.errors import RunFailedError
from myriad.job import Job
from myriad.parallel.optimizer_step import StepResult

__all__ = ["SpikeDetector", "SpikePolicy"]

_WINDOW, _LEAST = 128, 32
_DEVIATIONS, _OF_NORMAL = 7.0, 1.4826
"""Limit in standard deviations, and the ratio of a normal distribution's standard deviation to its median
absolute deviation."""
_LEAST_RATIOS = {"loss": 1.1, "gradient norm": 2.0}
_MOST_SKIPPED = 16
"""Consecutive spikes that are skipped; after that, the values are taken as normal."""


class SpikeDetector:
    """The losses and gradient norms of recent steps of one attempt."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[float]] = {name: deque(maxlen=_WINDOW) for name in _LEAST_RATIOS}

    def add(self, loss: float, grad_norm: float) -> None:
        """Add a step to the history."""
        for name, value in self._named(loss, grad_norm):
            self._seen[name].append(value)

    def find(self, loss: float, grad_norm: float) -> str | None:
        """Return a description if a step is far above the ones before, else ``None``."""
        for name, value in self._named(loss, grad_norm):
            before = self._seen[name]
            middle = median(before) if len(before) >= _LEAST else math.inf
            if value > _LEAST_RATIOS[name] * middle and value > (limit := _limit(before, middle)):
                usual = f"the median of {len(before)} steps is {middle:.4g}, the limit {limit:.4g}"
                return f"{name} {value:.4g}, {usual}"
        return None

    @staticmethod
    def _named(loss: float, grad_norm: float) -> Sequence[tuple[str, float]]:
        return ("gradient norm", grad_norm), ("loss", loss)


def _limit(before: Sequence[float], middle: float) -> float:
    return middle + _DEVIATIONS * _OF_NORMAL * median(abs(value - middle) for value in before)


class SpikePolicy:
    """Detect spikes and react to them according to ``resilience.on_spike``."""

    def __init__(self, job: Job, append_event: Callable[..., Any]) -> None:
        """``append_event`` writes an event to the run's log."""
        self._policy, self._append_event = job.resilience.on_spike, append_event
        self._spikes = SpikeDetector()
        self._in_a_row = 0

    def forget(self) -> None:
        """Begin a new history, because another phase of the job has other losses."""
        self._spikes = SpikeDetector()

    def refuses(self, loss: float, grad_norm: float) -> bool:
        """Return whether the engine must skip the update of a step with this loss and norm."""
        if self._policy == "report" or self._in_a_row >= _MOST_SKIPPED:
            return False
        return self._spikes.find(loss, grad_norm) is not None

    def review(self, step: int, result: StepResult, rerun: Callable[[], StepResult]) -> StepResult:
        """Return the result that counts for a step: ``result``, or, if the engine skipped the step, that of
        ``rerun``, which computes it once more. Both iterations skip what `refuses` refuses. Raises
        `RunFailedError` on every rank if the run must roll back before the step."""
        if result.overflow:  # an overflow of the loss scale has no norm and is not caused by the batch
            return result
        problem = self._spikes.find(result.loss, result.grad_norm)
        again = rerun() if result.skipped else result
        if problem is not None and (result.skipped or not self._in_a_row):
            self._report(step, problem, result, again)
        if again.overflow:
            return again
        gone = problem is None or (result.skipped and not again.skipped)
        self._in_a_row = 0 if gone else self._in_a_row + 1
        if not again.skipped:
            self._spikes.add(again.loss, again.grad_norm)
        elif self._policy == "rollback":
            raise RunFailedError(f"step {step}: the spike recurred when the step was recomputed: {problem}")
        return again

    def _report(self, step: int, problem: str, first: StepResult, again: StepResult) -> None:
        verdict = "transient" if first.skipped and not again.skipped else "stays"
        fields = {"verdict": verdict} if first.skipped else {}
        self._append_event(
            "spike", step=step, problem=problem, loss=first.loss, grad_norm=first.grad_norm, **fields
        )
