"""Normalisation over the hidden dimension, in float32 inside whatever goes in."""

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["LayerNorm", "RMSNorm", "rms_norm_reference"]


class RMSNorm(nn.Module):
    """``x / root(mean(x^2) + epsilon) * weight`` (Zhang & Sennrich 2019)."""

    def __init__(self, hidden: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden))
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


class LayerNorm(nn.Module):
    """``(x - mean) / deviation * weight + bias``, the bias on request."""

    def __init__(self, hidden: int, epsilon: float, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden))
        self.bias = nn.Parameter(torch.empty(hidden)) if bias else None
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """The formula, step by step."""
    wide = x.double()
    return (wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight.double()).to(x.dtype)
