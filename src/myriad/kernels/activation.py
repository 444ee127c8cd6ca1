"""Non-linearities of the MLP."""

from collections.abc import Callable

import torch
from torch.nn import functional as F

__all__ = ["ACTIVATIONS", "gelu", "relu2", "swiglu"]


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Exact GELU."""
    return F.gelu(x)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``[..., 2 F]`` with the gate in the first half."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def relu2(x: torch.Tensor) -> torch.Tensor:
    """``max(x, 0)^2`` (So et al. 2021)."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": gelu,
    "swiglu": swiglu,
    "relu2": relu2,
}
"""By the name a model config gives."""
