"""Normalisation over the hidden dimension, computed in float32 for inputs of any type.

`Norm.add` adds a branch to the residual stream and returns the stream and its norm, as a block needs before
attention and before the MLP. Triton's kernels (`myriad.kernels.triton.fused_add_norm`) read and write memory
once for both. Their backward does so too, and adds the stream's gradient to the norm's.

Without Triton, the library has a fused RMSNorm forward everywhere, but a fused backward on CUDA only. On a
CPU its backward takes four times as long as LayerNorm's. The two gradients differ by one term, so RMSNorm
uses LayerNorm's with the mean set to 0:

    LayerNorm's, mean 0:   r (gw - mean(gw) - n mean(gw n))          n = x r, g the gradient, w the weight
    RMSNorm's:             r (gw            - n mean(gw n))
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from myriad.kernels.choice import runs_triton
from myriad.kernels.config import Kernels
from myriad.kernels.memory_order import as_rows_lie, is_sequence_first

__all__ = ["LayerNorm", "Norm", "RMSNorm", "rms_norm", "rms_norm_reference"]


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
    """Return ``x / root(mean(x^2) + epsilon) * weight`` (Zhang & Sennrich 2019)."""
    if x.device.type != "cpu":
        wide = x.to(weight.dtype)  # a zero-centered norm's factor is float32
        return F.rms_norm(wide, weight.shape, weight, epsilon).to(x.dtype)
    y: torch.Tensor = _RMSNorm.apply(x, weight, epsilon)
    return y


class Norm(nn.Module):
    """Normalisation of the last dimension, which has ``hidden`` values."""

    is_layer: bool

    zero_centered: bool = False
    """Whether the norm multiplies by 1 + weight."""

    def __init__(self, hidden: int, epsilon: float, *, bias: bool, kernels: Kernels) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden))
        self.bias = nn.Parameter(torch.empty(hidden)) if bias else None
        self.epsilon, self.kernels = epsilon, kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.add(x, None)[1]

    @property
    def factor(self) -> torch.Tensor:
        """The factor of the normalized values, ``[H]``. That of a zero-centered norm is float32: 1 + weight
        would lose most of the weight's bits in a shorter type."""
        return self.weight.float() + 1 if self.zero_centered else self.weight

    def add(self, x: torch.Tensor, branch: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``x + branch`` and its norm, bitwise equal to the two operators one after the other.

        Without a branch ``x`` is returned unchanged, and its gradient has the same bits as with one: results
        do not depend on where a branch was added.
        """
        if not runs_triton("norm", x, self.kernels, x.shape[-1]):
            stream = x if branch is None else x + branch
            return stream, as_rows_lie(self._by_library, stream)
        from myriad.kernels.triton.fused_add_norm import add_norm

        flip = x.ndim == 3 and is_sequence_first(x)
        if flip:
            x, branch = x.transpose(0, 1), None if branch is None else branch.transpose(0, 1)
        stream, normed = add_norm(x, branch, self.factor, self.bias, self.epsilon, is_layer=self.is_layer)
        return (stream.transpose(0, 1), normed.transpose(0, 1)) if flip else (stream, normed)

    def _by_library(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class RMSNorm(Norm):
    """RMSNorm with a weight, computed as by `rms_norm`. ``zero_centered``: the factor is 1 + weight."""

    is_layer = False

    def __init__(
        self, hidden: int, epsilon: float, *, zero_centered: bool = False, kernels: Kernels = "auto"
    ) -> None:
        super().__init__(hidden, epsilon, bias=False, kernels=kernels)
        self.zero_centered = zero_centered

    def _by_library(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.factor, self.epsilon)


class LayerNorm(Norm):
    """LayerNorm: ``(x - mean) / deviation * weight + bias``, with the bias optional."""

    is_layer = True

    def __init__(self, hidden: int, epsilon: float, *, bias: bool, kernels: Kernels = "auto") -> None:
        super().__init__(hidden, epsilon, bias=bias, kernels=kernels)

    def _by_library(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Compute the formula step by step in float64."""
    wide = x.double()
    return (wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight.double()).to(x.dtype)
