"""The ranks of a stage as experts see them: those that share experts, and those that hold the same ones.

Both are places of one line, of which `myriad.comm.grid` takes neighbours for ``ep``: the replicas of a
stage, or where fewer than all tensor-parallel ranks share the width of experts (``layout.etp``), their groups
in each replica in turn. The ranks then come in runs, with one of each of these groups:

    dp=2 pp=2 tp=4 ep=8 etp=1      ep ranks 0 1 2 3  8 9 10 11         runs of 4, 8 apart
    dp=2 pp=2 tp=4 ep=2 etp=1      the same experts on 0 2  8 10       runs of 2 (2 apart), 8 apart
    dp=2 pp=2 tp=4 ep=4 etp=2      ep ranks 0 2  8 10                  runs of 2 (2 apart), 8 apart
"""

from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

from myriad.comm.layout import ExpertDispatch, Layout
from myriad.planner.cluster_config import Cluster
from myriad.planner.cost.collective_costs import RankRun

__all__ = ["ONE_RANK", "ExpertGrid", "RankGroup"]


class RankGroup(NamedTuple):
    """``size`` ranks that are ``stride`` apart, in runs or one by one."""

    size: int
    stride: int
    run: RankRun


@dataclass(frozen=True)
class ExpertGrid:
    """The experts' grid of a layout."""

    dp: int = 1
    """Ranks that hold the same parameters: replicas, and ranks that share their sequences."""
    tp: int = 1
    ep: int = 1
    etp_groups: int = 1
    """Groups of tensor-parallel ranks of which each shares the width of experts (`Layout.num_etp_groups`)."""
    replica_stride: int = 1
    """Mean distance in rank number of two ranks that hold the same parameters and are next to each other."""
    load: float = 1.0
    """Tokens that the busiest of the ranks that share experts gets over those of the mean rank."""
    dispatch: ExpertDispatch = "expert"
    """How often a token travels (``layout.expert_dispatch``)."""
    slowdown: float = 1.0
    """Factor on the seconds in which tokens travel between nodes: 1 at the rate of the ports."""

    @classmethod
    def of(cls, layout: Layout, replica_stride: int, slowdown: float = 1.0) -> "ExpertGrid":
        groups, load = layout.num_etp_groups, layout.busiest_load
        dispatch = layout.expert_dispatch
        # neighbours share a sequence, if any do, and are nearer than the replicas where stages lie between
        stride = layout.tp if 1 < layout.ep <= layout.cp or layout.pp == 1 else replica_stride // layout.cp
        return cls(layout.num_holders, layout.tp, layout.ep, groups, stride, load, dispatch, slowdown)

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel ranks that share the width of each expert."""
        return self.tp // self.etp_groups

    @property
    def folds(self) -> bool:
        """Whether experts lie on other ranks than the other parameters of their block."""
        return self.ep > 1 or self.etp_groups > 1

    @property
    def num_replicas(self) -> int:
        """Ranks that hold the same part of the same experts."""
        return self.dp * self.etp_groups // self.ep

    @property
    def sharing(self) -> RankGroup:
        """The ranks that share experts."""
        near = gcd(self.ep, self.etp_groups)
        run = RankRun(near, self.expert_tp) if near > 1 else RankRun()
        return RankGroup(self.ep, self.replica_stride, run)

    def leaves_node(self, cluster: Cluster) -> bool:
        """Return whether some of the ranks that share experts lie on other nodes."""
        size, stride, run = self.sharing
        return bool(run.reaches_beyond(cluster.accelerators_per_node, size, stride))

    def hops(
        self, num_experts: int, num_chosen: int, per_node: int, most_nodes: int | None = None
    ) -> tuple[tuple[RankGroup, float], ...]:
        """Return the groups of ranks among which a token travels to its experts, one after the other, and the
        rows that each token has there. Rows of the same token are those of the distinct places that hold some
        of ``num_chosen`` among ``num_experts`` experts, each as likely as any other. ``most_nodes``: nodes
        that the router chooses a token's experts from; off: all."""
        everyone = self.sharing
        if self.dispatch == "expert":
            return ((everyone, float(num_chosen)),)
        rows = _distinct(num_experts, num_chosen, self.ep)
        near = int(everyone.run.within(per_node, self.ep, everyone.stride))
        if self.dispatch == "rank" or near in (1, self.ep) or self.ep % near:
            return ((everyone, rows),)
        nodes, length = self.ep // near, everyone.run.length
        between = RankGroup(nodes, max(per_node, everyone.stride * near // length), RankRun())
        inside = RankGroup(near, everyone.stride, everyone.run._replace(length=min(length, near)))
        between_rows = min(_distinct(num_experts, num_chosen, nodes), float(most_nodes or nodes))
        return (between, between_rows), (inside, rows)

    def alike(self, num_groups: int = 1) -> RankGroup:
        """Return the ranks that hold the same experts, of one of ``num_groups`` shard groups."""
        size = self.num_replicas // num_groups
        if self.etp_groups == 1:
            return RankGroup(size, self.replica_stride * self.ep, RankRun())
        near = gcd(self.ep, self.etp_groups)
        run = RankRun(gcd(self.etp_groups // near, size), near * self.expert_tp)
        return RankGroup(size, self.replica_stride * (self.ep // near), run)


def _distinct(num_experts: int, num_chosen: int, num_places: int) -> float:
    """Return the mean number of places, of those that share experts equally, that hold some of a token's."""
    elsewhere, held = 1.0, num_experts // num_places
    for number in range(num_chosen):
        elsewhere *= max(0, num_experts - held - number) / (num_experts - number)
    return num_places * (1 - elsewhere)


def holders(layout: Layout, replica_stride: int, size: int, every: int = 1) -> RankGroup:
    """Return ``size`` of the ranks that hold the same parameters, one of ``every``. Those that share a
    sequence are neighbours, and replicas ``replica_stride`` apart."""
    near = max(1, min(layout.cp // every, size))
    if near == 1:
        return RankGroup(size, max(layout.tp * every, replica_stride * every // layout.cp), RankRun())
    return RankGroup(size, replica_stride, RankRun(near, layout.tp * every))


ONE_RANK = ExpertGrid()
"""A grid in which each rank has all experts."""
