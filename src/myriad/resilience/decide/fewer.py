"""With fewer data-parallel replicas when a node is lost and no spare is there; with all when one is. Pure.

    dp 3 on nodes 0 1 2    node 1 is lost ──nobody comes for 30 s──► dp 2 on nodes 0 2, the same global batch
    dp 2 on nodes 0 2      node 1 is back ──ranks end a step──────► dp 3 on nodes 0 1 2

Of the layouts that a job allows the largest is taken that the nodes hold. What the lost replicas had in
memory is with other nodes, or stored, and is loaded in the new layout like any other. Each change costs a
start: so a lost node is waited for a while, and one that is back must pay for the turn.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from myriad.comm.attempt_layout import AS_THE_JOB, AttemptLayout, equal_shares
from myriad.errors import BadInputError
from myriad.resilience.decide.work import shares_are_fixed
from myriad.resilience.facts import RankSeen

if TYPE_CHECKING:
    from myriad.job import Job

__all__ = ["MORE", "Fewer", "Growth"]

MORE = "nodes are there for more replicas"
_STEADY_SECONDS = 3.0
"""How long nodes must have been there before ranks end for them: one may come and go."""
_BETWEEN_SECONDS = 300.0
"""Between two times that a run gets larger by itself."""


@dataclass(frozen=True)
class Fewer:
    """In which layouts a run may go on while nodes are missing."""

    dp: int
    """Replicas of the job."""
    num_micro_batches: int
    """Of all replicas in an iteration."""
    replica_ranks: int
    node_ranks: int
    allowed: tuple[int, ...]
    """Numbers of replicas, less than the job's, ascending."""
    wait_seconds: float
    """For a lost node, before."""
    steps: int
    """Of the run."""

    @staticmethod
    def of(job: "Job") -> "Fewer | None":
        """``None``: it waits for its nodes. Under Slurm too: no node comes back to an allocation, and the job
        is requeued. What ZeRO shards is shared by fewer, and taken to fit."""
        layout, how = job.layout, job.resilience
        if how.on_lost != "fewer" or how.engine == "slurm" or how.nodes == 1 or shares_are_fixed(job):
            return None
        whole, each, total = layout.world // layout.dp, layout.world // how.nodes, sum(job.shares)
        allowed = []
        for dp in (dp for dp in range(1, layout.dp) if dp * whole % each == 0):
            with suppress(BadInputError):
                job.in_attempt(AttemptLayout(dp=dp, shares=equal_shares(total, dp)))
                allowed.append(dp)
        if not allowed:
            return None
        wait = how.wait_seconds * how.patience
        return Fewer(layout.dp, total, whole, each, tuple(allowed), wait, job.train.steps)

    def nodes_of(self, dp: int) -> int:
        """That its ranks fill."""
        return dp * self.replica_ranks // self.node_ranks

    @property
    def least_nodes(self) -> int:
        """Without which nothing can go on."""
        return self.nodes_of(self.allowed[0])

    def largest(self, num_nodes: int, more_than: int = 0) -> AttemptLayout | None:
        """That these nodes hold; ``more_than`` so many replicas: with so few memory was full. ``None``: no
        layout is so small."""
        if num_nodes >= self.nodes_of(self.dp):
            return AS_THE_JOB
        for dp in reversed(self.allowed):
            if self.nodes_of(dp) <= num_nodes and dp > more_than:
                return AttemptLayout(dp=dp, shares=equal_shares(self.num_micro_batches, dp))
        return None

    def replicas(self, layout: AttemptLayout) -> int:
        """Of an attempt."""
        return layout.dp or self.dp

    def instead(
        self, before: AttemptLayout, num_nodes: int, waited_seconds: float, too_few: int
    ) -> AttemptLayout | None:
        """Of the next attempt, where nodes are missing; ``None``: they are waited for. ``before``: of the
        last one; for nodes that it did not have either nobody waits."""
        found = self.largest(num_nodes, too_few)
        if found is None:
            return None
        as_many = self.replicas(found) >= self.replicas(before)
        return found if as_many or waited_seconds >= self.wait_seconds else None

    def why(
        self, before: AttemptLayout, after: AttemptLayout, nodes: Sequence[int]
    ) -> tuple[str, dict[str, object]]:
        """The rule by which an attempt has other replicas than the last, and its evidence."""
        replicas = [self.replicas(before), self.replicas(after)]
        rule = MORE if replicas[1] > replicas[0] else "a lost node did not come back: fewer replicas"
        return rule, {"replicas": replicas, "nodes": list(nodes)}

    @property
    def nodes_per_replica(self) -> int:
        """1 where a node holds whole replicas, or parts of two."""
        nodes, rest = divmod(self.replica_ranks, self.node_ranks)
        return 1 if rest else nodes


class Growth:
    """When ranks of a run with fewer replicas end after a step, as there are nodes for more."""

    def __init__(self, fewer: Fewer, patience: float, now: float) -> None:
        self._fewer, self._patience = fewer, patience
        self._grow_at = now
        self.begin(now)

    def begin(self, now: float) -> None:
        """An attempt."""
        self._began = now
        self._enough_at: float | None = None
        self._start_seconds: float | None = None

    def saw(self, seen: Sequence[RankSeen], now: float, before: int, after: int) -> bool:
        """Whether it is to become larger: all ranks, while they train; replicas that there are, and that
        there could be."""
        if not seen or not all(one.step_seconds > 0 for one in seen):
            return False
        if self._start_seconds is None:
            self._start_seconds = now - self._began
        if after <= before:
            self._enough_at = None
            return False
        self._enough_at = now if self._enough_at is None else self._enough_at
        steady = now - self._enough_at >= _STEADY_SECONDS * self._patience
        if not steady or now < self._grow_at or not self._pays(seen, before, after):
            return False
        self._grow_at = now + _BETWEEN_SECONDS * self._patience
        return True

    def _pays(self, seen: Sequence[RankSeen], before: int, after: int) -> bool:
        """What is left of the run becomes shorter by more than a start takes."""
        assert self._start_seconds is not None, "ranks train"
        left = self._fewer.steps - min(one.step for one in seen)
        seconds = left * max(one.step_seconds for one in seen)
        return seconds * (1 - before / after) > self._start_seconds
