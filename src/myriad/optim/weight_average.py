"""An exponential moving average of the parameters, in float32 and sharded as the optimizer's moments are.

    average k = sum over updates i <= k of decay^(k - i) w_i, divided by the sum of decay^(k - i)

The division leaves the initial weights no part, as Adam's bias correction does for its moments: the first
update copies the weights. As a recurrence, with the number k of the update as its only state, which follows
from the number of optimizer steps:

    average = average + (1 - decay) / (1 - decay^k) (w - average)

(Polyak and Juditsky 1992; with a decay Morales-Brotons et al. 2024, arXiv 2411.18704.)
"""

from collections.abc import Sequence

import torch

from myriad.optim.moments import cache_blocks
from myriad.optim.region import Region

__all__ = ["WeightAverage"]


class WeightAverage:
    """The moving average of each region's values."""

    def __init__(self, decay: float, every: int, regions: Sequence[Region]) -> None:
        """``every``: optimizer steps between two updates."""
        self._decay, self._every, self._regions = decay, every, tuple(regions)
        self.averages = [torch.zeros_like(region.values) for region in regions]
        """One tensor for each region; a checkpoint stores and loads them in place."""

    def restart(self, stored: Sequence[torch.Tensor]) -> None:
        """Set the average to the current values. ``stored``: those of each region where they rest."""
        for average, values in zip(self.averages, stored, strict=True):
            average.copy_(values)

    def update(self, indices: Sequence[int], steps_done: int) -> None:
        """Update the average of these regions, whose values have just completed optimizer step
        ``steps_done``."""
        if steps_done % self._every:
            return
        weight = self.weight(steps_done // self._every)
        for index in indices:
            self.averages[index].lerp_(self._regions[index].values, weight)

    def weight(self, number: int) -> float:
        """Return the weight of the newest values in update ``number``, from 1."""
        return (1 - self._decay) / (1 - self._decay**number)

    def swap(self, stored: Sequence[torch.Tensor]) -> None:
        """Exchange values and averages, bit for bit. ``stored``: the values of each region where they
        rest."""
        for average, values in zip(self.averages, stored, strict=True):
            for block in cache_blocks(average):
                held = average[block].clone()
                average[block].copy_(values[block])
                values[block].copy_(held)
