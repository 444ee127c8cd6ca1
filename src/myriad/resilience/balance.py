"""What is done about slow ranks: told, and work moved away from them or a spare put in their place. Pure.

    equal     rank 0  4 x 10 ms                 rank 1  4 x 15 ms     a step takes 60 ms
    moved     rank 0  5 x 10 ms                 rank 1  3 x 15 ms                  50 ms

Shares are whole micro-batches; of all that are allowed those with the shortest step. Ranks end after a step,
with a snapshot in memory, and begin again with other shares: so it must pay for itself, and nobody moves
again for five minutes. When the slow one is as fast as the others again, work moves back the same way.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from myriad.comm.attempt_layout import AttemptLayout
from myriad.resilience.actions import TellSlow, TurnRanks
from myriad.resilience.facts import RankSeen
from myriad.resilience.stragglers import Finding, Stragglers
from myriad.resilience.work import Work

__all__ = ["Balance", "best_shares", "step_seconds"]

_LEAST_GAIN_RATIO = 0.1
_AS_GOOD_RATIO = 1.05
"""Shares of the job that are nearly the best are taken before the best."""
_BETWEEN_SECONDS = 300.0
_LEAST_START_SECONDS, _PAYS_TIMES = 3.0, 2.0
"""A move must gain so many times what the start of an attempt takes, which is at least so long."""


def step_seconds(paces: Sequence[float], shares: Sequence[int], depth: int) -> float:
    """Of a step: ``paces`` are seconds of a micro-batch of each replica, in a pipeline of ``depth`` ranks."""
    return max(pace * (share + depth - 1) for pace, share in zip(paces, shares, strict=True))


def best_shares(paces: Sequence[float], total: int, most: int, depth: int) -> tuple[int, ...]:
    """Of ``total`` micro-batches at least one and at most ``most`` for each: those with the shortest step.
    One after the other goes to whoever is then done first."""
    shares = [1] * len(paces)
    ends = [(pace * (1 + depth), replica) for replica, pace in enumerate(paces)]
    heapq.heapify(ends)
    for _ in range(total - len(paces)):
        _, replica = heapq.heappop(ends)
        shares[replica] += 1
        if shares[replica] < most:
            heapq.heappush(ends, (paces[replica] * (shares[replica] + depth), replica))
    return tuple(shares)


class Balance:
    """Of one run."""

    def __init__(self, work: Work, patience: float) -> None:
        self._job, self._work, self._patience = work, work, patience
        self._layout = AttemptLayout()
        self._stragglers: Stragglers | None = None
        self._shares = work.shares
        self._told: set[tuple[str, tuple[int, ...]]] = set()
        self._move_at, self._began = 0.0, 0.0
        self._start_seconds: float | None = None

    def begin(self, placement: Mapping[int, Sequence[int]], layout: AttemptLayout, now: float) -> None:
        """A new attempt, or a new driver of one."""
        self._layout, self._work = layout, self._job.in_attempt(layout)
        shares = layout.shares or self._work.shares
        if shares != self._shares and len(shares) == len(self._shares):
            self._move_at = now + _BETWEEN_SECONDS * self._patience
        self._shares, self._began, self._start_seconds = shares, now, None
        self._stragglers = Stragglers(self._work, placement, shares)

    def stand_still(self) -> None:
        """It is not known who has how much of this attempt: nobody is compared until the next one."""
        self._stragglers = None

    def saw(
        self, seen: Sequence[RankSeen], now: float, epoch: int, *, spares: bool
    ) -> Iterator[TellSlow | TurnRanks]:
        """All ranks, while they train. ``spares``: nodes stand by."""
        stragglers = self._stragglers
        if stragglers is None:
            return
        if self._start_seconds is None and all(one.step_seconds > 0 for one in seen):
            self._start_seconds = max(_LEAST_START_SECONDS, now - self._began)
        if not stragglers.saw(seen, now) or not stragglers.is_sure:
            return
        finding = stragglers.found()
        yield from self._tell(finding, stragglers)
        if self._work.on_slow != "tell" and now >= self._move_at:
            yield from self._act(finding, stragglers, now, epoch, spares=spares)

    def _tell(self, finding: Finding | None, stragglers: Stragglers) -> Iterator[TellSlow]:
        """Once, until all are alike again."""
        if finding is None:
            if stragglers.all_alike:
                self._told.clear()
            return
        key = finding.culprit, finding.ranks
        if key in self._told:
            return
        self._told.add(key)
        yield TellSlow(
            rule="a whole stage is slow" if finding.culprit == "stage" else "slower than others of its stage",
            evidence=_evidence(finding),
            culprit=finding.culprit,
            ranks=finding.ranks,
            node=finding.node,
            step=finding.last_step,
            problem=finding.text,
        )

    def _act(
        self, finding: Finding | None, stragglers: Stragglers, now: float, epoch: int, *, spares: bool
    ) -> Iterator[TurnRanks]:
        blamed = finding is not None and finding.culprit != "stage"
        if finding is not None and blamed and self._work.on_slow == "swap" and spares:
            self._move_at = now + _BETWEEN_SECONDS * self._patience
            rule = "a node is slow, and a spare is there"
            yield TurnRanks(rule=rule, evidence=_evidence(finding), epoch=epoch, node=finding.node)
            return
        if not blamed and self._shares == self._work.shares:
            return
        paces, depth = stragglers.paces(), self._work.pp
        shares = self._better(paces)
        old, new = (step_seconds(paces, each, depth) for each in (self._shares, shares))
        gained = (old - new) * (self._work.steps - stragglers.step)
        cost = _PAYS_TIMES * (self._start_seconds or _LEAST_START_SECONDS)
        if old - new < _LEAST_GAIN_RATIO * old or gained < cost:
            return
        self._move_at = now + _BETWEEN_SECONDS * self._patience
        evidence = {
            "seconds_per_micro_batch": [round(pace, 6) for pace in paces],
            "shares_before": list(self._shares),
            "step_seconds": [round(old, 6), round(new, 6)],
        }
        rule = "work moves away from slow ranks" if blamed else "ranks are as fast as others again"
        layout = replace(self._layout, shares=shares)
        yield TurnRanks(rule=rule, evidence=evidence, epoch=epoch, layout=layout)

    def _better(self, paces: Sequence[float]) -> tuple[int, ...]:
        work = self._work
        best = best_shares(paces, sum(work.shares), work.most_share, work.pp)
        longest = _AS_GOOD_RATIO * step_seconds(paces, best, work.pp)
        return work.shares if step_seconds(paces, work.shares, work.pp) <= longest else best


def _evidence(finding: Finding) -> dict[str, object]:
    return {
        "ratio": round(finding.ratio, 3),
        "steps": [finding.first_step, finding.last_step],
        "seconds_per_micro_batch": round(finding.seconds, 6),
        "usual_seconds_per_micro_batch": round(finding.usual_seconds, 6),
    }
