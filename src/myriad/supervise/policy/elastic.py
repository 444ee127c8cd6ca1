"""Elastic data parallelism: fewer replicas when a node is lost and no spare is there, all when one is. Pure.

    dp 3 on nodes 0 1 2    node 1 is lost ──none comes for 30 s──► dp 2 on nodes 0 2, the same global batch
    dp 2 on nodes 0 2      node 1 is back ──ranks end a step────► dp 3 on nodes 0 1 2

The largest allowed layout that the nodes hold is used. The state of lost replicas is in memory of other
nodes, or stored, and is loaded in the new layout like any other. Each change costs a restart: so the run
waits a while for a lost node, and a node that is back must be worth a restart.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from myriad.comm.attempt_layout import AS_THE_JOB, AttemptLayout, equal_shares
from myriad.errors import BadInputError
from myriad.supervise.observations import RankStatus
from myriad.supervise.policy.step_work import shares_are_fixed

if TYPE_CHECKING:
    from myriad.job import Job

__all__ = ["MORE", "ElasticLayouts", "Regrowth"]

MORE = "nodes are there for more replicas"
_STEADY_SECONDS = 3.0
"""How long nodes must be connected before ranks restart for them: a node may come and go."""
_BETWEEN_SECONDS = 300.0
"""Least time between two automatic additions of replicas."""


@dataclass(frozen=True)
class ElasticLayouts:
    """Layouts in which a run may continue while nodes are missing."""

    dp: int
    """Number of replicas of the job."""
    num_micro_batches: int
    """Micro-batches of all replicas in an iteration."""
    replica_ranks: int
    node_ranks: int
    allowed: tuple[int, ...]
    """Allowed numbers of replicas below the job's, in ascending order."""
    wait_seconds: float
    """How long the run waits for a lost node first."""
    steps: int
    """Number of steps of the run."""

    @staticmethod
    def of(job: "Job") -> "ElasticLayouts | None":
        """Return the layouts that a job allows; ``None``: the run waits for its nodes. That is so under
        Slurm, too: no node returns to an allocation, and the job is requeued. What ZeRO shards is divided
        among fewer replicas, and is assumed to fit."""
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
        wait = how.wait_seconds * how.timeout_scale
        return ElasticLayouts(layout.dp, total, whole, each, tuple(allowed), wait, job.train.steps)

    def nodes_of(self, dp: int) -> int:
        """Return the number of nodes that the ranks of ``dp`` replicas fill."""
        return dp * self.replica_ranks // self.node_ranks

    @property
    def least_nodes(self) -> int:
        """Least number of nodes with which the run can continue."""
        return self.nodes_of(self.allowed[0])

    def largest(self, num_nodes: int, more_than: int = 0) -> AttemptLayout | None:
        """Return the largest layout that ``num_nodes`` nodes hold; ``None``: no allowed layout is so small.
        Memory was full with ``more_than`` replicas, so the layout must have more."""
        if num_nodes >= self.nodes_of(self.dp):
            return AS_THE_JOB
        for dp in reversed(self.allowed):
            if self.nodes_of(dp) <= num_nodes and dp > more_than:
                return AttemptLayout(dp=dp, shares=equal_shares(self.num_micro_batches, dp))
        return None

    def replicas(self, layout: AttemptLayout) -> int:
        """Return the number of replicas of an attempt."""
        return layout.dp or self.dp

    def instead(
        self, before: AttemptLayout, num_nodes: int, waited_seconds: float, too_few: int
    ) -> AttemptLayout | None:
        """Return the layout of the next attempt if nodes are missing; ``None``: wait for them. ``before``:
        layout of the last one. The run does not wait for nodes that the last attempt did not have either."""
        found = self.largest(num_nodes, too_few)
        if found is None:
            return None
        as_many = self.replicas(found) >= self.replicas(before)
        return found if as_many or waited_seconds >= self.wait_seconds else None

    def why(
        self, before: AttemptLayout, after: AttemptLayout, nodes: Sequence[int]
    ) -> tuple[str, dict[str, object]]:
        """Return the rule by which an attempt has more or fewer replicas than the last one, and its
        evidence."""
        replicas = [self.replicas(before), self.replicas(after)]
        rule = MORE if replicas[1] > replicas[0] else "a lost node did not come back: fewer replicas"
        return rule, {"replicas": replicas, "nodes": list(nodes)}

    @property
    def nodes_per_replica(self) -> int:
        """Number of nodes that one replica fills; 1 if a node holds whole replicas or parts of two."""
        nodes, rest = divmod(self.replica_ranks, self.node_ranks)
        return 1 if rest else nodes


class Regrowth:
    """Decides when the ranks of a run with fewer replicas restart because nodes for more are connected."""

    def __init__(self, fewer: ElasticLayouts, patience: float, now: float) -> None:
        self._fewer, self._patience = fewer, patience
        self._grow_at = now
        self.begin(now)

    def begin(self, now: float) -> None:
        """Start measuring at the beginning of an attempt."""
        self._began = now
        self._enough_at: float | None = None
        self._start_seconds: float | None = None

    def observe(self, seen: Sequence[RankStatus], now: float, before: int, after: int) -> bool:
        """Return whether to restart with more replicas. ``seen``: rows of all ranks while they train.
        ``before``, ``after``: number of replicas now and with the connected nodes."""
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

    def _pays(self, seen: Sequence[RankStatus], before: int, after: int) -> bool:
        """Return whether the rest of the run gets shorter by more than a restart takes."""
        assert self._start_seconds is not None, "ranks train"
        left = self._fewer.steps - min(one.step for one in seen)
        seconds = left * max(one.step_seconds for one in seen)
        return seconds * (1 - before / after) > self._start_seconds
