"""Attention of some queries with some keys, which other pieces complete.

A piece (`myriad.kernels.ring_plan`) is a range of queries and a range of keys. Its result is the output and
the logarithm of the sum of the exponentials of its scores (log-sum-exp), with which the results of several
pieces for the same queries are joined to those of one softmax over all their keys (Milakov and Gimelshein,
arXiv 1805.02867):

    lse = log(exp(lse_1) + exp(lse_2))      out = out_1 exp(lse_1 - lse) + out_2 exp(lse_2 - lse)

The backward of a piece gets the joined log-sum-exp and output, so it needs no other piece.

A list of pieces is computed in one of three ways (`choose_pieces`). Triton's kernels compute all of them in
one launch, and join results in registers. Else each piece is one call of the library's kernel if no score has
a bound and no query sees only some of the keys (except those of its own range), and otherwise `_scores`, some
queries at a time.

In memory, all tensors are ``[B, S, N, D]``.

Legend: B batch, N query heads, K key/value heads, D head size, Q queries, P keys, S positions of a rank.
"""

from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

from myriad.kernels.attention_choice import AttentionShape, Scores, choose_pieces
from myriad.kernels.choice import in_interpreter
from myriad.kernels.config import Kernels
from myriad.kernels.ring_plan import Piece, Pieces

__all__ = [
    "Joined",
    "PieceGradients",
    "join_pieces",
    "piece_backward",
    "piece_forward",
    "piece_maxima",
]

_SCORE_BYTES = 2**25
"""Bytes of scores in memory at a time."""


class Joined(NamedTuple):
    """The results of pieces."""

    out: torch.Tensor
    """``[B, Q, N, D]``."""
    lse: torch.Tensor
    """Log-sum-exp of the scores, float32 ``[B, Q, N]``; minus infinity for a query without keys."""

    @classmethod
    def nothing(cls, q: torch.Tensor) -> "Joined":
        """Return the result of no piece for queries ``[B, Q, N, D]``, in float32. Its log-sum-exp is
        ``[B, N, Q]`` in memory, as kernels want it."""
        batch, queries, heads, _ = q.shape
        lse = torch.full((batch, heads, queries), -torch.inf, dtype=torch.float32, device=q.device)
        return cls(torch.zeros(q.shape, dtype=torch.float32, device=q.device), lse.transpose(1, 2))

    def add(self, piece: Piece, other: "Joined") -> None:
        """Join the result of a piece, in place."""
        out, lse = self.out[piece.rows, piece.queries], self.lse[piece.rows, piece.queries]
        joined = torch.logaddexp(lse, other.lse)
        # a query that has seen no key at all would give NaN
        finite = joined.masked_fill(joined == -torch.inf, 0.0)
        out *= (lse - finite).exp_().unsqueeze(-1)
        out += other.out * (other.lse - finite).exp_().unsqueeze(-1)
        lse.copy_(joined)


def join_pieces(
    joined: Joined,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pieces: Pieces,
    how: Scores,
    kernels: Kernels = "auto",
) -> None:
    """Attend from queries ``[B, S, N, D]`` to keys and values ``[B, P, K, D]`` in all pieces of a list, and
    join the results to ``joined``, of all queries, in place."""
    if _runs_triton(q, pieces, how, kernels):
        from myriad.kernels.attention_flash import flash_forward

        flash_forward(pieces, q, k, v, joined.out, joined.lse.transpose(1, 2), how, joins=True)
        return
    for piece in pieces:
        at, of = (piece.rows, piece.queries), (piece.rows, piece.keys)
        joined.add(piece, piece_forward(q[at], k[of], v[of], piece, how))


