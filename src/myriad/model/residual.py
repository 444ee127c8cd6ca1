"""The residual stream on its way from one layer to the next of the same stage.

A block ends in a sum, and the next layer begins with the norm of it: one kernel, if the sum is left to the
layer that norms (`myriad.kernels.norm.Norm.add`). So a layer may hand on both:

    block i        ... stream, branch
    block i + 1    stream + branch and its norm, attention, ...

Only `myriad.model.interleave` carries a `Residual`; whatever else takes a layer's output gets the sum.
"""

from dataclasses import dataclass

import torch

__all__ = ["Residual"]


@dataclass(frozen=True, slots=True)
class Residual:
    """The stream, and the branch that is still to be added to it; ``[B, S/tp, H]`` each."""

    stream: torch.Tensor
    branch: torch.Tensor

    def total(self) -> torch.Tensor:
        """The stream with its branch."""
        return self.stream + self.branch
