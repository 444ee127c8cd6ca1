"""Normalisation over the hidden dimension, in float32 inside whatever goes in.

The library has a fused RMSNorm forward everywhere, but a fused backward on CUDA alone; on a CPU it takes four
times as long as LayerNorm's. The two gradients differ by one term, so RMSNorm borrows LayerNorm's with the
mean set to 0:

    LayerNorm's, mean 0:   r (gw - mean(gw) - n mean(gw n))          n = x r, g the gradient, w the weight
    RMSNorm's:             r (gw            - n mean(gw n))
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["LayerNorm", "RMSNorm", "rms_norm", "rms_norm_reference"]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        roots = length.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, roots)
        ctx.weight = weight
        return (wide * roots).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, roots = ctx.saved_tensors
        weight = ctx.weight.float()
        g = grads[0].float().contiguous()
        grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(
            g, x.float(), weight.shape, torch.zeros_like(roots), roots, weight, None, [True, True, False]
        )
        mean = (g @ weight).div_(weight.numel()).unsqueeze(-1)
        grad_x.addcmul_(roots, mean)
        return grad_x.to(x.dtype), grad_weight.to(ctx.weight.dtype), None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """``x / root(mean(x^2) + epsilon) * weight`` (Zhang & Sennrich 2019)."""
    if x.device.type != "cpu":
        return F.rms_norm(x, weight.shape, weight, epsilon)
    y: torch.Tensor = _RMSNorm.apply(x, weight, epsilon)
    return y


class RMSNorm(nn.Module):
    """`rms_norm` with its weight."""

    def __init__(self, hidden: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden))
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.epsilon)


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