class PieceGradients:
    """Adds up the gradients of pieces whose results were joined."""

    def __init__(
        self, grad: torch.Tensor, q: torch.Tensor, joined: Joined, how: Scores, kernels: Kernels = "auto"
    ) -> None:
        """``grad``: of the joined output of queries ``q``, all ``[B, S, N, D]``."""
        self._grad, self._q, self._joined, self._how, self._kernels = grad, q, joined, how, kernels
        self.of_queries = torch.zeros(q.shape, dtype=torch.float32, device=q.device)

    def add(
        self,
        pieces: Pieces,
        k: torch.Tensor,
        v: torch.Tensor,
        of_keys: torch.Tensor,
        of_values: torch.Tensor,
    ) -> None:
        """Add the gradients of a list of pieces with keys and values ``[B, P, K, D]`` to `of_queries`, and to
        ``of_keys`` and ``of_values``, float32 ``[B, P, K, D]``."""
        if _runs_triton(self._q, pieces, self._how, self._kernels):
            from myriad.kernels.attention_flash import flash_backward

            inputs, grads = (self._q, k, v, self._grad), (self.of_queries, of_keys, of_values)
            flash_backward(pieces, inputs, *self._rows, grads, self._how, adds=True)
            return
        grad, q, joined = self._grad, self._q, self._joined
        for piece in pieces:
            at, of = (piece.rows, piece.queries), (piece.rows, piece.keys)
            own = Joined(joined.out[at], joined.lse[at])
            found = piece_backward(grad[at], q[at], k[of], v[of], own, piece, self._how)
            for total, place, one in zip(
                (self.of_queries, of_keys, of_values), (at, of, of), found, strict=True
            ):
                total[place] += one

    @cached_property
    def _rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-sum-exp, and the product of output and gradient, of each row, ``[B, N, S]``."""
        from myriad.kernels.attention_flash import row_products

        lse = self._joined.lse.transpose(1, 2).contiguous()
        return lse, row_products(self._joined.out, self._grad)


def piece_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: Piece, how: Scores) -> Joined:
    """Attend from queries ``[B, Q, N, D]`` to keys and values ``[B, P, K, D]``."""
    scale = how.factor(q.shape[-1])
    if not _is_for_library(q, piece, how):
        return _scores_forward(q, k, v, piece, how)
    q, k, v = _by_heads(q, k, v)
    causal = not piece.is_full
    if q.is_cuda:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, return_debug_mask=False, scale=scale
        )[:2]
    else:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=None, scale=scale
        )
    return Joined(out.transpose(1, 2), lse.transpose(1, 2))


def piece_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    joined: Joined,
    piece: Piece,
    how: Scores,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, keys and values of a piece. ``grad`` is that of the joined output."""
    num_kv_heads, scale = k.shape[2], how.factor(q.shape[-1])
    if not _is_for_library(q, piece, how):
        return _scores_backward(grad, q, k, v, joined, piece, how)
    q, k, v = _by_heads(q, k, v)
    causal = not piece.is_full
    grad, out, lse = grad.transpose(1, 2), joined.out.transpose(1, 2), joined.lse.transpose(1, 2)
    if q.is_cuda:  # reads the log-sum-exp as if it were contiguous
        found = _backward_on_gpu(grad, q, k, v, out, lse.contiguous(), scale, causal=causal)
    else:
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=None, scale=scale
        )
    of_queries, of_keys, of_values = (one.transpose(1, 2) for one in found)
    return of_queries, _of_kv_heads(of_keys, num_kv_heads), _of_kv_heads(of_values, num_kv_heads)


def piece_maxima(q: torch.Tensor, k: torch.Tensor, piece: Piece, scale: float) -> torch.Tensor:
    """Return the largest score of each head, ``[N]`` float32, of queries ``[B, Q, N, D]`` with keys
    ``[B, P, K, D]`` times ``scale``; minus infinity if no query sees a key."""
    found = torch.full((q.shape[2],), -torch.inf, device=q.device)
    for rows in _tiles(q, piece):
        queries = q[:, rows.queries].float().unflatten(2, (k.shape[2], -1))
        scores = torch.einsum("bqkrd,bpkd->bkrqp", queries, k[:, rows.keys].float())
        if rows.hidden is not None:
            scores.masked_fill_(rows.hidden, -torch.inf)
        torch.maximum(found, scores.amax((0, 3, 4)).flatten(), out=found)
    return found * scale


def _backward_on_gpu(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    *,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients by the library's FlashAttention-2, without dropout, whose state it does not
    read."""
    no_state = q.new_zeros((), dtype=torch.uint64), q.new_zeros((), dtype=torch.uint64)
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = (
        torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, *no_state, scale=scale
        )
    )
    return found


def _runs_triton(q: torch.Tensor, pieces: Pieces, how: Scores, kernels: Kernels) -> bool:
    shape = _shape_of(q, how)
    return _choose(shape, kernels, cut=pieces.are_cut, num_pieces=len(pieces)).path == "triton"


def _is_for_library(q: torch.Tensor, piece: Piece, how: Scores) -> bool:
    return _choose(_shape_of(q, how), "plain", cut=piece.is_cut).path == "library"


_choose = lru_cache(maxsize=256)(choose_pieces)


def _shape_of(q: torch.Tensor, how: Scores) -> AttentionShape:
    dtype, capped = str(q.dtype).removeprefix("torch."), how.softcap is not None
    # pieces of any length are computed alike
    return AttentionShape(q.device.type, dtype, 0, q.shape[3], interpreted=in_interpreter(), capped=capped)


def _by_heads(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values as ``[B, N, S, D]``; neighbouring query heads share a key/value
    head."""
    q, k, v = (one.transpose(1, 2) for one in tensors)
    repeats = q.shape[1] // k.shape[1]
    return (
        (q, k, v) if repeats == 1 else (q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1))
    )


