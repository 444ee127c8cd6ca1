"""What broken nodes report while training continues: differing bits, longer compute times; and the row
of the rank that represents a node on the progress page, in each state that the decisions distinguish.

The decisions receive these with the heartbeats.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from myriad.forecasts.fleet.policy_times import PolicyTimes
from myriad.supervise.observations import Digest, RankStatus
from myriad.supervise.policy.rebalance import step_seconds
from myriad.supervise.policy.step_work import StepWork

__all__ = ["Symptoms", "hung_row", "starting_row", "training_row"]

_SHARE = 32
"""Micro-batches of a replica in a step: of MegaScale's 175B model on 12,288 GPUs (batch 6,144, dp = 192)."""
_MOST_TIMES = 2
_MANY_STEPS = 10**9
_SOUND, _OTHER = 0, 1
"""Digests of right and of differing bits."""


class Symptoms:
    """The symptoms of one run's nodes."""

    def __init__(self, times: PolicyTimes, nodes: int) -> None:
        self._times = times
        self.work = StepWork(
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
        """By node, the first step after which it holds differing bits."""
        self.slow: set[int] = set()
        self._shares = self.work.shares
        self._first_step = 0

    def begin(self, step: int, shares: Sequence[int]) -> None:
        """Begin an attempt at a step, with the micro-batches of each place; empty: the job's."""
        self._first_step, self._shares = step, tuple(shares) or self.work.shares

    def differ(self, node: int, step: int) -> None:
        """Make a node's bits differ from this step on."""
        self._differs_from.setdefault(node, step + 1)

    def heal(self) -> None:
        """All nodes have loaded the same bits."""
        self._differs_from.clear()

    def drop(self, node: int) -> None:
        """Forget a node that was replaced or repaired."""
        self._differs_from.pop(node, None)
        self.slow.discard(node)

    def is_seen(self, placement: Mapping[int, int]) -> bool:
        """Some replica that trains differs."""
        return not self._differs_from.keys().isdisjoint(placement)

    def digests(self, node: int, step: int) -> tuple[Digest, ...]:
        """Return the newest digest of this attempt: the digest of a step is taken in the next step."""
        every = self._times.verify_every
        compared = (step - 1) // every * every if every else 0
        if compared <= self._first_step:
            return ()
        other = compared >= self._differs_from.get(node, compared + 1)
        return (Digest(compared, _OTHER if other else _SOUND),)

    def busy_seconds(self, node: int, place: int) -> float:
        """Return the compute time of a step in which no rank waits for the slow one."""
        return self._pace(node) * self._shares[place]

    def slower_ratio(self, placement: Mapping[int, int]) -> float:
        """Return the relative increase of the step time by slow nodes."""
        paces = [self._pace(node) for node in placement]
        return max(0.0, step_seconds(paces, self._shares, 1) / self._times.step_seconds - 1.0)

    def _pace(self, node: int) -> float:
        slower = self._times.slower_ratio if node in self.slow else 0.0
        return self._times.step_seconds * (1.0 + slower) / _SHARE


_ENTERED = 7
"""Number of entered collectives; any number serves."""


def training_row(
    rank: int,
    step: int,
    step_seconds: float,
    idle_seconds: float,
    busy_seconds: float = 0.0,
    digests: tuple[Digest, ...] = (),
) -> RankStatus:
    """Return the row of a training rank. ``step_seconds`` is 0 in an attempt's first step; ``idle_seconds``
    counts since a node was lost, if one was."""
    busy = busy_seconds if step_seconds else 0.0
    counts = (step, _ENTERED, _ENTERED - 1)
    return RankStatus(rank, 1, "S", "step", "reduce", *counts, idle_seconds, step_seconds, busy, digests)


def starting_row(rank: int, idle_seconds: float) -> RankStatus:
    """Return the row of a starting rank, idle since the attempt began: the worst case, since a rank writes
    nothing before it is up."""
    return _row(rank, "starting", -1, idle_seconds=idle_seconds)


def hung_row(
    rank: int, step: int, phase: str, step_seconds: float, idle_seconds: float, named: bool
) -> RankStatus:
    """Return the row of a hung rank. ``named``: the rank has not entered the collective in which the others
    wait."""
    entered = _ENTERED - named
    row = _row(rank, phase, step, step_seconds=step_seconds, idle_seconds=idle_seconds)
    return replace(row, entered=entered)


def _row(rank: int, phase: str, step: int, *, idle_seconds: float, step_seconds: float = 0.0) -> RankStatus:
    left = _ENTERED - 1
    return RankStatus(rank, 1, "S", phase, "reduce", step, _ENTERED, left, idle_seconds, step_seconds)
