"""Matrix product whose weight gradient is added to the weight's `GradientSink` if it has one. The product is
computed in float8 if the sink requests it.

The weight is kept as an object, not saved for the backward: a runtime that frees parameters between forward
and backward (ZeRO stage 3) may point ``weight.data`` to new memory in between.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from myriad.kernels.float8 import Float8, Float8Operand, KeptForms
from myriad.kernels.gradient import DeferredProduct, LaterProducts, WeightProduct, sink_of
from myriad.kernels.memory_order import as_rows_lie, is_sequence_first
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
        ctx.has_bias, ctx.float8, ctx.num_parts = bias is not None, _float8_of(weight), parts_of(later)
        if ctx.float8 is None:
            return F.linear(x, weight, bias)
        ctx.kept = _forms_of(weight)
        operands: tuple[Float8Operand, Float8Operand] = ctx.float8.seen(x.flatten(0, -2), weight, ctx.kept)
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
    """Return the gradients of the input and, if the weight has no sink, of the weight."""
    grad_x = grad_weight = None
    if ctx.needs_input_grad[0]:
        grad_x = (grad_rows @ ctx.weight).view(ctx.shape)
    if ctx.needs_input_grad[1]:
        grad_weight = weight_gradient(ctx.weight, grad_rows, _input_of(ctx), ctx.later, ctx.num_parts)
    return grad_x, grad_weight


def _by_float8(ctx: Any, grad_rows: torch.Tensor) -> tuple[torch.Tensor | None, None]:
    """Compute the gradients in float8, with one read of the output's gradient for both."""
    rows, columns = ctx.float8.gradient(grad_rows)
    largest_x, largest_weight = ctx.largest
    grad_x = None
    if ctx.needs_input_grad[0]:
        kept = ctx.kept
        weight = (
            Float8Operand(ctx.weight, largest_weight) if kept is None else kept.seen(ctx.weight, ctx.float8)
        )
        grad_x = ctx.float8.input_gradient(rows, weight).view(ctx.shape)
    if ctx.needs_input_grad[1]:
        sink = sink_of(ctx.weight)
        assert sink is not None, "what says float8 is the sink"
        sink.run(partial(sink.add_float8, columns, Float8Operand(_input_of(ctx), largest_x)), ctx.later)
    return grad_x, None


def _input_of(ctx: Any) -> torch.Tensor:
    return rows_as_they_lie(ctx.saved_tensors[0] if ctx.remade is None else ctx.remade.take())


def rows_as_they_lie(x: torch.Tensor) -> torch.Tensor:
    """Flatten ``[..., I]`` to ``[T, I]``, with rows in the order in which `linear` processed them."""
    x = x.transpose(0, 1) if x.ndim == 3 and is_sequence_first(x) else x
    return x.flatten(0, -2)


def _float8_of(weight: torch.Tensor) -> Float8 | None:
    sink = sink_of(weight)
    return None if sink is None else sink.float8


def _forms_of(weight: torch.Tensor) -> KeptForms | None:
    sink = sink_of(weight)
    return None if sink is None else sink.forms


def weight_gradient(
    weight: torch.Tensor,
    grad_rows: torch.Tensor,
    rows: torch.Tensor,
    later: Later = None,
    num_parts: int = 1,
) -> torch.Tensor | None:
    """Compute ``grad_rows^T rows`` and add it to the weight's sink, at once or later. Without a sink, return
    it as a tensor for autograd. ``num_parts``: parts of the micro-batch, each of which gives such a product
    (`parts_of`)."""
    sink = sink_of(weight)
    if sink is None:
        return grad_rows.t() @ rows
    sink.run(WeightProduct(sink, grad_rows, rows, num_parts), later)
    return None


def parts_of(later: Later) -> int:
    """Return the number of parts of the micro-batch that is in its forward pass."""
    return later.num_parts if isinstance(later, LaterProducts) else 1


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    later: Later = None,
    remade: Remade | None = None,
) -> torch.Tensor:
    """Compute ``x weight^T + bias``: ``[..., I]`` and ``[O, I]`` to ``[..., O]``.

    ``later``: list to which the backward appends the weight's product; the caller applies it before the
    backward ends. ``remade``: recomputes ``x`` in the backward; then ``x`` is not kept.
    """
    return as_rows_lie(lambda rows: _Linear.apply(rows, weight, bias, later, remade), x)


class Linear(nn.Module):
    """A weight ``[outputs, inputs]`` and an optional bias, in uninitialised memory."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False, later: Later = None) -> None:
        super().__init__()
        self.later = later
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: torch.Tensor, remade: Remade | None = None) -> torch.Tensor:
        return linear(x, self.weight, self.bias, self.later, remade)
