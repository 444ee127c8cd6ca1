"""Periodic averaging of replicas that train alone for several steps: DiLoCo on real processes.

    steps        1    2    3    4    5 ...        comm.sync_every = 4
    replica 0    ------------------>|<- agree     no gradients are exchanged in between,
    replica 1    ------------------>|<- agree     only the loss, the norm and signals: a few bytes a step

(Douillard et al., arXiv 2311.08105.) Between two agreements replicas hold different parameters: a run saves,
validates and ends only at an agreement. Each replica keeps its own moments of the inner optimizer.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from myriad.comm.collectives import all_reduce
from myriad.comm.config import CommConfig
from myriad.comm.groups import Groups
from myriad.optim.outer_optimizer import OuterNesterov
from myriad.optim.region import Region

__all__ = ["DiLoCo"]


class DiLoCo:
    """The outer optimizer of one replica's rank, and the anchor for its next agreement."""

    def __init__(self, groups: Groups, comm: CommConfig, regions: Sequence[Region]) -> None:
        self._group = groups.along("dp")
        self._every = comm.sync_every
        self.outer = OuterNesterov(
            regions, learning_rate=comm.outer_learning_rate, momentum=comm.outer_momentum
        )

    def is_due(self, steps_done: int) -> bool:
        """Return whether replicas agree after this step."""
        return steps_done % self._every == 0

    def agree(self) -> None:
        """Take an outer optimizer step, after which every replica has the same parameters."""
        self.outer.step(self._average)

    def restart(self) -> None:
        """Set the anchor to the loaded parameters, on which all replicas agree."""
        for anchor, region in zip(self.outer.anchor, self.outer.regions, strict=True):
            anchor.copy_(region.values)

    def _average(self, x: torch.Tensor) -> None:
        if self._group is not None:
            all_reduce(x, self._group).div_(dist.get_world_size(self._group))
