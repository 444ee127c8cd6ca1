"""Matrix product whose weight gradient goes to the weight's `GradientSink` when it has one, and which is
computed in float8 when that says so.

The weight is kept as an object, not saved: a runtime that frees parameters between forward and backward (ZeRO
stage 3) may point ``weight.data`` at new memory in between.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from myriad.kernels.float8 import Float8, Seen
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
        operands: tuple[Seen, Seen] = ctx.float8.seen(x.flatten(0, -2), weight)
        ctx.largest = [operand.largest for operand in operands]
        y = ctx.float8.output(*operands).view(*x.shape[:-1], len(weight))
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_rows = grads[0].flatten(0, -2)
        grad_bias = grad_rows.sum(0) if ctx.has_bias else None
        both = _by_float8 if ctx.float8 else _by_weight
        return *both(ctx, grad_rows), grad_bias, None, None


def _by_weight(ctx: Any, grad_rows: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of the input and, where no sink takes it, of the weight."""
    grad_x = grad_weight = None
    if ctx.needs_input_grad[0]:
        grad_x = (grad_rows @ ctx.weight).view(ctx.shape)
    if ctx.needs_input_grad[1]:
        grad_weight = weight_gradient(ctx.weight, grad_rows, _input_of(ctx), ctx.later)
    return grad_x, grad_weight


def _by_float8(ctx: Any, grad_rows: torch.Tensor) -> tuple[torch.Tensor | None, None]:
    """The same in float8: one read of the gradient for both."""
    rows, columns = ctx.float8.gradient(grad_rows)
    largest_x, largest_weight = ctx.largest
    grad_x = None
    if ctx.needs_input_grad[0]:
        grad_x = ctx.float8.input_gradient(rows, Seen(ctx.weight, largest_weight)).view(ctx.shape)
    if ctx.needs_input_grad[1]:
        sink = sink_of(ctx.weight)
        assert sink is not None, "what says float8 is the sink"
        sink.run(partial(sink.add_float8, columns, Seen(_input_of(ctx), largest_x)), ctx.later)
    return grad_x, None


def _input_of(ctx: Any) -> torch.Tensor:
    x: torch.Tensor = ctx.saved_tensors[0] if ctx.remade is None else ctx.remade.take()
    return x.flatten(0, -2)


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
    sink.run(partial(sink.add_product, grad_rows, rows), later)
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
