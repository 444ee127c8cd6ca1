"""DiLoCo: replicas train alone for several steps, then average (Douillard et al., arXiv 2311.08105).

    steps        1    2    3    4    5 ...        comm.sync_every = 4
    replica 0    ------------------>|<- agree     no gradients are exchanged in between,
    replica 1    ------------------>|<- agree     only the loss, the norm and signals: 1 KiB a step

    replica 0   anchor --inner steps--> values 0      outer gradient = mean over replicas (anchor - values)
    replica 1   anchor --inner steps--> values 1      velocity = momentum velocity + gradient
    both        anchor = values = anchor - rate (gradient + momentum velocity)

Between two agreements nothing of the parameters' size is sent, and replicas hold different parameters: a run
saves, validates and ends only at an agreement. Anchor and momentum have the same bits on every replica as
long as the mean has. Values and the inner optimizer's moments differ between replicas, so a checkpoint that
must give the same bits again holds those of every replica. The outer gradient is stored in the values'
memory: beside anchor and momentum (8 bytes a parameter) nothing of the parameters' size is allocated.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from myriad.comm.collectives import all_reduce
from myriad.comm.config import CommConfig
from myriad.comm.groups import Groups
from myriad.optim.region import Region

__all__ = ["DiLoCo", "OuterNesterov"]


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


class OuterNesterov:
    """Gradient descent with Nesterov momentum over the replicas' changes since the last synchronisation."""

    def __init__(self, regions: Sequence[Region], *, learning_rate: float, momentum: float) -> None:
        """The regions hold the same values on every replica; each replica holds whole parameters."""
        self.regions = tuple(regions)
        self.learning_rate, self.momentum = learning_rate, momentum
        self.anchor = [region.values.clone() for region in regions]
        """Values at the last synchronisation."""
        self.velocity = [torch.zeros_like(region.values) for region in regions]

    def state(self) -> dict[str, list[torch.Tensor]]:
        """Return the tensors that a checkpoint stores and loads in place: a name to a tensor like each
        region's values."""
        return {"anchor": self.anchor, "velocity": self.velocity}

    @torch.no_grad()
    def step(self, average: Callable[[torch.Tensor], None]) -> None:
        """Synchronize the replicas' values.

        ``average`` replaces ``[n]`` by its mean over replicas, the same bits on each. It is called for the
        same regions in the same order on all of them.
        """
        for region, anchor, velocity in zip(self.regions, self.anchor, self.velocity, strict=True):
            gradient = torch.sub(anchor, region.values, out=region.values)
            average(gradient)
            velocity.mul_(self.momentum).add_(gradient)
            anchor.add_(gradient, alpha=-self.learning_rate)
            anchor.add_(velocity, alpha=-self.learning_rate * self.momentum)
            region.values.copy_(anchor)
