"""The two branches of the parallel block, where their products meet. Their first products have the same
input; the results of their last products are added.

    in    fused = x A^T, up = x B^T          one product x [A; B]^T where A and B are adjacent in memory
          grad_x = grad_fused A + grad_up B  the second product adds to the first's result
    out   y = mixed C^T + inner D^T          the same

No result is written only to be added. A and B are views of the chunk's flat buffer, as their gradient sinks
are, so one product needs no copy of them. Its results are two views of one piece of memory, which stays
allocated as long as either view is. That costs nothing if the backward keeps both (without rotary positions);
otherwise set ``as_one`` to False.

A weight that is multiplied in float8 uses the ordinary products, because it has its own scales.

Legend: T tokens, H hidden.
"""

from typing import Any

import torch
from torch.nn import functional as F

from myriad.kernels.gradient import rows_as_one, sink_of
from myriad.kernels.linear import Later, linear, parts_of, rows_as_they_lie, weight_gradient
from myriad.kernels.memory_order import is_sequence_first
from myriad.kernels.remade import Remade

__all__ = ["linear_pair", "linear_sum"]


def _is_float8(*weights: torch.Tensor) -> bool:
    sinks = (sink_of(weight) for weight in weights)
    return any(sink is not None and sink.float8 is not None for sink in sinks)


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weights: tuple[torch.Tensor, torch.Tensor],
        later: Later,
        remade: Remade | None,
        as_one: bool,
        *parameters: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        _, _, first_bias, second_bias = parameters
        if remade is None:
            ctx.save_for_backward(x)
        ctx.weights, ctx.later, ctx.remade, ctx.shape = weights, later, remade, x.shape
        ctx.num_parts = parts_of(later)
        ctx.has_bias = (first_bias is not None, second_bias is not None)
        whole = rows_as_one(*weights) if as_one and ctx.has_bias[0] == ctx.has_bias[1] else None
        if whole is None:
            return F.linear(x, weights[0], first_bias), F.linear(x, weights[1], second_bias)
        bias = None
        if first_bias is not None and second_bias is not None:
            bias = torch.cat([first_bias, second_bias])
        return F.linear(x, whole, bias).split([len(weight) for weight in weights], -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows = [grad.flatten(0, -2) for grad in grads]
        grad_x = torch.mm(rows[0], ctx.weights[0]).addmm_(rows[1], ctx.weights[1]).view(ctx.shape)
        found = ctx.saved_tensors * 2 if ctx.remade is None else [ctx.remade.take() for _ in rows]
        x = rows_as_they_lie(found[0])
        pairs = zip(ctx.weights, rows, strict=True)
        weights = [
            weight_gradient(weight, grad_rows, x, ctx.later, ctx.num_parts) for weight, grad_rows in pairs
        ]
        biases = [own.sum(0) if has else None for own, has in zip(rows, ctx.has_bias, strict=True)]
        return grad_x, None, None, None, None, *weights, *biases


def linear_pair(
    x: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    later: Later = None,
    remade: Remade | None = None,
    *,
    as_one: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x A^T + a`` and ``x B^T + b``. ``later`` and ``remade`` (with two takers) are those of
    `linear`."""
    if _is_float8(*weights):
        first, second = (
            linear(x, weight, bias, later, remade) for weight, bias in zip(weights, biases, strict=True)
        )
        return first, second
    if x.ndim != 3 or not is_sequence_first(x):
        fused, up = _Pair.apply(x, weights, later, remade, as_one, *weights, *biases)
        return fused, up
    fused, up = _Pair.apply(x.transpose(0, 1), weights, later, remade, as_one, *weights, *biases)
    return fused.transpose(0, 1), up.transpose(0, 1)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mixed: torch.Tensor,
        inner: torch.Tensor,
        first: torch.Tensor,
        second: torch.Tensor,
        later: Later,
        remade: Remade | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(mixed, *([inner] if remade is None else []))
        ctx.weights, ctx.later, ctx.remade = (first, second), later, remade
        ctx.num_parts = parts_of(later)
        ctx.shapes = mixed.shape, inner.shape
        rows = torch.mm(mixed.flatten(0, -2), first.t()).addmm_(inner.flatten(0, -2), second.t())
        return rows.view(*mixed.shape[:-1], len(first))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows = grads[0].flatten(0, -2)
        inputs = [*ctx.saved_tensors]
        if ctx.remade is not None:
            inputs.append(ctx.remade.take())
        grad_inputs = [
            (rows @ weight).view(shape) for weight, shape in zip(ctx.weights, ctx.shapes, strict=True)
        ]
        weights = [
            weight_gradient(weight, rows, rows_as_they_lie(x), ctx.later, ctx.num_parts)
            for weight, x in zip(ctx.weights, inputs, strict=True)
        ]
        return *grad_inputs, *weights, None, None


def linear_sum(
    mixed: torch.Tensor,
    inner: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    later: Later = None,
    remade: Remade | None = None,
) -> torch.Tensor:
    """Return ``mixed C^T + inner D^T``. ``remade``: recomputes ``inner`` in the backward."""
    if _is_float8(*weights):
        return linear(mixed, weights[0], later=later) + linear(inner, weights[1], later=later, remade=remade)
    if mixed.ndim != 3 or not is_sequence_first(mixed):
        y: torch.Tensor = _Sum.apply(mixed, inner, *weights, later, remade)
        return y
    y = _Sum.apply(mixed.transpose(0, 1), inner.transpose(0, 1), *weights, later, remade)
    return y.transpose(0, 1)
