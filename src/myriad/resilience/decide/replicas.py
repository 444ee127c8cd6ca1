"""Whether replicas hold what they are to hold alike, from the digests that their ranks tell.

    step      10      20      30
    rank 0    a       b       c
    rank 1    a       b       c'     differs from the majority: it is named
    rank 2    a       b       c      agreed: 20

Digests of one step are compared when all ranks of a group have told theirs, however late; those of different
steps never. Two replicas that differ are both suspect: nothing says which of them is wrong.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from myriad.resilience.facts import Digest
from myriad.units import format_ranks

__all__ = ["Difference", "Replicas"]

_KEPT_STEPS = 64
"""With digests that are not complete: a rank that is so far behind has lost what the others have told."""


@dataclass(frozen=True)
class Difference:
    """Replicas that differ."""

    step: int
    suspects: tuple[int, ...]
    others: tuple[int, ...]
    """Who agree; none: there is no majority."""

    @property
    def text(self) -> str:
        """For the user."""
        who, where = format_ranks(self.suspects), f"after step {self.step}"
        if self.others:
            holds = "holds" if len(self.suspects) == 1 else "hold"
            return f"{who} {holds} other parameters than {format_ranks(self.others)} {where}"
        return f"{who} hold different parameters {where}, and nothing says whose are wrong"


class Replicas:
    """Of one attempt."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self._groups = [tuple(group) for group in groups]
        self._world = {rank for group in groups for rank in group}
        self._told: dict[int, dict[int, int]] = defaultdict(dict)
        self._has_news = False
        """A group of some step is complete since the last look: of 12,288 ranks nobody looks at each beat."""
        self._missing: dict[tuple[int, int], int] = {}
        """Step and group to how many of its ranks have not told yet."""
        self._group_of = {rank: index for index, group in enumerate(self._groups) for rank in group}
        self.agreed = -1
        """The newest step after which all held the same."""

    def saw(self, rank: int, digests: Iterable[Digest]) -> None:
        """What one of them has told."""
        if rank in self._world:
            for one in digests:
                if one.step > self.agreed and rank not in self._told[one.step]:
                    self._told[one.step][rank] = one.value
                    self._count(one.step, self._group_of[rank])

    def _count(self, step: int, group: int) -> None:
        if len(self._told) > _KEPT_STEPS:
            self._forget(oldest := min(self._told))
            if oldest == step:
                return
        left = self._missing.get((step, group), len(self._groups[group])) - 1
        self._missing[step, group] = left
        self._has_news |= left == 0

    def look(self) -> Difference | None:
        """Compares what is complete, the earliest first."""
        if not self._has_news:
            return None
        self._has_news = False
        for step in sorted(self._told):
            told = self._told[step]
            complete = [group for group in self._groups if all(rank in told for rank in group)]
            if differing := [group for group in complete if len({told[rank] for rank in group}) > 1]:
                return _difference(step, differing, told)
            if len(complete) == len(self._groups):
                self.agreed = step
        for step in [step for step in self._told if step <= self.agreed]:
            self._forget(step)
        return None

    def _forget(self, step: int) -> None:
        del self._told[step]
        for group in range(len(self._groups)):
            self._missing.pop((step, group), None)


def _difference(step: int, groups: Sequence[Sequence[int]], told: dict[int, int]) -> Difference:
    """Of the groups that differ, the members that are not of the majority; all where there is none."""
    suspects: list[int] = []
    others: list[int] = []
    for group in groups:
        value, count = Counter(told[rank] for rank in group).most_common(1)[0]
        is_majority = 2 * count > len(group)
        suspects += [rank for rank in group if told[rank] != value or not is_majority]
        others += [rank for rank in group if told[rank] == value and is_majority]
    return Difference(step, tuple(sorted(suspects)), tuple(sorted(others)))
