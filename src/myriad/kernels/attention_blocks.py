"""Causal attention in blocks of queries, as batched matrix products: on a CPU in float32 its backward takes
two thirds of the time of the library's flash kernel, and a window saves what it leaves out.

    keys      | block 0 | block 1 | block 2 |      queries of block 2 meet the blocks of keys from their
    window's queries 2           | . s s s | s s . . |      start to the diagonal: one product, one mask, one
    softmax

Query heads that share a key/value head are rows of one product. The softmax is kept for the backward, so this
is for short spans of keys. Turning by rotary positions happens while the heads are put in order, which is a
pass over memory in any case.

Legend: B batch, S sequence, K key/value heads, R query heads for each, D head size, C positions of a block,
G = K * B.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from myriad.kernels.rotary import as_pairs

__all__ = ["BLOCK", "Heads", "attention_in_blocks", "runs_in_blocks"]

BLOCK = 64
"""Positions of a block. Measured on AVX2 at head size 64: 32 and 128 take 5 to 20 % longer."""
_MOST_KEYS = 512
"""Keys that a block of queries meets at most: beyond, the memory of the kept softmax is not worth its
time."""


class Heads(NamedTuple):
    """How the last dimension of a fused ``[..., (N + 2 K) D]`` is made up: queries, then keys, then
    values."""

    num_heads: int
    num_kv_heads: int
    width: int


class _Span(NamedTuple):
    """The blocks of keys that a block of queries meets."""

    blocks: range
    keys: slice
    mask: torch.Tensor  # [R C, keys], 0 or -inf


@lru_cache(maxsize=64)
def _spans(sequence: int, window: int, repeats: int) -> tuple[_Span, ...]:
    """One for each block of queries."""
    size = min(BLOCK, sequence)
    spans = []
    for block in range(sequence // size):
        blocks = range(max(0, block * size - window + 1) // size, block + 1)
        keys = slice(blocks.start * size, blocks.stop * size)
        distance = torch.arange(block * size, keys.stop)[:, None] - torch.arange(keys.start, keys.stop)
        mask = torch.zeros(distance.shape).masked_fill_((distance < 0) | (distance >= window), -torch.inf)
        spans.append(_Span(blocks, keys, mask.repeat(repeats, 1)))
    return tuple(spans)


def runs_in_blocks(fused: torch.Tensor, window: int | None) -> bool:
    """Whether this is the fastest path for these values."""
    sequence = fused.shape[1]
    keys = min(sequence, (window or sequence) + 2 * BLOCK)
    fits = sequence % min(BLOCK, sequence) == 0 and keys <= _MOST_KEYS
    return fits and fused.device.type == "cpu" and fused.dtype == torch.float32


class _Views(NamedTuple):
    """A fused tensor, or its gradient, taken apart."""

    q: torch.Tensor  # [K, B, S/C, R, C, D]
    k: torch.Tensor  # [K, B, S, D]
    v: torch.Tensor  # [K, B, S, D]


def _query_view(x: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """``[B, S, K R, D]`` as ``[K, B, S/C, R, C, D]``."""
    size = min(BLOCK, x.shape[1])
    return x.unflatten(2, (num_kv_heads, -1)).unflatten(1, (-1, size)).permute(3, 0, 1, 4, 2, 5)


def _views(fused: torch.Tensor, heads: Heads) -> _Views:
    each = fused.unflatten(-1, (-1, heads.width))
    q, k, v = each.split_with_sizes([heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], 2)
    return _Views(_query_view(q, heads.num_kv_heads), k.permute(2, 0, 1, 3), v.permute(2, 0, 1, 3))


def _put(target: torch.Tensor, source: torch.Tensor, factor: torch.Tensor | float) -> None:
    """``target = source * factor``; a complex factor fits ``[..., D/2]`` and turns pairs."""
    if isinstance(factor, torch.Tensor):
        torch.mul(as_pairs(source), factor, out=as_pairs(target))
    elif factor == 1:
        target.copy_(source)
    else:
        torch.mul(source, factor, out=target)


def _in_order(view: torch.Tensor, factor: torch.Tensor | float) -> torch.Tensor:
    """``[K, B, ..., D]`` times factor as contiguous ``[G, ..., D]``."""
    copy = view.new_empty(view.shape)
    _put(copy, view, factor)
    return copy.flatten(0, 1)


class _Factors(NamedTuple):
    """What queries and keys are multiplied by: the scale of scores (queries only) and the turns of
    positions."""

    q: torch.Tensor | float  # [S/C, 1, C, D/2]
    k: torch.Tensor | float  # [S, D/2]

    @classmethod
    def of(cls, turns: torch.Tensor | None, width: int) -> "_Factors":
        scale = width**-0.5
        if turns is None:
            return cls(scale, 1.0)
        blocks = turns.unflatten(0, (-1, min(BLOCK, len(turns)))).unsqueeze(1)
        return cls(blocks * scale, turns)

    def back(self) -> "_Factors":
        """For the gradient: the same scale, turned the other way."""
        return _Factors(*(x.conj() if isinstance(x, torch.Tensor) else x for x in self))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, fused: torch.Tensor, heads: Heads, window: int, turns: torch.Tensor | None
    ) -> torch.Tensor:
        views, factors = _views(fused, heads), _Factors.of(turns, heads.width)
        q = _in_order(views.q, factors.q).flatten(2, 3)  # [G, S/C, R C, D]
        k, v = _in_order(views.k, factors.k), _in_order(views.v, 1.0)  # [G, S, D]
        out = fused.new_empty(*fused.shape[:2], heads.num_heads, heads.width)
        blocks = _query_view(out, heads.num_kv_heads)
        spans = _spans(fused.shape[1], window, heads.num_heads // heads.num_kv_heads)
        shares = []
        for i, (_, keys, mask) in enumerate(spans):
            scores = torch.baddbmm(mask, q[:, i], k[:, keys].transpose(1, 2))
            shares.append(scores.softmax(-1))
            mixed = torch.bmm(shares[i], v[:, keys])
            blocks[:, :, i] = mixed.view(blocks[:, :, i].shape)
        ctx.save_for_backward(q, k, v, *shares)
        ctx.heads, ctx.spans, ctx.factors = heads, spans, factors
        return out.flatten(2)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        heads: Heads = ctx.heads
        factors = ctx.factors.back()
        grad_out = grads[0].unflatten(-1, (-1, heads.width))
        g = _in_order(_query_view(grad_out, heads.num_kv_heads), 1.0).flatten(2, 3)
        grad_q, grad_k, grad_v = _backward_in_order(g, ctx.spans, *ctx.saved_tensors)
        num_heads = heads.num_heads + 2 * heads.num_kv_heads
        grad_fused = grads[0].new_empty(*grads[0].shape[:2], num_heads * heads.width)
        views = _views(grad_fused, heads)
        _put(views.q, grad_q.view(views.q.shape), factors.q)
        _put(views.k, grad_k.transpose(0, 1).reshape(views.k.shape), factors.k)
        _put(views.v, grad_v.transpose(0, 1).reshape(views.v.shape), 1.0)
        return grad_fused, None, None, None


def _backward_in_order(
    g: torch.Tensor,
    spans: tuple[_Span, ...],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *shares: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries ``[G, S/C, R C, D]``, and of keys and values by blocks, ``[S/C, G, C, D]``: each
    block is contiguous, so that products are added in place."""
    num_groups, num_blocks, _, width = q.shape
    size = k.shape[1] // num_blocks
    grad_q = torch.empty_like(q)
    grad_k = k.new_empty(num_blocks, num_groups, size, width)
    grad_v = torch.empty_like(grad_k)
    for i, (blocks, keys, _) in enumerate(spans):
        grad_shares = torch.bmm(g[:, i], v[:, keys].transpose(1, 2))
        grad_scores = torch._softmax_backward_data(grad_shares, shares[i], -1, k.dtype)
        grad_q[:, i] = torch.bmm(grad_scores, k[:, keys])
        for column, block in enumerate(blocks):
            of_block = slice(column * size, (column + 1) * size)
            beta = int(block != i)  # its own queries are the first that meet a block of keys
            grad_v[block].baddbmm_(shares[i][:, :, of_block].transpose(1, 2), g[:, i], beta=beta)
            grad_k[block].baddbmm_(grad_scores[:, :, of_block].transpose(1, 2), q[:, i], beta=beta)
    return grad_q, grad_k, grad_v


def attention_in_blocks(
    fused: torch.Tensor, heads: Heads, window: int | None, turns: torch.Tensor | None
) -> torch.Tensor:
    """Queries, keys and values ``[B, S, (N + 2 K) D]`` to ``[B, S, N D]``; queries and keys are turned
    first."""
    out: torch.Tensor = _Attention.apply(fused, heads, window or fused.shape[1], turns)
    return out
