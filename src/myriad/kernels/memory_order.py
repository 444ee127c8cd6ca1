"""Memory order of a micro-batch's tokens: sequence by sequence, or position by position.

Tensor-parallel ranks gather pieces of the sequence. With several sequences the pieces are contiguous only if
the sequence is the outer dimension in memory, ``[S, B, H]`` (as in Megatron-LM); otherwise each gather ends
with a copy and each reduce-scatter begins with one. Shapes are always ``[B, S, H]``: a tensor with
``[S, B, H]`` memory is a transposed view, and an operator's result has the memory order of its input:

    as_rows_lie(operator, x)     apply an operator to the rows in memory order, without a copy
    lay_sequence_first(x)        make the one copy, at the beginning of a stage

With one sequence or one position, both orders are the same.

Legend: B batch, S sequence, H hidden.
"""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["as_rows_lie", "empty_in_order", "is_sequence_first", "lay_gradient_first", "lay_sequence_first"]


def is_sequence_first(x: torch.Tensor) -> bool:
    """Return whether the rows of all sequences at one position of ``x`` ``[B, S, ...]`` are adjacent in
    memory."""
    return x.shape[0] > 1 and x.shape[1] > 1 and 0 < x.stride(0) < x.stride(1)


def as_rows_lie(operator: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Apply ``operator`` to the rows of ``x`` ``[..., H]`` in their memory order: the outer two of three
    dimensions may be swapped in memory. The result has the same memory order."""
    if x.ndim != 3 or not is_sequence_first(x):
        return operator(x)
    return operator(x.transpose(0, 1)).transpose(0, 1)


def empty_in_order(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return uninitialised memory for ``[B, S, ...]`` in the memory order of ``like`` ``[B, S, ...]``."""
    if not is_sequence_first(like):
        return like.new_empty(shape)
    batch, sequence, *rest = shape
    return like.new_empty(sequence, batch, *rest).transpose(0, 1)


def lay_sequence_first(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` ``[B, S, ...]`` in sequence-first memory order; it is copied if needed."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


class _GradientFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return lay_sequence_first(grads[0])


def lay_gradient_first(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` unchanged; its gradient is put in sequence-first memory order."""
    y: torch.Tensor = _GradientFirst.apply(x)
    return y
