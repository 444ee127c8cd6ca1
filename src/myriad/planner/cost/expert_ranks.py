"""The ranks of a stage as experts see them: those that share experts, and those that hold the same ones.

Both are places of one line of ranks, of which `myriad.comm.grid` takes neighbours for ``ep``: the replicas of
a stage, or with whole experts (``layout.etp = 1``) the tensor-parallel ranks of each replica in turn. So with
whole experts a group may come in runs of tensor-parallel ranks:

    dp=2 pp=2 tp=4 ep=8 etp=1      ep ranks 0 1 2 3  8 9 10 11         runs of 4, 8 apart
    dp=2 pp=2 tp=4 ep=2 etp=1      the same experts on 0 2  8 10       runs of 2 (2 apart), 8 apart
"""

from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

from myriad.comm.layout import Layout
from myriad.planner.cost.collective_costs import Run

__all__ = ["ONE_RANK", "ExpertGrid", "RankGroup"]


class RankGroup(NamedTuple):
    """``size`` ranks that are ``stride`` apart, in runs or one by one."""

    size: int
    stride: int
    run: Run


@dataclass(frozen=True)
class ExpertGrid:
    """The experts' grid of a layout."""

    dp: int = 1
    tp: int = 1
    ep: int = 1
    whole: bool = False
    """Whether experts are whole on a rank, although tensor-parallel ranks share other matrices."""
    replica_stride: int = 1
    """Distance of two data-parallel replicas in rank number."""
    load: float = 1.0
    """Tokens that the busiest of the ranks that share experts gets over those of the mean rank."""

    @classmethod
    def of(cls, layout: Layout, replica_stride: int) -> "ExpertGrid":
        whole, load = layout.has_whole_experts, layout.busiest_load
        return cls(layout.dp, layout.tp, layout.ep, whole, replica_stride, load)

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel ranks that share the width of each expert."""
        return 1 if self.whole else self.tp

    @property
    def folds(self) -> bool:
        """Whether experts lie on other ranks than the other parameters of their block."""
        return self.ep > 1 or self.whole

    @property
    def num_replicas(self) -> int:
        """Ranks that hold the same part of the same experts."""
        return self.dp * self.tp // (self.ep * self.expert_tp)

    @property
    def sharing(self) -> RankGroup:
        """The ranks that share experts."""
        near = gcd(self.ep, self.tp) if self.whole else 1
        return RankGroup(self.ep, self.replica_stride, Run(near))

    @property
    def alike(self) -> RankGroup:
        """The ranks that hold the same experts."""
        if not self.whole:
            return RankGroup(self.num_replicas, self.replica_stride * self.ep, Run())
        near = gcd(self.ep, self.tp)
        run = Run(gcd(self.tp // near, self.num_replicas), near)
        return RankGroup(self.num_replicas, self.replica_stride * (self.ep // near), run)


ONE_RANK = ExpertGrid()
"""A grid in which each rank has all experts."""
