"""Lookup in this rank's rows of a table; tokens of other ranks' rows give zeros.

The gradient is added row by row to the weight's `GradientSink`, without a dense tensor of the table's size.

Legend: B batch, S sequence, H hidden, V vocabulary.
"""

from typing import Any

import torch
from torch.nn import functional as F

from myriad.kernels.gradient import sink_of
from myriad.kernels.memory_order import is_sequence_first

__all__ = ["add_rows_sorted", "embedding", "embedding_reference"]


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, absent: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, absent)
        ctx.weight = weight
        found = F.embedding(rows, weight)
        return found.masked_fill_(absent[..., None], 0.0) if absent.numel() else found

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, torch.Tensor | None, None]:
        rows, absent = ctx.saved_tensors
        weight: torch.Tensor = ctx.weight
        grad = grads[0].masked_fill(absent[..., None], 0.0) if absent.numel() else grads[0]
        sink = sink_of(weight)
        if sink is None:
            dense = torch.ops.aten.embedding_dense_backward(grad, rows, weight.shape[0], -1, False)
            return None, dense, None
        _add_rows(sink.total, rows.flatten(), grad.flatten(0, -2), absent.flatten())
        return None, None, None


def _add_rows(total: torch.Tensor, rows: torch.Tensor, gradients: torch.Tensor, absent: torch.Tensor) -> None:
    """Add ``gradients`` ``[T, H]`` to ``rows`` ``[T]`` of ``total`` ``[V/tp, H]``, always in the same order.
    Gradients of ``absent`` tokens are zeros."""
    gradients = gradients.to(total.dtype)
    if total.is_cuda:
        add_rows_sorted(total, rows, gradients, absent)
    else:
        total.index_add_(0, rows, gradients)


def add_rows_sorted(
    total: torch.Tensor, rows: torch.Tensor, gradients: torch.Tensor, absent: torch.Tensor
) -> None:
    """Add rows as `_add_rows` does, on a GPU: sort the tokens by row and add those of a row one after
    another. ``index_add_`` would use atomics.

    ``absent``: ``[T]`` or ``[0]``. Absent tokens, 7 of 8 with tp 8, would all wait for one row, so they are
    spread over different rows.
    """
    if absent.numel():
        rows = torch.where(absent, torch.arange(len(rows), device=rows.device) % len(total), rows)
    total.index_put_((rows,), gradients, accumulate=True)


def embedding(
    tokens: torch.Tensor, weight: torch.Tensor, first_row: int, vocabulary_size: int
) -> torch.Tensor:
    """Look up rows of ``weight`` ``[V/tp, H]``, which holds the rows from ``first_row`` of
    ``vocabulary_size``. Tokens ``[B, S]`` give ``[B, S, H]``, in the memory order of the tokens; with a
    partial table the result is a partial sum."""
    rows = tokens
    absent = torch.empty(0, dtype=torch.bool, device=tokens.device)
    if weight.shape[0] < vocabulary_size:
        rows = tokens - first_row
        absent = (rows < 0) | (rows >= weight.shape[0])
        rows = rows.masked_fill(absent, 0)
    if is_sequence_first(tokens):
        turned = absent.t() if absent.numel() else absent
        found: torch.Tensor = _Embedding.apply(rows.t(), weight, turned)
        return found.transpose(0, 1)
    found = _Embedding.apply(rows, weight, absent)
    return found


def embedding_reference(tokens: torch.Tensor, weight: torch.Tensor, first_row: int) -> torch.Tensor:
    """Look up one row at a time."""
    rows = [
        weight[token - first_row] if 0 <= token - first_row < len(weight) else torch.zeros_like(weight[0])
        for token in tokens.flatten().tolist()
    ]
    return torch.stack(rows).unflatten(0, tokens.shape)
