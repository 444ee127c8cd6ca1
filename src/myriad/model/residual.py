"""The residual stream between two layers of the same stage.

A block ends in an addition, and the next layer begins with the norm of the sum. One kernel computes both if
the addition is left to the layer with the norm (`myriad.kernels.norm.Norm.add`). So a layer may return both
operands:

    block i        ... stream, branch
    block i + 1    stream + branch and its norm, attention, ...

Only `myriad.model.interleave` handles a `Residual`; all other users of a layer's output get the sum.
"""

from dataclasses import dataclass

import torch

__all__ = ["Residual"]


@dataclass(frozen=True, slots=True)
class Residual:
    """The stream, and the branch still to be added to it; ``[B, S/tp, H]`` each."""

    stream: torch.Tensor
    branch: torch.Tensor

    def total(self) -> torch.Tensor:
        """Return the stream with its branch added."""
        return self.stream + self.branch