def _of_kv_heads(grad: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Sum gradients ``[B, P, N, D]`` over the query heads that share a key/value head."""
    if grad.shape[2] == num_kv_heads:
        return grad
    return grad.unflatten(2, (num_kv_heads, -1)).sum(3)


class _Rows(NamedTuple):
    """Some queries of a piece and the keys that any of them sees."""

    queries: slice
    keys: slice
    hidden: torch.Tensor | None
    """Which keys a query does not see, ``[Q, P]``; ``None``: every query sees all of them."""


def _tiles(q: torch.Tensor, piece: Piece) -> list[_Rows]:
    """Cut a piece so that the scores of each part take little memory."""
    num_queries, num_keys = piece.sizes
    most = max(1, _SCORE_BYTES // (4 * len(q) * q.shape[2] * min(num_keys, piece.window + num_queries)))
    found = []
    for start in range(0, num_queries, most):
        stop = min(start + most, num_queries)
        first, last = piece.offset + start, piece.offset + stop - 1
        keys = slice(max(0, first - piece.window + 1), min(num_keys, last + 1))
        if keys.start >= keys.stop:
            continue
        hidden = None
        if first < keys.stop - 1 or last - piece.window + 1 > keys.start:
            distance = torch.arange(first, last + 1, device=q.device)[:, None]
            distance = distance - torch.arange(keys.start, keys.stop, device=q.device)
            hidden = (distance < 0) | (distance >= piece.window)
        found.append(_Rows(slice(start, stop), keys, hidden))
    return found


def _scores(q: torch.Tensor, k: torch.Tensor, rows: _Rows, how: Scores) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores of a tile ``[B, K, R, Q, P]`` in float32, and the slope of their bound (1 without
    one)."""
    queries = q[:, rows.queries].float().unflatten(2, (k.shape[2], -1))
    scores = torch.einsum("bqkrd,bpkd->bkrqp", queries, k[:, rows.keys].float()) * how.factor(q.shape[-1])
    slope = scores.new_ones(())
    if how.softcap is not None:
        capped = torch.tanh(scores / how.softcap)
        scores, slope = how.softcap * capped, 1 - capped.square()
    return scores if rows.hidden is None else scores.masked_fill_(rows.hidden, -torch.inf), slope


def _scores_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: Piece, how: Scores) -> Joined:
    found = Joined.nothing(q)
    for rows in _tiles(q, piece):
        scores, _ = _scores(q, k, rows, how)
        lse = scores.logsumexp(-1)
        shares = (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp_()
        out = torch.einsum("bkrqp,bpkd->bqkrd", shares, v[:, rows.keys].float())
        found.out[:, rows.queries] = out.flatten(2, 3)
        found.lse[:, rows.queries] = lse.flatten(1, 2).transpose(1, 2)
    return found


def _scores_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    joined: Joined,
    piece: Piece,
    how: Scores,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scale, num_kv_heads = how.factor(q.shape[-1]), k.shape[2]
    grad_q, grad_k, grad_v = (torch.zeros_like(one, dtype=torch.float32) for one in (q, k, v))
    for rows in _tiles(q, piece):
        scores, slope = _scores(q, k, rows, how)
        lse = joined.lse[:, rows.queries].transpose(1, 2).unflatten(1, (num_kv_heads, -1))
        shares = (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp_()
        of_out = grad[:, rows.queries].float().unflatten(2, (num_kv_heads, -1))
        out = joined.out[:, rows.queries].float().unflatten(2, (num_kv_heads, -1))
        delta = (of_out * out).sum(-1).permute(0, 2, 3, 1).unsqueeze(-1)
        of_shares = torch.einsum("bqkrd,bpkd->bkrqp", of_out, v[:, rows.keys].float())
        of_scores = shares * (of_shares - delta) * slope * scale
        queries = q[:, rows.queries].float().unflatten(2, (num_kv_heads, -1))
        of_queries = torch.einsum("bkrqp,bpkd->bqkrd", of_scores, k[:, rows.keys].float())
        grad_q[:, rows.queries] += of_queries.flatten(2, 3)
        grad_k[:, rows.keys] += torch.einsum("bkrqp,bqkrd->bpkd", of_scores, queries)
        grad_v[:, rows.keys] += torch.einsum("bkrqp,bqkrd->bpkd", shares, of_out)
    return grad_q, grad_k, grad_v
