"""Global gradient norm: this rank's part of it by parameter, and the scale that limits it.

The runtime adds the tables of the other ranks and takes the root of the sum. `clip_scale` is applied in the
optimizer's step, so that gradients are not read once more only to be scaled.
"""

import math
from collections.abc import Sequence

import torch

from myriad.optim.parameter_norms import sums_of_squares
from myriad.optim.region import Region

__all__ = ["clip_scale", "non_finite_rows", "squared_norms"]


def squared_norms(regions: Sequence[Region], num_parameters: int) -> torch.Tensor:
    """Return ``[num_parameters]`` float64: sums of squares of the gradients that this rank holds."""
    gradients = [region.gradients for region in regions]
    return sums_of_squares(gradients, [region.pieces for region in regions], num_parameters)


def clip_scale(total_norm: float, limit: float | None) -> float:
    """Return the factor that reduces gradients of this (finite) global norm to at most ``limit``; 1
    without a limit."""
    assert math.isfinite(total_norm), "stop before the step: see non_finite_rows"
    return 1.0 if limit is None or total_norm <= limit else limit / total_norm


def non_finite_rows(table: torch.Tensor) -> list[int]:
    """Return the rows of the table of parameters with a NaN or an infinity, to name the parameter when a
    run must stop."""
    return (~torch.isfinite(table)).view(table.shape[0], -1).any(1).nonzero().flatten().tolist()
