"""Muon: matrices move along their orthogonalized momentum, all other parameters by AdamW.

    m = momentum m + (1 - momentum) g          the mean of gradients, stored as ``exp_avg``
    d = g + momentum (m - g)                   the direction; without Nesterov d = m
    O = newton_schulz(d)                       all singular values about 1
    w = w - learning_rate weight_decay w - learning_rate scale O

(Jordan 2024, kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv 2502.16982, whose scale gives
updates the root mean square of AdamW's.) In bfloat16 this is `torch.optim.Muon`. A matrix has one moment
instead of two. A fused weight (query, key and value; gate and up) is several matrices, each orthogonalized by
itself, so the result does not depend on how tensor parallelism cuts it.

Sharded ranks hold parts of a matrix (`MatrixPart`). This module computes what each part needs alone: the
direction, which overwrites the gradient, and the move. In between, `myriad.parallel.matrix_exchange` brings
whole directions to one rank each, orthogonalizes them there, and overwrites the directions by the results.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from myriad.kernels.config import Kernels
from myriad.optim.config import NewtonSchulzPrecision, OptimizerConfig
from myriad.optim.moments import Moments, cache_blocks
from myriad.optim.region import Region

__all__ = ["MatrixPart", "Muon", "newton_schulz", "newton_schulz_dtype"]

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic polynomial: its slope at zero is large, so that small singular values grow
fastest."""
_LEAST_NORM = 1e-7


@dataclass(frozen=True)
class MatrixPart:
    """A box of a matrix that this rank holds."""

    values: torch.Tensor
    """View of the box's master values."""
    update: torch.Tensor
    """View of the gradients' memory: the gradient, then the direction, then the orthogonalized update."""
    shape: tuple[int, int]
    """Shape of the whole matrix."""


def newton_schulz_dtype(precision: NewtonSchulzPrecision, training: torch.dtype) -> torch.dtype:
    """Return the type in which matrices are sent and orthogonalized. ``training``: the computation's type."""
    if precision == "auto":
        return torch.bfloat16 if training == torch.bfloat16 else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[precision]


def newton_schulz(x: torch.Tensor, iterations: int) -> torch.Tensor:
    """Return a matrix with the singular vectors of ``x`` and singular values from 0.7 to 1.2, of the same
    type. ``x`` is scratch from now on."""
    a, b, c = _COEFFICIENTS
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x  # the products with the smaller square matrix are cheaper
    x.div_(x.norm().clamp(min=_LEAST_NORM))
    for _ in range(iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Muon(Moments):
    """Update regions of matrices by their orthogonalized momentum, and the others with AdamW."""

    def __init__(
        self,
        config: OptimizerConfig,
        regions: Sequence[Region],
        parts: Sequence[Sequence[MatrixPart]],
        kernels: Kernels = "auto",
        *,
        on_host: Collection[int] = (),
    ) -> None:
        """``parts``: for each region, the parts of matrices that it holds."""
        super().__init__(config, regions, kernels, on_host=on_host)
        assert len(parts) == len(regions)
        self._parts = parts

    def write_directions(self, indices: Sequence[int]) -> None:
        """Update the momentum of these regions, and write the directions over their gradients."""
        momentum = self.config.muon_momentum
        for index in indices:
            region, exp_avg = self.regions[index], self.exp_avg[index]
            for block in cache_blocks(region.values) if region.orthogonalized else ():
                gradient, mean = region.gradients[block], exp_avg[block]
                if self.gradient_scale != 1.0:
                    gradient.mul_(self.gradient_scale)
                mean.lerp_(gradient, 1 - momentum)
                if self.config.muon_nesterov:
                    gradient.lerp_(mean, momentum)
                else:
                    gradient.copy_(mean)

    def update(self, indices: Sequence[int], stays: torch.Tensor | None = None) -> None:
        """Update the values of these regions. The memory of matrices' gradients holds orthogonalized
        updates."""
        assert stays is None, "directions are written only when all gradients are known to be finite"
        self.move_in_place(indices, decays=True)
        self.move_in_place(indices, decays=False)
        for index in indices:
            region = self.regions[index]
            if region.orthogonalized:
                region.values.mul_(1 - self.learning_rate * self.config.weight_decay)
            for part in self._parts[index]:
                rate = self.learning_rate * region.rate * self._scale(part.shape)
                part.values.add_(part.update, alpha=-rate)

    def _scale(self, shape: tuple[int, int]) -> float:
        rows, columns = shape
        if self.config.muon_scaling == "original":
            return math.sqrt(max(1, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))
