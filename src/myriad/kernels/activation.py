"""Activation functions of the MLP. Each keeps only its input for the backward, and writes its gradient once.

The model calls `activate`. Triton's kernels (`myriad.kernels.triton.activation_kernels`) also add the bias of
the preceding product, and sum its gradient in the same pass. Elsewhere that product adds the bias at no cost
(see `takes_bias`).

Legend: F width of the MLP.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from myriad.kernels.choice import runs_triton
from myriad.kernels.config import CLAMPED_SWIGLU_ALPHA, CLAMPED_SWIGLU_LIMIT, Kernels
from myriad.kernels.memory_order import as_rows_lie
from myriad.kernels.side_by_side import PartSlots

__all__ = [
    "ACTIVATIONS",
    "activate",
    "clamped_swiglu",
    "geglu",
    "gelu",
    "gelu_tanh",
    "relu2",
    "swiglu",
    "takes_bias",
]


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Compute exact GELU (the tanh form takes twice the time on a CPU)."""
    return F.gelu(x)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """Compute the tanh form of GELU, with which GPT-2 was trained."""
    return F.gelu(x, approximate="tanh")


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        grad_x = torch.empty_like(x)
        grad_gate, grad_up = grad_x.chunk(2, -1)
        torch.mul(grads[0], F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=grad_gate)
        return grad_x


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """Compute ``silu(gate) * up`` of ``[..., 2 F]``, with the gate in the first half."""
    y: torch.Tensor = _SwiGLU.apply(x)
    return y


class _ClampedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        gate, up = _clamped(x)
        gate.mul_((gate * CLAMPED_SWIGLU_ALPHA).sigmoid_())
        return gate.mul_(up.add_(1))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        gate, up = _clamped(x)
        share = (gate * CLAMPED_SWIGLU_ALPHA).sigmoid_()
        grad_x = torch.empty_like(x)
        grad_gate, grad_up = grad_x.chunk(2, -1)
        torch.mul(grads[0], gate * share, out=grad_up)
        slope = gate.mul_(CLAMPED_SWIGLU_ALPHA).mul_(1 - share).add_(1).mul_(share)
        torch.mul(grads[0], up.add_(1).mul_(slope), out=grad_gate)
        own_gate, own_up = x.chunk(2, -1)
        grad_gate.masked_fill_(own_gate > CLAMPED_SWIGLU_LIMIT, 0)
        grad_up.masked_fill_(own_up.abs() > CLAMPED_SWIGLU_LIMIT, 0)
        return grad_x


def _clamped(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return copies of gate and value within their bounds."""
    gate, up = x.chunk(2, -1)
    return gate.clamp(max=CLAMPED_SWIGLU_LIMIT), up.clamp(-CLAMPED_SWIGLU_LIMIT, CLAMPED_SWIGLU_LIMIT)


def clamped_swiglu(x: torch.Tensor) -> torch.Tensor:
    """Compute ``g sigmoid(1.702 g) (v + 1)`` of ``[..., 2 F]``, where ``g`` is the first half up to 7, and
    ``v`` the second half between -7 and 7 (GPT-OSS)."""
    y: torch.Tensor = _ClampedSwiGLU.apply(x)
    return y


class _GeGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, approximate: str) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.approximate = approximate
        gate, up = x.chunk(2, -1)
        return F.gelu(gate, approximate=approximate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        grad_x = torch.empty_like(x)
        grad_gate, grad_up = grad_x.chunk(2, -1)
        torch.mul(grads[0], F.gelu(gate, approximate=ctx.approximate), out=grad_up)
        grad_gate.copy_(torch.ops.aten.gelu_backward(grads[0] * up, gate, approximate=ctx.approximate))
        return grad_x, None


def geglu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """Compute ``gelu(gate) * up`` of ``[..., 2 F]``, with the gate in the first half. ``approximate``: "none"
    or "tanh", as in `torch.nn.functional.gelu`."""
    y: torch.Tensor = _GeGLU.apply(x, approximate)
    return y


class _ReLU2(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return F.relu(x).square_()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return F.relu(x).mul_(grads[0]).mul_(2)


def relu2(x: torch.Tensor) -> torch.Tensor:
    """Compute ``max(x, 0)^2`` (So et al. 2021)."""
    y: torch.Tensor = _ReLU2.apply(x)
    return y


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu2": relu2,
    "swiglu": swiglu,
    "clamped_swiglu": clamped_swiglu,
    "geglu": geglu,
    "geglu_tanh": partial(geglu, approximate="tanh"),
}
"""Activation functions by their name in a model config."""


def takes_bias(x: torch.Tensor, kernels: Kernels) -> bool:
    """Return whether `activate`, for values like ``x``, adds the bias of the preceding product."""
    return runs_triton("activation", x, kernels)


def activate(
    name: str,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    kernels: Kernels = "auto",
    place: PartSlots | None = None,
) -> torch.Tensor:
    """Apply the named activation to ``x + bias``. With ``place``, Triton's kernels write the result and the
    gradient of ``x`` adjacent to those of the micro-batch's other parts."""
    if not runs_triton("activation", x, kernels):
        return ACTIVATIONS[name](x if bias is None else x + bias)
    from myriad.kernels.triton import activation_kernels as triton_activation

    slots = None if place is None else (place.slot(), place.slot())
    return as_rows_lie(lambda rows: triton_activation.activate(name, rows, bias, slots), x)
