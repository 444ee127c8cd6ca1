"""First and second moments beside each region and the fused kernel that moves them, for AdamW and LAMB.

torch's fused AdamW kernel reads and writes everything once (4.5 x faster than foreach on a CPU core). It
takes the gradient scale as a divisor and writes the scaled gradients back: after a step the gradients' memory
holds nothing of use.
"""

from collections.abc import Sequence

import torch
from torch.optim.adamw import adamw

from myriad.optim.config import OptimizerConfig
from myriad.optim.region import Region

__all__ = ["Moments"]


class Moments:
    """State of an optimizer over flat regions."""

    def __init__(self, config: OptimizerConfig, regions: Sequence[Region]) -> None:
        self.config, self.regions = config, tuple(regions)
        self.steps_done = 0
        self.exp_avg = [torch.zeros_like(region.values) for region in regions]
        self.exp_avg_sq = [torch.zeros_like(region.values) for region in regions]

    def state(self) -> dict[str, list[torch.Tensor]]:
        """What a checkpoint keeps, and loads in place, beside ``steps_done``: name to a tensor like each
        region's values."""
        return {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    def indices(self, *, decays: bool) -> list[int]:
        """The regions that decay, or those that do not; without empty ones."""
        return [
            i for i, region in enumerate(self.regions) if region.decays == decays and region.values.numel()
        ]

    def divisor(self, gradient_scale: float) -> torch.Tensor | None:
        """A factor on gradients as the kernel wants it."""
        if gradient_scale == 1.0:
            return None
        return torch.full((), 1 / gradient_scale, device=self.regions[0].values.device)

    def move(
        self,
        values: Sequence[torch.Tensor],
        parts: Sequence[tuple[int, slice]],
        *,
        learning_rate: float,
        weight_decay: float,
        divisor: torch.Tensor | None,
    ) -> None:
        """Adam step ``steps_done + 1``: ``values[i]`` by the gradients and moments of ``parts[i]`` = (region,
        part of it)."""
        adamw(
            list(values),
            [self.regions[index].gradients[part] for index, part in parts],
            [self.exp_avg[index][part] for index, part in parts],
            [self.exp_avg_sq[index][part] for index, part in parts],
            [],
            [torch.full((), float(self.steps_done), device=value.device) for value in values],
            fused=True,
            grad_scale=divisor,
            amsgrad=False,
            maximize=False,
            beta1=self.config.beta1,
            beta2=self.config.beta2,
            eps=self.config.epsilon,
            lr=learning_rate,
            weight_decay=weight_decay,
        )

    def move_in_place(self, learning_rate: float, divisor: torch.Tensor | None, *, decays: bool) -> None:
        """AdamW on the values themselves, of the regions that decay or of the others."""
        if indices := self.indices(decays=decays):
            self.move(
                [self.regions[index].values for index in indices],
                [(index, slice(None)) for index in indices],
                learning_rate=learning_rate,
                weight_decay=self.config.weight_decay if decays else 0.0,
                divisor=divisor,
            )
