"""Ranks that nobody is like: what each takes, compared with what it took, and with others in the same. Pure.

    first     stage 0  10 ms     stage 1  14 ms     stage 2  10 ms
    now       stage 0  11 ms     stage 1  22 ms     stage 2  10 ms      stage 1: 1.57, others 1.05; ratio 1.5

What it was is the median of the first steps. Somebody who was held up by something in those would make the
others look slow later: so it becomes less when a rank is quicker in each of as many steps, and a ratio is no
greater than that to oneself before.
"""

from collections.abc import Mapping, Sequence
from statistics import median

__all__ = ["Before"]


class Before:
    """Of one attempt."""

    def __init__(
        self, stages: Mapping[int, Sequence[int]], node_of: Mapping[int, int], seconds: Mapping[int, float]
    ) -> None:
        """``seconds``: of a micro-batch, by rank, where an earlier attempt has told; else empty."""
        self.seconds = dict(seconds)
        self.others: dict[int, list[int]] = {}
        """Of each rank of a stage that is on one node alone: ranks of other stages, on other nodes where
        there are such."""
        for ranks in stages.values() if len(stages) > 1 else ():
            nodes = {node_of[rank] for rank in ranks}
            elsewhere = [rank for rank in node_of if node_of[rank] not in nodes]
            if len(ranks) == 1:
                elsewhere = elsewhere or [rank for rank in node_of if rank not in ranks]
            if len(nodes) == 1 and elsewhere:
                self.others |= dict.fromkeys(ranks, elsewhere)

    def learn(self, steps: Sequence[Mapping[int, float]], *, enough: bool) -> None:
        """The newest steps' seconds; ``enough``: as many as a median is taken of."""
        if not enough:
            return
        if not self.seconds:
            self.seconds = {rank: median(step[rank] for step in steps) for rank in steps[-1]}
        for rank in self.others:
            if (most := max(step[rank] for step in steps)) < self.seconds[rank]:
                self.seconds[rank] = most

    def growth(self, seconds: Mapping[int, float], rank: int) -> float:
        """Times that a rank takes as long as before."""
        return seconds[rank] / self.seconds[rank]

    def of_others(self, seconds: Mapping[int, float], rank: int) -> float:
        """The same of those it is compared with."""
        return median(self.growth(seconds, other) for other in self.others[rank])

    def ratio(self, seconds: Mapping[int, float], rank: int) -> float:
        """1 where nothing is known."""
        if not self.seconds or rank not in self.others:
            return 1.0
        own = self.growth(seconds, rank)
        return min(own, own / self.of_others(seconds, rank))
