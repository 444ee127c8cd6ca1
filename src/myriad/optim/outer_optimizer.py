"""DiLoCo's outer optimizer: replicas train alone and synchronize periodically (Douillard et al., arXiv
2311.08105).

    replica 0   anchor --inner steps--> values 0      outer gradient = mean over replicas (anchor - values)
    replica 1   anchor --inner steps--> values 1      velocity = momentum velocity + gradient
    both        anchor = values = anchor - rate (gradient + momentum velocity)

Between two synchronisations nothing of the parameters' size is sent. Anchor and momentum have the same bits
on every replica as long as the mean has. Values and the inner optimizer's moments differ between replicas, so
a checkpoint that must give the same bits again holds those of every replica. The outer gradient is stored in
the values' memory: beside anchor and momentum (8 bytes a parameter) nothing of the parameters' size is
allocated.
"""

from collections.abc import Callable, Sequence

import torch

from myriad.optim.region import Region

__all__ = ["OuterNesterov"]


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
