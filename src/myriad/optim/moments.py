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
        self.learning_rate = 0.0
        self.divisor: torch.Tensor | None = None
        """Of the gradients, in the step that has begun."""
        self.exp_avg = [torch.zeros_like(region.values) for region in regions]
        self.exp_avg_sq = [torch.zeros_like(region.values) for region in regions]

    def state(self) -> dict[str, list[torch.Tensor]]:
        """What a checkpoint keeps, and loads in place, beside ``steps_done``: name to a tensor like each
        region's values."""
        return {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    def begin(self, learning_rate: float, gradient_scale: float) -> None:
        """Begins a step: gradients count ``gradient_scale`` times; their memory is overwritten from here
        on."""
        self.learning_rate, self.divisor = learning_rate, None
        if gradient_scale != 1.0:
            self.divisor = torch.full((), 1 / gradient_scale, device=self.regions[0].values.device)

    def end(self) -> None:
        """One more step is done."""
        self.steps_done += 1

    def move(
        self,
        values: Sequence[torch.Tensor],
        parts: Sequence[tuple[int, slice]],
        *,
        learning_rate: float,
        weight_decay: float,
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
            grad_scale=self.divisor,
            amsgrad=False,
            maximize=False,
            beta1=self.config.beta1,
            beta2=self.config.beta2,
            eps=self.config.epsilon,
            lr=learning_rate,
            weight_decay=weight_decay,
        )

    def move_in_place(self, indices: Sequence[int], *, decays: bool) -> None:
        """AdamW on the values themselves, of those regions that decay or of the others."""
        chosen = [i for i in indices if self.regions[i].decays == decays and self.regions[i].values.numel()]
        if chosen:
            self.move(
                [self.regions[index].values for index in chosen],
                [(index, slice(None)) for index in chosen],
                learning_rate=self.learning_rate,
                weight_decay=self.config.weight_decay if decays else 0.0,
            )
