"""What ranks do in a step: which of them do the same, and how much of it.

Ranks of one stage of the pipeline do the same work on each micro-batch, whichever replica they belong to and
however they share its matrices; those of another stage do not (the first has the embedding, the last the
head).
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from myriad.comm.attempt_layout import AttemptLayout, equal_shares
from myriad.resilience.decide.layers import Pipeline

if TYPE_CHECKING:
    from myriad.job import Job

__all__ = ["Work", "shares_are_fixed"]

_MOST_TIMES = 2
"""No replica gets more than so many times an equal share: others may be slow next."""


def shares_are_fixed(job: "Job") -> bool:
    """No replica can take more micro-batches than in the job. With GPipe a rank keeps what all of them need
    until the first backward, and memory was planned for the longest share; replicas that train alone count
    alike, and have a state each."""
    return job.layout.schedule_name == "gpipe" or job.comm.sync_every > 1


@dataclass(frozen=True)
class Work:
    """Of a job."""

    dp: int
    pp: int
    ranks_per_node: int
    node_order: tuple[int, ...]
    """Which node comes when in the grid; empty: as they are numbered."""
    shares: tuple[int, ...]
    """Micro-batches of each replica."""
    most_share: int
    """That any replica may get."""
    steps: int
    """Of the run."""
    on_slow: Literal["move", "swap", "tell"]
    pipeline: Pipeline | None = None
    """Whose layers can be moved."""

    @staticmethod
    def of(job: "Job", num_nodes: int = 1) -> "Work":
        """Whose nodes and layout are known."""
        layout, shares, fixed = job.layout, job.shares, shares_are_fixed(job)
        equal = -(-sum(shares) // layout.dp)
        return Work(
            dp=layout.dp,
            pp=layout.pp,
            ranks_per_node=layout.world // num_nodes,
            node_order=job.comm.node_order or () if num_nodes > 1 else (),
            shares=shares,
            most_share=max(shares) if fixed else max(*shares, _MOST_TIMES * equal),
            steps=job.train.steps,
            on_slow=job.resilience.on_slow,
            pipeline=Pipeline.of(job),
        )

    def in_attempt(self, layout: AttemptLayout) -> "Work":
        """With the replicas of an attempt, before any work moves among them."""
        if layout.dp is None:
            return self
        shares = equal_shares(sum(self.shares), layout.dp)
        most = max(self.most_share, _MOST_TIMES * shares[0])
        return replace(self, dp=layout.dp, shares=shares, most_share=most, node_order=())

    def place(self, rank: int, world: int) -> tuple[int, int]:
        """Replica and stage of the pipeline of one of ``world`` ranks, as the launcher numbers them."""
        if self.node_order:
            node, local_rank = divmod(rank, self.ranks_per_node)
            rank = self.node_order.index(node) * self.ranks_per_node + local_rank
        replica, within = divmod(rank, world // self.dp)
        return replica, within // (world // (self.dp * self.pp))
