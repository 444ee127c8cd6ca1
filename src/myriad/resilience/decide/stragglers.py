"""Who computes slowly, from how long each rank itself computed in a step. Pure.

Waiting says nothing: when one rank is slow, all others wait for it. So ranks tell the seconds of a step in
which they computed (`RankSeen.busy_seconds`), which are divided by their micro-batches and compared within
one stage of the pipeline, where all do the same:

    stage 0   rank 0  10 ms   rank 2  15 ms   rank 4  10 ms      ratio of rank 2 to the others: 1.5
    stage 1   rank 1  14 ms   rank 3  14 ms   rank 5  14 ms      all alike: the head is here

A rank is slow when the median of its ratios over ten steps is at least 1.3, and hardly any is below 1.2. So
no single step counts, whatever made it slow (its data, a collection, another program for a moment); saves
and evaluations are outside of what is timed. Steps of more than six seconds: those of a minute, at least
three. If all ranks of a node are slow, it is the node; if all of a stage are slower than they were, it is the
work, and nobody is to blame.

A stage that is on one node alone (one replica) has nobody to be compared with but itself, before: there the
ratio is that of a micro-batch's seconds to those of the attempt's beginning, by that of the ranks of other
stages in the same step. Work that grows everywhere, or a beginning in which somebody else was slow, is so
nobody's fault; work that grows in this stage alone cannot be told from its node (`shifting`, beside this,
can: it moves layers). Who was slow from the beginning is not found.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from myriad.resilience.decide.before import Before
from myriad.resilience.decide.work import Work
from myriad.resilience.facts import RankSeen
from myriad.units import format_ranks

__all__ = ["Finding", "Stragglers"]

_RATIO, _HARDLY_ANY_BELOW, _SHARE_ABOVE = 1.3, 1.2, 0.9
_STEPS = 10
_SECONDS, _LEAST_STEPS = 60.0, 3
_WARM_UP_STEPS = 2
_MANY = 32
"""Ranks of a stage whose median one of them hardly changes."""


@dataclass(frozen=True)
class Finding:
    """Somebody is slow."""

    culprit: Literal["rank", "node", "stage"]
    ranks: tuple[int, ...]
    node: int
    """-1: no single one."""
    ratio: float
    """To others of the stage; of a whole stage, to what it was."""
    alone: bool
    """The stage has no others."""
    first_step: int
    last_step: int
    seconds: float
    """Of a micro-batch."""
    usual_seconds: float

    @property
    def text(self) -> str:
        """For people."""
        who = format_ranks(self.ranks)
        if self.culprit == "stage":
            return f"a whole stage takes {self.ratio:.2f} times as long as before: {who}"
        what = f"node {self.node} ({who})" if self.culprit == "node" else f"{who} on node {self.node}"
        than = "before, as no other stage does" if self.alone else "others of the same stage"
        return f"{what} computes {self.ratio:.2f} times as long as {than}"


@dataclass(frozen=True)
class _Sample:
    """Of one step."""

    now: float
    step: int
    seconds: Mapping[int, float]
    """Of a micro-batch, by rank."""
    ratios: dict[int, float]
    """To others, of ranks that have such; of those that have none, to what it was."""


class Stragglers:
    """Of one attempt."""

    def __init__(
        self,
        work: Work,
        placement: Mapping[int, Sequence[int]],
        shares: Sequence[int],
        before: Mapping[int, float] | None = None,
    ) -> None:
        """``shares``: micro-batches of each replica in this attempt; ``before``: seconds of a micro-batch, by
        rank, in an earlier attempt that was alike."""
        self._node_of = {rank: node for node, ranks in placement.items() for rank in ranks}
        world = len(self._node_of)
        places = {rank: work.place(rank, world) for rank in self._node_of}
        self.replica_of = {rank: replica for rank, (replica, _) in places.items()}
        self._share_of = {rank: shares[replica] for rank, replica in self.replica_of.items()}
        self.stages: dict[int, list[int]] = defaultdict(list)
        for rank, (_, stage) in places.items():
            self.stages[stage].append(rank)
        self._samples: deque[_Sample] = deque(maxlen=_STEPS)
        self._first_step: int | None = None
        self.before = Before(self.stages, self._node_of, before or {})
        """In this attempt's first steps."""

    def saw(self, seen: Sequence[RankSeen], now: float) -> bool:
        """All ranks of the attempt; whether that tells something new."""
        step = min((one.step for one in seen), default=-1)
        known = all(one.busy_seconds > 0 and one.rank in self._node_of for one in seen)
        if not seen or not known or len(seen) != len(self._node_of):
            return False
        if self._first_step is None:
            self._first_step = step
        last = self._samples[-1].step if self._samples else self._first_step + _WARM_UP_STEPS - 1
        if step <= last:
            return False
        seconds = {one.rank: one.busy_seconds / self._share_of[one.rank] for one in seen}
        self._samples.append(_Sample(now, step, seconds, self._ratios(seconds)))
        if self.before.learn([one.seconds for one in self._samples], enough=len(self._samples) == _STEPS):
            self._compare_anew()
        return True

    def rebase(self, seconds: Mapping[int, float]) -> None:
        """What each rank would take for a micro-batch if it were not slow is known better now."""
        self.before.seconds |= seconds
        self._compare_anew()

    def _compare_anew(self) -> None:
        for sample in self._samples:
            sample.ratios.update(self._ratios(sample.seconds))

    @property
    def is_sure(self) -> bool:
        """There are enough steps to judge by."""
        samples = self._samples
        long = len(samples) >= _LEAST_STEPS and samples[-1].now - samples[0].now >= _SECONDS
        return len(samples) == _STEPS or long

    @property
    def step(self) -> int:
        """Of the newest sample."""
        return self._samples[-1].step

    def _ratios(self, seconds: Mapping[int, float]) -> dict[int, float]:
        found = self.before.ratios(seconds)
        for ranks in self.stages.values():
            of_all = median(seconds[rank] for rank in ranks)
            for rank in ranks:
                others = [] if len(ranks) >= _MANY else self._others(rank, ranks)
                if others or len(ranks) >= _MANY:
                    usual = median(seconds[other] for other in others) if others else of_all
                    found[rank] = max(seconds[rank] / usual, found.get(rank, 0.0))
        return found

    def _others(self, rank: int, ranks: Sequence[int]) -> list[int]:
        """Of a stage with few ranks: those on other nodes, as a node may be slow as a whole."""
        elsewhere = [other for other in ranks if self._node_of[other] != self._node_of[rank]]
        return elsewhere or [other for other in ranks if other != rank]

    def usual(self, rank: int) -> float:
        """Seconds of a micro-batch."""
        return median(sample.seconds[rank] for sample in self._samples)

    def ratio(self, rank: int) -> float:
        """Median over the steps; 1 where there is nobody to compare with."""
        return median(sample.ratios.get(rank, 1.0) for sample in self._samples)

    def _is_slow(self, rank: int) -> bool:
        ratios = [sample.ratios.get(rank, 1.0) for sample in self._samples]
        above = sum(ratio >= _HARDLY_ANY_BELOW for ratio in ratios)
        return above >= _SHARE_ABOVE * len(ratios) and median(ratios) >= _RATIO

    @property
    def all_alike(self) -> bool:
        """Nobody is even nearly slow."""
        return self.is_sure and all(self.ratio(rank) < _HARDLY_ANY_BELOW for rank in self._node_of)

    def found(self) -> Finding | None:
        """Who is slow; of several the slowest."""
        if not self.is_sure:
            return None
        slow = [rank for rank in self._node_of if self._is_slow(rank)]
        if not slow:
            return self._slow_stage()
        worst = max(slow, key=self.ratio)
        node = self._node_of[worst]
        compared = [rank for rank in self._node_of if self._node_of[rank] == node]
        if len(compared) > 1 and set(compared) <= set(slow):
            return self._finding("node", compared, node)
        return self._finding("rank", [worst], node)

    def _slow_stage(self) -> Finding | None:
        """All ranks of a stage take longer than in the first steps, and none longer than others."""
        before = self.before
        if not before.seconds:
            return None
        newest = self._samples[-1].seconds
        for ranks in self.stages.values():
            if any(before.growth(newest, rank) < 1 for rank in ranks):
                continue  # no need to look closer
            ratio = min(self.usual(rank) / before.seconds[rank] for rank in ranks)
            by_itself = any(rank in before.alone and self.ratio(rank) >= _HARDLY_ANY_BELOW for rank in ranks)
            if ratio >= _RATIO and not by_itself:
                usual = median(before.seconds[rank] for rank in ranks)
                return self._of("stage", ranks, -1, ratio, usual)
        return None

    def _finding(self, culprit: Literal["rank", "node"], ranks: Sequence[int], node: int) -> Finding:
        ratio = median(self.ratio(rank) for rank in ranks)
        usual = median(self.usual(rank) for rank in ranks) / ratio
        return self._of(culprit, ranks, node, ratio, usual)

    def _of(
        self,
        culprit: Literal["rank", "node", "stage"],
        ranks: Sequence[int],
        node: int,
        ratio: float,
        usual: float,
    ) -> Finding:
        first, last = self._samples[0].step, self._samples[-1].step
        seconds = median(self.usual(rank) for rank in ranks)
        alone = culprit != "stage" and all(rank in self.before.alone for rank in ranks)
        return Finding(culprit, tuple(sorted(ranks)), node, ratio, alone, first, last, seconds, usual)

    def paces(self) -> list[float]:
        """Seconds of a micro-batch of each replica: of its slowest rank."""
        found: dict[int, float] = defaultdict(float)
        for rank, replica in self.replica_of.items():
            found[replica] = max(found[replica], self.usual(rank))
        return [found[replica] for replica in sorted(found)]
