"""Matrix product whose weight gradient goes to the weight's `GradientSink` when it has one, and which is
computed in float8 when that says so.

The weight is kept as an object, not saved: a runtime that frees parameters between forward and backward (ZeRO
stage 3) may point ``weight.data`` at new memory in between.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from myriad.kernels.float8 import Float8
from myriad.kernels.gradient import DeferredProduct, sink_of
from myriad.kernels.remade import Remade

__all__ = ["Linear", "linear"]

Later = list[DeferredProduct] | None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        later: Later,
        remade: Remade | None,
    ) -> torch.Tensor:
        if remade is None:
            ctx.save_for_backward(x)
        ctx.weight, ctx.later, ctx.remade, ctx.shape = weight, later, remade, x.shape
        ctx.has_bias, ctx.float8 = bias is not None, _float8_of(weight)
        if ctx.float8 is None:
            return F.linear(x, weight, bias)
        y = ctx.float8.output(x.flatten(0, -2), weight).view(*x.shape[:-1], len(weight))
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_output,) = grads
        weight: torch.Tensor = ctx.weight
        grad_rows = grad_output.flatten(0, -2)
        grad_x = None
        if ctx.needs_input_grad[0]:
            own = ctx.float8.input_gradient(grad_rows, weight) if ctx.float8 else grad_rows @ weight
            grad_x = own.view(ctx.shape)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            x = ctx.saved_tensors[0] if ctx.remade is None else ctx.remade.take()
            grad_weight = weight_gradient(weight, grad_rows, x.flatten(0, -2), ctx.later)
        return grad_x, grad_weight, grad_rows.sum(0) if ctx.has_bias else None, None, None


def _float8_of(weight: torch.Tensor) -> Float8 | None:
    sink = sink_of(weight)
    return None if sink is None else sink.float8


def weight_gradient(
    weight: torch.Tensor, grad_rows: torch.Tensor, rows: torch.Tensor, later: Later = None
) -> torch.Tensor | None:
    """``grad_rows^T rows``, to the weight's sink (then ``None``), at once or later, or as a tensor for
    autograd."""
    sink = sink_of(weight)
    if sink is None:
        return grad_rows.t() @ rows
    if later is not None and sink.deferred is None:
        later.append(DeferredProduct(sink, grad_rows, rows))
    else:
        sink.add_product(grad_rows, rows)
    return None


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    later: Later = None,
    remade: Remade | None = None,
) -> torch.Tensor:
    """``x weight^T + bias``: ``[..., I]`` and ``[O, I]`` to ``[..., O]``. With ``later``, the weight's
    product is put there by the backward, for the caller to apply before it ends. With ``remade``, the
    backward takes ``x`` from there, and it is not kept."""
    y: torch.Tensor = _Linear.apply(x, weight, bias, later, remade)
    return y


class Linear(nn.Module):
    """A weight ``[outputs, inputs]`` and perhaps a bias, of memory nobody has written to yet."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False, later: Later = None) -> None:
        super().__init__()
        self.later = later
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: torch.Tensor, remade: Remade | None = None) -> torch.Tensor:
        return linear(x, self.weight, self.bias, self.later, remade)
