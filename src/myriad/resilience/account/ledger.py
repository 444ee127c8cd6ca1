"""Where a run's time went: every second of every attempt in exactly one class, in all the wall time.

    ledger.until(now, "training")       what the time since the last call was
    ledger.until(now, {"training": 0.99, "saving": 0.01})
    ledger.lose(30.0)                   of training that counted, the last 30 s have to be done again

There is one cursor, which only moves forward, so no second is left out and none counts twice, whoever keeps
the ledger: a simulation, or a reader of a run's events. Steps that were lost are charged where they were done
first; doing them again is training like any other. Spare nodes are charged beside it: they stand, but no
second of the run's is theirs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

__all__ = ["KINDS", "Kind", "Ledger", "Stretch"]

Kind = Literal[
    "training",
    "lost",
    "saving",
    "validating",
    "checking",
    "slow",
    "detecting",
    "diagnosing",
    "restarting",
    "planned",
    "waiting",
    "person",
]
"""Training that counts; training that was lost; stalls for saving; evaluation; checks in gaps; what a
straggler costs; a fault that is not detected yet; the search for its cause; from decision to first step;
a stop that a person wanted; waiting for a node; the run has stopped and waits for an operator."""
KINDS: tuple[Kind, ...] = get_args(Kind)
_CLOSE = 1e-6


@dataclass(frozen=True)
class Stretch:
    """Some time of one attempt."""

    attempt: int
    start: float
    stop: float
    shares: Mapping[Kind, float]
    """In all 1."""

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.stop - self.start


class Ledger:
    """Of one run."""

    def __init__(self, began: float = 0.0) -> None:
        self.began = self.now = began
        self.attempt = 0
        self.stretches: list[Stretch] = []
        self.spare_node_seconds = 0.0

    def until(self, now: float, what: Kind | Mapping[Kind, float], *, spares: int = 0) -> None:
        """All time since the last call was of one class, or of several by their shares; so many spare nodes
        stood by."""
        shares: Mapping[Kind, float] = {what: 1.0} if isinstance(what, str) else what
        assert now >= self.now, "a ledger goes forward"
        assert abs(sum(shares.values()) - 1) < _CLOSE and min(shares.values()) >= 0, "shares of one whole"
        if now > self.now:
            last = self.stretches[-1] if self.stretches else None
            if last is not None and (last.attempt, last.stop, last.shares) == (
                self.attempt,
                self.now,
                shares,
            ):
                self.stretches[-1] = Stretch(last.attempt, last.start, now, shares)
            else:
                self.stretches.append(Stretch(self.attempt, self.now, now, shares))
            self.spare_node_seconds += spares * (now - self.now)
        self.now = now

    def lose(self, seconds: float) -> None:
        """The newest training that counts has to be done again."""
        for index in range(len(self.stretches) - 1, -1, -1):
            if seconds <= 0:
                return
            stretch = self.stretches[index]
            share = stretch.shares.get("training", 0.0)
            if not share:
                continue
            cut = max(stretch.start, stretch.stop - seconds / share)
            kept, lost = replace(stretch, stop=cut), replace(stretch, start=cut, shares=_lost(stretch.shares))
            self.stretches[index : index + 1] = [kept, lost] if kept.seconds > 0 else [lost]
            seconds -= share * lost.seconds
        assert seconds < _CLOSE * max(1.0, self.wall_seconds), "more is lost than was done"

    @property
    def wall_seconds(self) -> float:
        """From begin to now."""
        return self.now - self.began

    def seconds(self, attempt: int | None = None) -> dict[Kind, float]:
        """Of each class; of one attempt, or of all."""
        found = dict.fromkeys(KINDS, 0.0)
        for number, seconds in self.by_attempt().items():
            if attempt in (None, number):
                for kind in KINDS:
                    found[kind] += seconds[kind]
        return found

    def by_attempt(self) -> dict[int, dict[Kind, float]]:
        """Of each class, of each attempt."""
        found: dict[int, dict[Kind, float]] = {}
        for stretch in self.stretches:
            seconds = found.setdefault(stretch.attempt, dict.fromkeys(KINDS, 0.0))
            for kind, share in stretch.shares.items():
                seconds[kind] += share * stretch.seconds
        return found

    @property
    def effective_ratio(self) -> float:
        """Effective training time ratio: iterations done x iteration time / wall time."""
        return self.seconds()["training"] / self.wall_seconds if self.wall_seconds else 1.0


def _lost(shares: Mapping[Kind, float]) -> Mapping[Kind, float]:
    rest = {kind: share for kind, share in shares.items() if kind not in ("training", "lost")}
    return {**rest, "lost": shares.get("training", 0.0) + shares.get("lost", 0.0)}
