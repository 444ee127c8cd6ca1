"""How far a simulated run has come, and the ledger of its time.

``done`` counts seconds of training that are not lost: it is the ledger's class "training", and falls when an
attempt goes on from an older step.
"""

from collections.abc import Mapping
from math import floor

from myriad.resilience.account.ledger import Kind, Ledger
from myriad.resilience.weeks.times import Times

__all__ = ["Work"]

_SOME = 1e-9


class Work:
    """Of one run."""

    def __init__(self, times: Times) -> None:
        self._times = times
        self.ledger = Ledger()
        self.doing: Kind = "restarting"
        self.slower_ratio = 0.0
        """How much longer a step takes now than without a straggler."""
        self.done = 0.0

    def until(self, now: float, spares: int) -> None:
        """Time has passed with the same."""
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
        """Under way."""
        return floor(self.done / self._times.step_seconds + _SOME)

    def until_step_end(self) -> float:
        """Seconds, as long as nothing else happens."""
        left = (self.step + 1) * self._times.step_seconds - self.done
        return left / self._shares()["training"]

    def in_memory(self, every: float, *, trained: bool) -> float:
        """Where the newest snapshot in memory was taken: that of a step is whole when the next one ends.
        ``trained``: something was done since the attempt began."""
        whole = self.done / self._times.step_seconds - trained
        return max(0.0, floor(whole / every + _SOME) * every * self._times.step_seconds)

    def durable(self, done: float) -> float:
        """Where the newest durable checkpoint was, when so much was done."""
        return floor(done / self._times.durable_seconds + _SOME) * self._times.durable_seconds

    def go_back(self, done: float) -> None:
        """What came after is lost."""
        if done < self.done:
            self.ledger.lose(self.done - done)
            self.done = done
