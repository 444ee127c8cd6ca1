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
        self._alone: list[tuple[list[int], list[int]]] = []
        """Ranks of a stage that is on one node alone; ranks of other stages, on other nodes where there are
        such."""
        for ranks in stages.values() if len(stages) > 1 else ():
            nodes = {node_of[rank] for rank in ranks}
            others = [rank for rank in node_of if node_of[rank] not in nodes]
            if len(ranks) == 1:
                others = others or [rank for rank in node_of if rank not in ranks]
            if len(nodes) == 1 and others:
                self._alone.append((list(ranks), others))
        self.alone = frozenset(rank for ranks, _ in self._alone for rank in ranks)

    def learn(self, steps: Sequence[Mapping[int, float]], *, enough: bool) -> bool:
        """The newest steps' seconds; ``enough``: as many as a median is taken of. Whether it is otherwise now
        than was believed."""
        if not enough:
            return False
        changed = not self.seconds
        if changed:
            self.seconds = {rank: median(step[rank] for step in steps) for rank in steps[-1]}
        for rank in self.alone:
            if (most := max(step[rank] for step in steps)) < self.seconds[rank]:
                self.seconds[rank], changed = most, True
        return changed

    def growth(self, seconds: Mapping[int, float], rank: int) -> float:
        """Times that a rank takes as long as before."""
        return seconds[rank] / self.seconds[rank]

    def ratios(self, seconds: Mapping[int, float]) -> dict[int, float]:
        """Of the ranks of stages that are alone, once anything is known."""
        if not self.seconds or not self._alone:
            return {}
        growth = {rank: self.growth(seconds, rank) for rank in seconds}
        found: dict[int, float] = {}
        for ranks, others in self._alone:
            of_others = median(growth[rank] for rank in others)
            found |= {rank: min(growth[rank], growth[rank] / of_others) for rank in ranks}
        return found
