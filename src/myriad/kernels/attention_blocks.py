"""Causal attention in blocks of queries, as batched matrix products. On a CPU in float32 its backward takes
two thirds of the time of the library's flash kernel, and a window saves the work outside of it.

    keys      | block 0 | block 1 | block 2 |      queries of block 2 meet the blocks of keys from their
    queries 2           | . s s s | s s . . |      window's start to the diagonal: one product, one mask,
                                                   one softmax

Query heads that share a key/value head are rows of one product. The softmax is kept for the backward, so this
path suits short spans of keys. Rotary positions are applied while the heads are reordered, which is a pass
over memory in any case.

Legend: B batch, S sequence, K key/value heads, R query heads for each, D head size, C positions of a block,
G = K * B.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from myriad.kernels.attention_choice import Scores
from myriad.kernels.memory_order import empty_in_order
from myriad.kernels.rotary import as_pairs

__all__ = ["BLOCK", "Heads", "attention_in_blocks", "runs_in_blocks"]

BLOCK = 64
"""Number of positions of a block. Measured on AVX2 at head size 64: 32 and 128 take 5 to 20 % longer."""
_MOST_KEYS = 512
"""Largest number of keys for a block of queries. Beyond it, the memory of the kept softmax is not worth the
time."""


class Heads(NamedTuple):
    """The layout of the last dimension of a fused ``[..., (N + 2 K) D]``: queries, then keys, then values."""

    num_heads: int
    num_kv_heads: int
    width: int


class _Span(NamedTuple):
    """The blocks of keys that a block of queries attends to."""

    blocks: range
    keys: slice
    masks: tuple[tuple[slice, torch.Tensor], ...]
    """Masks of keys that only some queries see: columns of the scores, and 0 or -inf ``[R C, keys]``."""


@lru_cache(maxsize=64)
def _spans(sequence: int, window: int, repeats: int) -> tuple[_Span, ...]:
    """Return one span for each block of queries."""
    size = min(BLOCK, sequence)
    spans = []
    for block in range(sequence // size):
        blocks = range(max(0, block * size - window + 1) // size, block + 1)
        masks = []
        for column, other in enumerate(blocks):
            distance = torch.arange(size)[:, None] - torch.arange(size) + (block - other) * size
            hidden = (distance < 0) | (distance >= window)
            if hidden.any():
                mask = torch.zeros(size, size).masked_fill_(hidden, -torch.inf).repeat(repeats, 1)
                masks.append((slice(column * size, (column + 1) * size), mask))
        spans.append(_Span(blocks, slice(blocks.start * size, blocks.stop * size), tuple(masks)))
    return tuple(spans)


def runs_in_blocks(fused: torch.Tensor, window: int | None, *, capped: bool = False) -> bool:
    """Return whether this is the fastest implementation for these values. ``capped``: no kernel of the
    library supports the scores, so that any number of keys is computed here."""
    sequence = fused.shape[1]
    keys = min(sequence, (window or sequence) + 2 * BLOCK)
    fits = sequence % min(BLOCK, sequence) == 0 and (capped or keys <= _MOST_KEYS)
    return fits and fused.device.type == "cpu" and fused.dtype == torch.float32


class _Views(NamedTuple):
    """Views of the queries, keys and values of a fused tensor or of its gradient."""

    q: torch.Tensor  # [K, B, S/C, R, C, D]
    k: torch.Tensor  # [K, B, S, D]
    v: torch.Tensor  # [K, B, S, D]


def _query_view(x: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """View ``[B, S, K R, D]`` as ``[K, B, S/C, R, C, D]``."""
    return _in_blocks(x.unflatten(2, (num_kv_heads, -1)), 1).permute(3, 0, 1, 4, 2, 5)


def _views(fused: torch.Tensor, heads: Heads) -> _Views:
    each = fused.unflatten(-1, (-1, heads.width))
    q, k, v = each.split_with_sizes([heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], 2)
    return _Views(_query_view(q, heads.num_kv_heads), k.permute(2, 0, 1, 3), v.permute(2, 0, 1, 3))


def _put(target: torch.Tensor, source: torch.Tensor, turns: torch.Tensor | None) -> None:
    """Copy ``source`` to ``target`` and rotate pairs on the way. ``turns`` is complex and broadcasts to
    ``[..., D/2]``."""
    if turns is None:
        target.copy_(source)
    else:
        torch.mul(as_pairs(source), turns, out=as_pairs(target))


def _in_order(view: torch.Tensor, turns: torch.Tensor | None = None) -> torch.Tensor:
    """Return a contiguous copy ``[G, ..., D]`` of ``[K, B, ..., D]``."""
    copy = view.new_empty(view.shape)
    _put(copy, view, turns)
    return copy.flatten(0, 1)


def _in_blocks(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Split dimension ``dim`` of positions into two, ``S/C`` and ``C``."""
    return x.unflatten(dim, (-1, min(BLOCK, x.shape[dim])))


