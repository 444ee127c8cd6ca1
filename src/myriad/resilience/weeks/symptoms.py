"""What broken nodes show while training goes on: other bits than their replicas, and a longer time computing.

Whether anybody takes notice is up to the decisions, which hear it with the beats.
"""

from collections.abc import Mapping, Sequence

from myriad.resilience.decide.balance import step_seconds
from myriad.resilience.decide.work import Work
from myriad.resilience.facts import Digest
from myriad.resilience.weeks.times import Times

__all__ = ["Symptoms"]

_SHARE = 32
"""Micro-batches of a replica in a step: of MegaScale's 175B model on 12,288 GPUs (batch 6,144, dp = 192)."""
_MOST_TIMES = 2
_MANY_STEPS = 10**9
_SOUND, _OTHER = 0, 1
"""Digests."""


class Symptoms:
    """Of one run."""

    def __init__(self, times: Times, nodes: int) -> None:
        self._times = times
        self.work = Work(
            dp=nodes,
            pp=1,
            ranks_per_node=1,
            node_order=(),
            shares=(_SHARE,) * nodes,
            most_share=_MOST_TIMES * _SHARE,
            steps=_MANY_STEPS,
            on_slow="swap",
        )
        self.replicas = (tuple(range(nodes)),) if times.verify_every else ()
        self._differs_from: dict[int, int] = {}
        """Node to the first step after which it holds other bits."""
        self.slow: set[int] = set()
        self._shares = self.work.shares
        self._first_step = 0

    def begin(self, step: int, shares: Sequence[int]) -> None:
        """An attempt that goes on from a step, with so many micro-batches for each place; none: the job's."""
        self._first_step, self._shares = step, tuple(shares) or self.work.shares

    def differ(self, node: int, step: int) -> None:
        """From this step on."""
        self._differs_from.setdefault(node, step + 1)

    def heal(self) -> None:
        """All have loaded the same."""
        self._differs_from.clear()

    def drop(self, node: int) -> None:
        """It is repaired."""
        self._differs_from.pop(node, None)
        self.slow.discard(node)

    def is_seen(self, placement: Mapping[int, int]) -> bool:
        """Some replica that trains differs."""
        return not self._differs_from.keys().isdisjoint(placement)

    def digests(self, node: int, step: int) -> tuple[Digest, ...]:
        """The newest of this attempt: that of a step is taken in the next one."""
        every = self._times.verify_every
        compared = (step - 1) // every * every if every else 0
        if compared <= self._first_step:
            return ()
        other = compared >= self._differs_from.get(node, compared + 1)
        return (Digest(compared, _OTHER if other else _SOUND),)

    def busy_seconds(self, node: int, place: int) -> float:
        """Of a step in which nobody waits for the slow one."""
        return self._pace(node) * self._shares[place]

    def slower_ratio(self, placement: Mapping[int, int]) -> float:
        """How much longer a step takes than without slow nodes."""
        paces = [self._pace(node) for node in placement]
        return max(0.0, step_seconds(paces, self._shares, 1) / self._times.step_seconds - 1.0)

    def _pace(self, node: int) -> float:
        slower = self._times.slower_ratio if node in self.slow else 0.0
        return self._times.step_seconds * (1.0 + slower) / _SHARE
