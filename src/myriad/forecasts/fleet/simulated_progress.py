"""The progress of a simulated run, and the ledger of its time.

``done`` counts seconds of training that are not lost. It is the ledger's class "training", and falls when an
attempt resumes from an older step.
"""

from collections.abc import Mapping
from math import floor

from myriad.forecasts.fleet.policy_times import PolicyTimes
from myriad.supervise.accounting.ledger import Kind, Ledger

__all__ = ["RunProgress"]

_SOME = 1e-9


class RunProgress:
    """Progress and ledger of one run."""

    def __init__(self, times: PolicyTimes) -> None:
        self._times = times
        self.ledger = Ledger()
        self.doing: Kind = "starting"
        self.slower_ratio = 0.0
        """Relative increase of the step time by a straggler."""
        self.done = 0.0

    def until(self, now: float, spares: int) -> None:
        """Advance to ``now`` in the same state."""
        seconds = now - self.ledger.now
        if self.doing != "training":
            self.ledger.until(now, self.doing, spares=spares)
            return
        shares = self._shares()
        self.done += seconds * shares["training"]
        self.ledger.until(now, shares, spares=spares)

    def _shares(self) -> Mapping[Kind, float]:
        stepping = 1.0 - self._times.saving_ratio
        useful = stepping / (1.0 + self.slower_ratio)
        return {"training": useful, "saving": self._times.saving_ratio, "slow": stepping - useful}

    @property
    def step(self) -> int:
        """Number of the step that is being computed."""
        return floor(self.done / self._times.step_seconds + _SOME)

    def until_step_end(self) -> float:
        """Return the seconds to the end of the step if nothing else happens."""
        left = (self.step + 1) * self._times.step_seconds - self.done
        return left / self._shares()["training"]

    def in_memory(self, every: float, *, trained: bool) -> float:
        """Return the progress at the newest committed snapshot in memory: the snapshot of a step is
        committed when the next step ends. ``trained``: the attempt has done steps."""
        whole = self.done / self._times.step_seconds - trained
        return max(0.0, floor(whole / every + _SOME) * every * self._times.step_seconds)

    def durable(self, done: float) -> float:
        """Return the progress at the newest durable checkpoint, given the progress now."""
        return floor(done / self._times.durable_seconds + _SOME) * self._times.durable_seconds

    def roll_back(self, done: float) -> None:
        """Roll back to an earlier progress; the rest is lost."""
        if done < self.done:
            self.ledger.lose(self.done - done)
            self.done = done