def _product(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Compute ``scale * a @ b``, batched."""
    return a.new_empty(len(a), a.shape[1], b.shape[2]).baddbmm_(a, b, beta=0, alpha=scale)


def _rows_of_heads(per_head: torch.Tensor, heads: Heads, batch: int, rows: int) -> torch.Tensor:
    """Expand a value for each head, ``[N]``, to the rows of a block of ``rows`` positions:
    ``[G, R C, 1]``."""
    each = per_head.view(heads.num_kv_heads, 1, -1, 1)
    return each.expand(-1, batch, -1, rows).reshape(heads.num_kv_heads * batch, -1, 1)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the shares of the keys. A sink is a score that takes a share and has no value."""
    if sinks is None:
        return scores.softmax(-1)
    return scores.sub_(torch.logaddexp(scores.logsumexp(-1, keepdim=True), sinks)).exp_()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        fused: torch.Tensor,
        heads: Heads,
        window: int,
        turns: torch.Tensor | None,
        how: Scores,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        views, scale = _views(fused, heads), how.factor(heads.width)
        q_turns = None if turns is None else _in_blocks(turns, 0).unsqueeze(1)
        q = _in_order(views.q, q_turns).flatten(2, 3)  # [G, S/C, R C, D]
        k, v = _in_order(views.k, turns), _in_order(views.v)  # [G, S, D]
        out = empty_in_order(fused, *fused.shape[:2], heads.num_heads, heads.width)
        blocks = _query_view(out, heads.num_kv_heads)
        spans = _spans(fused.shape[1], window, heads.num_heads // heads.num_kv_heads)
        sink_rows = None if sinks is None else _rows_of_heads(sinks, heads, len(fused), blocks.shape[4])
        shares = []
        for i, (_, keys, masks) in enumerate(spans):
            scores = _product(q[:, i], k[:, keys].transpose(1, 2), scale)
            if how.softcap is not None:
                scores.div_(how.softcap).tanh_().mul_(how.softcap)
            for columns, mask in masks:
                scores[:, :, columns] += mask
            shares.append(_softmax(scores, sink_rows))
            mixed = torch.bmm(shares[i], v[:, keys])
            blocks[:, :, i] = mixed.view(blocks[:, :, i].shape)
        ctx.save_for_backward(q, k, v, *shares)
        ctx.heads, ctx.spans, ctx.turns, ctx.how, ctx.sinks = heads, spans, turns, how, sinks
        return out.flatten(2)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        heads: Heads = ctx.heads
        turns = None if ctx.turns is None else _in_blocks(ctx.turns, 0).conj()  # [S/C, C, D/2]
        grad_out = grads[0].unflatten(-1, (-1, heads.width))
        g = _in_order(_query_view(grad_out, heads.num_kv_heads)).flatten(2, 3)
        num_heads = heads.num_heads + 2 * heads.num_kv_heads
        grad_fused = empty_in_order(grads[0], *grads[0].shape[:2], num_heads * heads.width)
        views = _views(grad_fused, heads)
        # of the sinks' logits, by rows of queries: summed over the blocks
        grad_sinks = None if ctx.sinks is None else g.new_zeros(*g.shape[:1], g.shape[2])
        grad_k, grad_v = _backward_in_order(
            g, ctx.spans, views.q, turns, ctx.how, grad_sinks, *ctx.saved_tensors
        )
        _put(_in_blocks(views.k, 2), _by_heads(grad_k, heads), turns)
        _put(_in_blocks(views.v, 2), _by_heads(grad_v, heads), None)
        if grad_sinks is not None:
            each = grad_sinks.view(heads.num_kv_heads, len(grad_fused), -1, views.q.shape[4])
            grad_sinks = each.sum((1, 3)).flatten().to(ctx.sinks.dtype)
        return grad_fused, None, None, None, None, grad_sinks


def _by_heads(blocks: torch.Tensor, heads: Heads) -> torch.Tensor:
    """View ``[S/C, G, C, D]`` as ``[K, B, S/C, C, D]``."""
    return blocks.unflatten(1, (heads.num_kv_heads, -1)).permute(1, 2, 0, 3, 4)


def _backward_in_order(
    g: torch.Tensor,
    spans: tuple[_Span, ...],
    grad_q: torch.Tensor,
    turns: torch.Tensor | None,
    how: Scores,
    grad_sinks: torch.Tensor | None,
    *saved: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of keys and values by blocks, ``[S/C, G, C, D]``: each block is contiguous, so
    that products are added in place. The gradient of queries is written to ``grad_q``
    ``[K, B, S/C, R, C, D]``, rotated; that of the sinks is added to ``grad_sinks`` ``[G, R C]``."""
    q, k, v, *shares = saved
    num_groups, num_blocks, _, width = q.shape
    size, scale = k.shape[1] // num_blocks, how.factor(width)
    grad_k = k.new_empty(num_blocks, num_groups, size, width)
    grad_v = torch.empty_like(grad_k)
    for i, (blocks, keys, _) in enumerate(spans):
        grad_shares = torch.bmm(g[:, i], v[:, keys].transpose(1, 2))
        grad_scores = torch._softmax_backward_data(grad_shares, shares[i], -1, k.dtype)
        if grad_sinks is not None:
            grad_sinks -= (1 - shares[i].sum(-1)) * (grad_shares * shares[i]).sum(-1)
        if how.softcap is not None:  # the slope of tanh, from the scores computed again
            capped = _product(q[:, i], k[:, keys].transpose(1, 2), scale / how.softcap).tanh_()
            grad_scores.mul_(capped.square_().neg_().add_(1))
        of_queries = _product(grad_scores, k[:, keys], scale)
        _put(grad_q[:, :, i], of_queries.view(grad_q[:, :, i].shape), None if turns is None else turns[i])
        for column, block in enumerate(blocks):
            columns = slice(column * size, (column + 1) * size)
            beta = int(block != i)  # its own queries are the first that attend to a block
            grad_v[block].baddbmm_(shares[i][:, :, columns].transpose(1, 2), g[:, i], beta=beta)
            of_keys = grad_scores[:, :, columns].transpose(1, 2)
            grad_k[block].baddbmm_(of_keys, q[:, i], beta=beta, alpha=scale)
    return grad_k, grad_v


def attention_in_blocks(
    fused: torch.Tensor,
    heads: Heads,
    window: int | None,
    turns: torch.Tensor | None,
    how: Scores = Scores(),
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from queries, keys and values ``[B, S, (N + 2 K) D]`` to ``[B, S, N D]``; queries and keys are
    rotated first. ``sinks``: score of each head's sink, ``[N]``."""
    out: torch.Tensor = _Attention.apply(fused, heads, window or fused.shape[1], turns, how, sinks)
    return out
