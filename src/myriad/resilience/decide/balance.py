"""What is done about slow ranks: told, and work moved away from them or a spare put in their place. Pure.

    equal     rank 0  4 x 10 ms                 rank 1  4 x 15 ms     a step takes 60 ms
    moved     rank 0  5 x 10 ms                 rank 1  3 x 15 ms                  50 ms

Shares are whole micro-batches; of all that are allowed those with the shortest step. Ranks end after a step,
with a snapshot in memory, and begin again with other shares: so it must pay for itself, and nobody moves
again for five minutes. When the slow one is as fast as the others again, work moves back the same way.

Where no other replica can take its work, as there is none, or all are on the slow node, the other stages of
the pipeline take some of its layers (`myriad.resilience.decide.shifting`), by the same thresholds.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from myriad.comm.attempt_layout import AttemptLayout
from myriad.resilience.decide.actions import TellSlow, TurnRanks
from myriad.resilience.decide.evictions import RULES_OF_LEAVING
from myriad.resilience.decide.layers import Moved
from myriad.resilience.decide.shifting import AS_GOOD_RATIO, Better, Shifting
from myriad.resilience.decide.stragglers import Finding, Stragglers
from myriad.resilience.decide.work import Work
from myriad.resilience.facts import RankSeen
from myriad.units import format_ranks

__all__ = ["Balance", "best_shares", "step_seconds"]

_LEAST_GAIN_RATIO, _LEAST_GAIN_BACK_RATIO = 0.1, 0.03
"""Of a step; of going back to what the job says."""
_BETWEEN_SECONDS = 300.0
_LOOK_SECONDS = 5.0
"""Between two looks for better cuts: with many layers and stages each takes a tenth of a second."""
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
        self._move_at, self._look_at, self._began = 0.0, 0.0, 0.0
        self._start_seconds: float | None = None
        self._placement: dict[int, tuple[int, ...]] = {}
        self._shifting = None if work.pipeline is None else Shifting(work.pipeline)

    def begin(
        self,
        placement: Mapping[int, Sequence[int]],
        layout: AttemptLayout,
        now: float,
        moved: Moved | None = None,
    ) -> None:
        """A new attempt, or a new driver of one; ``moved``: what was known when its layers were."""
        ranks_of = {node: tuple(ranks) for node, ranks in placement.items()}
        alike = ranks_of == self._placement and layout == self._layout
        before = self._stragglers.before.seconds if alike and self._stragglers is not None else {}
        shares = layout.shares or self._job.in_attempt(layout).shares
        moved_shares = shares != self._shares and len(shares) == len(self._shares)
        if moved_shares or layout.partition != self._layout.partition:
            self._move_at = now + _BETWEEN_SECONDS * self._patience
        self._layout, self._work, self._placement = layout, self._job.in_attempt(layout), ranks_of
        self._shares, self._began, self._start_seconds = shares, now, None
        self._stragglers = Stragglers(self._work, placement, shares, before)
        if self._shifting is not None:
            self._shifting.begin(layout, moved, judge=not before)

    def stand_still(self) -> None:
        """It is not known who has how much of this attempt: nobody is compared until the next one."""
        self._stragglers = None

    def keep_layers(self) -> None:
        """No layer is moved any more."""
        self._shifting = None

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
        if self._shifting is not None and self._shifting.judge(stragglers) == "layers":
            yield _tell_layers(self._shifting, stragglers)
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
            rule=_rule(finding),
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
            rule = RULES_OF_LEAVING["slow"]
            yield TurnRanks(rule=rule, evidence=_evidence(finding), epoch=epoch, node=finding.node)
            return
        turn = self._other_shares(stragglers, blamed=blamed)
        turn = turn or self._other_layers(finding, stragglers, now)
        if turn is not None:
            self._move_at = now + _BETWEEN_SECONDS * self._patience
            yield replace(turn, epoch=epoch)

    def _other_shares(self, stragglers: Stragglers, *, blamed: bool) -> TurnRanks | None:
        """Micro-batches from one replica to others."""
        if not blamed and self._shares == self._work.shares:
            return None
        paces, depth = stragglers.paces(), self._work.pp
        shares = self._better(paces)
        old, new = (step_seconds(paces, each, depth) for each in (self._shares, shares))
        if not self._pays(old, new, stragglers):
            return None
        evidence = {
            "seconds_per_micro_batch": [round(pace, 6) for pace in paces],
            "shares_before": list(self._shares),
            "step_seconds": [round(old, 6), round(new, 6)],
        }
        rule = "work moves away from slow ranks" if blamed else "ranks are as fast as others again"
        layout = replace(self._layout, shares=shares)
        moved = None if self._shifting is None else self._shifting.moved
        return TurnRanks(rule=rule, evidence=evidence, epoch=0, layout=layout, moved=moved)

    def _other_layers(self, finding: Finding | None, stragglers: Stragglers, now: float) -> TurnRanks | None:
        """Layers from one stage to others: what shares cannot do, or what is to be undone."""
        shifting = self._shifting
        blamed = finding is not None and finding.culprit != "stage"
        alone = finding is not None and blamed and (finding.alone or self._work.dp == 1)
        if shifting is None or not (alone or shifting.has_moved) or now < self._look_at:
            return None
        self._look_at = now + _LOOK_SECONDS
        better = shifting.better(stragglers, max(self._shares))
        if better is None:
            return None
        goes_back = not blamed and shifting.partition(better.cuts) is None
        least = _LEAST_GAIN_BACK_RATIO if goes_back else _LEAST_GAIN_RATIO
        if not self._pays(better.old_seconds, better.new_seconds, stragglers, least):
            return None
        rule = "layers move away from slow ranks" if blamed else "ranks are as fast as before again"
        layout = replace(self._layout, partition=shifting.partition(better.cuts))
        moved = None if layout.partition is None else better.moved
        return TurnRanks(rule=rule, evidence=_layers_evidence(better), epoch=0, layout=layout, moved=moved)

    def _pays(self, old: float, new: float, stragglers: Stragglers, least: float = _LEAST_GAIN_RATIO) -> bool:
        """Steps of so many seconds instead of so many."""
        gained = (old - new) * (self._work.steps - stragglers.step)
        cost = _PAYS_TIMES * (self._start_seconds or _LEAST_START_SECONDS)
        return old - new >= least * old and gained >= cost

    def _better(self, paces: Sequence[float]) -> tuple[int, ...]:
        work = self._work
        best = best_shares(paces, sum(work.shares), work.most_share, work.pp)
        longest = AS_GOOD_RATIO * step_seconds(paces, best, work.pp)
        return work.shares if step_seconds(paces, work.shares, work.pp) <= longest else best


def _rule(finding: Finding) -> str:
    if finding.culprit == "stage":
        return "a whole stage is slow"
    return "slower than before, unlike others" if finding.alone else "slower than others of its stage"


def _tell_layers(shifting: Shifting, stragglers: Stragglers) -> TellSlow:
    """They were moved, and are as slow where they are now."""
    assert shifting.moved is not None, "it was judged"
    layers, ranks = shifting.slow_layers(), sorted(rank for of in stragglers.stages.values() for rank in of)
    text = f"{len(layers)} layers take as long on other ranks, too: it is their work ({format_ranks(ranks)})"
    return TellSlow(
        rule="slowness went along with layers",
        evidence={"layers": list(layers)},
        culprit="stage",
        ranks=tuple(ranks),
        node=-1,
        step=stragglers.step,
        problem=text,
    )


def _layers_evidence(better: Better) -> dict[str, object]:
    return {
        "seconds_per_micro_batch": [round(pace, 6) for pace in better.paces],
        "times": [round(one, 3) for one in better.moved.times],
        "cuts_before": list(better.moved.cuts),
        "step_seconds": [round(better.old_seconds, 6), round(better.new_seconds, 6)],
    }


def _evidence(finding: Finding) -> dict[str, object]:
    return {
        "ratio": round(finding.ratio, 3),
        "steps": [finding.first_step, finding.last_step],
        "seconds_per_micro_batch": round(finding.seconds, 6),
        "usual_seconds_per_micro_batch": round(finding.usual_seconds, 6),
    }
