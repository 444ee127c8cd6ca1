"""LAMB (You et al. 2019, arXiv 1904.00962, algorithm 2), correct when parameters are sharded.

    r = m^ / (sqrt(v^) + epsilon)        Adam's direction, both moments with bias correction
    u = r + weight_decay x w
    w = w - learning_rate x |w| / |u| x u      norms over the whole parameter; 1 where either is zero

Norms and biases (regions that do not decay) move by plain Adam, as in the reference implementations. The
norms need every rank that holds a part: one call of ``reduce_table`` for all parameters, between two passes
over the memory. ``u`` waits in the gradients' memory, so nothing of the parameters' size is allocated.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from myriad.optim.config import OptimizerConfig
from myriad.optim.moments import Moments
from myriad.optim.norms import sums_of_squares
from myriad.optim.region import Region

__all__ = ["Lamb"]

_BLOCK = {"cpu": 2**18, "cuda": 2**24}
"""Elements at a time: on a CPU what stays in cache, on a GPU what keeps it busy."""


class Lamb(Moments):
    """Layer-wise adaptive moments."""

    def __init__(
        self,
        config: OptimizerConfig,
        regions: Sequence[Region],
        num_parameters: int,
        reduce_table: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__(config, regions)
        self._num_parameters, self._reduce_table = num_parameters, reduce_table

        self._ratios: list[float] = []
        """Of each parameter, in the step that has begun."""

    def begin(self, learning_rate: float, gradient_scale: float) -> None:
        """Writes ``u`` of every region that decays over its gradients, and reduces the norms."""
        super().begin(learning_rate, gradient_scale)
        decayed = [i for i, region in enumerate(self.regions) if region.decays and region.values.numel()]
        for index in decayed:
            self._write_update(index)
        self._ratios = self._trust_ratios(decayed)

    def update(self, indices: Sequence[int]) -> None:
        """Moves these regions."""
        self.move_in_place(indices, decays=False)
        for region in (self.regions[index] for index in indices if self.regions[index].decays):
            for piece in region.pieces:
                part = slice(piece.start, piece.stop)
                rate = -self.learning_rate * self._ratios[piece.parameter]
                region.values[part].add_(region.gradients[part], alpha=rate)

    def _write_update(self, index: int) -> None:
        """``u`` of one region into its gradients."""
        region = self.regions[index]
        for part in _blocks(region.values):
            # from zero, with a rate of -1 and no decay, the kernel leaves Adam's direction itself
            direction = torch.zeros_like(region.values[part])
            self.move([direction], [(index, part)], learning_rate=-1.0, weight_decay=0.0)
            decay = self.config.weight_decay
            torch.add(direction, region.values[part], alpha=decay, out=region.gradients[part])

    def _trust_ratios(self, indices: Sequence[int]) -> list[float]:
        regions = [self.regions[index] for index in indices] or [_empty_like(self.regions[0])]
        pieces = [region.pieces for region in regions]
        values = sums_of_squares([region.values for region in regions], pieces, self._num_parameters)
        updates = sums_of_squares([region.gradients for region in regions], pieces, self._num_parameters)
        table = self._reduce_table(torch.stack((values, updates), 1)).sqrt()
        ratios = torch.where((table > 0).all(1), table[:, 0] / table[:, 1], 1.0)
        return ratios.tolist()


def _blocks(flat: torch.Tensor) -> Iterator[slice]:
    size = _BLOCK[flat.device.type]
    yield from (slice(start, start + size) for start in range(0, flat.numel(), size))


def _empty_like(region: Region) -> Region:
    return Region(region.values[:0], region.gradients[:0], True, ())
