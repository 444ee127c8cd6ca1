"""Sums of what experts computed of each token, times their gates, and the gradients of both.

    y_t = sum over the pairs p of token t of gate_p rows_p

A pair is a token and one of its destinations. The sum is in float32 in the order of a token's destinations.
On a GPU it is one Triton kernel each way (`myriad.kernels.triton.expert_kernels`); on a CPU values narrower
than the gates are multiplied in pieces that stay in a core's cache.

Legend: T tokens, P pairs, H hidden.
"""

from collections.abc import Iterator

import torch
from torch.nn import functional as F

from myriad.kernels.choice import runs_triton
from myriad.kernels.config import Kernels

__all__ = ["gate_gradients", "sum_pairs"]

_PIECE_VALUES = 2**17
"""Values of a piece, of which a core's cache holds several in float32."""


def sum_pairs(
    rows: torch.Tensor,
    places: torch.Tensor,
    begins: torch.Tensor,
    pairs: torch.Tensor,
    gates: torch.Tensor | None = None,
    kernels: Kernels = "auto",
) -> torch.Tensor:
    """Return the sums ``[T, H]`` of rows ``[P, H]``: token t has those at ``places[begins[t]:begins[t+1]]``.
    ``gates``: factors of the pairs, float32, by the numbers of the rows' ``pairs`` ``[P]``."""
    if not len(rows):
        return rows.new_zeros(len(begins), *rows.shape[1:])
    if runs_triton("experts", rows, kernels):
        from myriad.kernels.triton import expert_kernels

        return expert_kernels.sum_pairs(rows, places, begins, pairs, gates)
    if gates is not None and rows.dtype.itemsize < gates.dtype.itemsize:
        return _narrow_sums(rows, places, begins, pairs, gates)
    weights = None
    if gates is not None:
        weights = gates.flatten().index_select(0, pairs.index_select(0, places)).to(rows.dtype)
    return F.embedding_bag(places, rows, begins, mode="sum", per_sample_weights=weights)


def _narrow_sums(
    rows: torch.Tensor, places: torch.Tensor, begins: torch.Tensor, pairs: torch.Tensor, gates: torch.Tensor
) -> torch.Tensor:
    sums = rows.new_zeros(len(begins), rows.shape[1])
    pieces = list(_pieces(sums, len(rows) // len(begins) + 1))
    firsts = [int(begins[piece.start]) for piece in pieces] if len(pieces) > 1 else [0]
    for piece, first, end in zip(pieces, firsts, [*firsts[1:], len(rows)], strict=True):
        own = places[first:end]
        factors = gates.flatten().index_select(0, pairs.index_select(0, own))[:, None]
        results = rows.index_select(0, own) * factors
        numbers = torch.arange(len(results), device=rows.device)
        sums[piece] = F.embedding_bag(numbers, results, begins[piece] - first, mode="sum")
    return sums


def gate_gradients(
    grad: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    pairs: torch.Tensor,
    gates: torch.Tensor,
    kernels: Kernels = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the rows ``[P, H]`` and of the gates, from those of the sums ``[T, H]``.
    ``tokens`` and ``pairs``: token of each row, and number of its pair. A gate without a row gets zero."""
    if runs_triton("experts", rows, kernels):
        from myriad.kernels.triton import expert_kernels

        return expert_kernels.gate_gradients(grad, rows, tokens, pairs, gates)
    grad_rows, of_pairs = torch.empty_like(rows), gates.new_empty(len(rows))
    factors = gates.flatten().index_select(0, pairs)
    for piece in _pieces(rows):
        own_grad = grad.index_select(0, tokens[piece])
        torch.sum(rows[piece].to(gates.dtype) * own_grad, -1, out=of_pairs[piece])
        torch.mul(own_grad, factors[piece, None], out=grad_rows[piece])
    return grad_rows, torch.zeros_like(gates).view(-1).index_copy_(0, pairs, of_pairs).view(gates.shape)


def _pieces(rows: torch.Tensor, factor: int = 1) -> Iterator[slice]:
    """Yield slices of rows that, times ``factor``, stay in a core's cache; on a GPU one of all."""
    step = len(rows) if rows.is_cuda else max(1, _PIECE_VALUES // (rows.shape[1] * factor))
    for start in range(0, len(rows), max(step, 1)):
        yield slice(start, start + step)
