"""Attention of a sequence that several ranks share: keys and values travel around a ring of ranks (Liu et
al., arXiv 2310.01889).

Every rank keeps its queries. In each of ``size`` steps it attends to the keys and values that it has, while
they travel on to the next rank, and joins the results (`myriad.kernels.attention_pieces`). In the backward
they travel once more, and the sums of their gradients follow them, one step behind, until they are back.

A sequence of 2 r chunks is shared so that causal attention is equal work for all r ranks (zigzag, Zhu,
"ring-flash-attention", 2024): rank i has the chunks i and 2 r - 1 - i. In every step but the first, half of
the pairs of chunks are seen, all of them whole:

    r = 2      chunks of rank 0: 0 3      of rank 1: 1 2
    step 0     rank 0: 0x0 3x0 3x3        rank 1: 1x1 2x1 2x2
    step 1     rank 0: 3x1 3x2            rank 1: 1x0 2x0

A step computes only the `Piece` s that windows and documents leave. With packed documents each document is
cut into 2 r chunks of its own, so that ranks have equal work whatever the documents' lengths are.

Legend: B batch, S sequence positions of a rank, N query heads, K key/value heads, D head size.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch

from myriad.kernels.attention_choice import Scores
from myriad.kernels.attention_pieces import (
    Joined,
    Piece,
    piece_backward,
    piece_forward,
    piece_maxima,
)
from myriad.kernels.documents import Documents

__all__ = ["Arriving", "Ring", "RingPlan", "document_parts", "ring_attention", "ring_plan", "ring_ranges"]

_Range = tuple[int, int]
"""First position and the one after the last."""


class Arriving(Protocol):
    """A tensor in flight."""

    def wait(self) -> torch.Tensor:
        """Wait for the tensor and return it. Call it once."""
        ...


class Ring(Protocol):
    """The ranks between which keys and values travel."""

    @property
    def rank(self) -> int:
        """Index of this rank in the ring."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def start_shift(self, x: torch.Tensor) -> Arriving:
        """Send ``x`` to the next rank, and receive as much from the one before. ``x`` must not change until
        the other has arrived."""
        ...


def ring_ranges(sequence: int, index: int, size: int) -> tuple[_Range, ...]:
    """Return the positions of rank ``index`` of a ring of ``size``, in order. Raises no error: the sequence
    must be divisible into two chunks for each rank."""
    if size == 1:
        return ((0, sequence),)
    chunk = sequence // (2 * size)
    last = 2 * size - 1 - index
    return (index * chunk, (index + 1) * chunk), (last * chunk, (last + 1) * chunk)


_Parts = tuple[tuple[int, _Range], ...]
"""Ranges of positions, each with its first place among all positions of a rank."""


@lru_cache(maxsize=256)
def document_parts(lengths: tuple[int, ...], size: int) -> tuple[tuple[_Parts, ...], ...]:
    """Return the parts of each document of a window that each rank of a ring has, as ``[rank][document]``.
    ``lengths``: those of the documents. Ranks have equally many positions if ``size`` divides their sum."""
    totals, start = [0] * size, 0
    found: list[list[_Parts]] = [[] for _ in range(size)]
    for length in lengths:
        chunks = _chunks(length, totals)
        borders = list(accumulate(chunks, initial=start))
        for rank in range(size):
            ends = (borders[rank : rank + 2], borders[2 * size - 1 - rank : 2 * size + 1 - rank])
            own = [(first, stop) for first, stop in ends if first < stop]
            if len(own) == 2 and own[0][1] == own[1][0]:
                own = [(own[0][0], own[1][1])]
            places = accumulate((stop - first for first, stop in own), initial=totals[rank])
            found[rank].append(tuple(zip(places, own, strict=False)))
            totals[rank] += sum(stop - first for first, stop in own)
        start += length
    return tuple(map(tuple, found))


def _chunks(length: int, totals: Sequence[int]) -> list[int]:
    """Return the sizes of a document's chunks, two for each rank. What is left over goes to the ranks with
    the fewest positions so far (``totals``)."""
    size = len(totals)
    base, more = divmod(length, 2 * size)
    chunks, given = [base] * (2 * size), [0] * size
    for _ in range(more):
        rank = min(range(size), key=lambda one: (totals[one] + given[one], given[one], one))
        chunks[rank if given[rank] == 0 else 2 * size - 1 - rank] += 1
        given[rank] += 1
    return chunks


class RingPlan(NamedTuple):
    """The pieces of each step of one rank. In step s it has the keys of the rank s places before it."""

    steps: tuple[tuple[Piece, ...], ...]

    def num_pairs(self, batch: int) -> int:
        """Return the pairs of a query and a key that this rank computes for ``batch`` sequences."""
        return sum(
            piece.num_pairs * len(range(*piece.rows.indices(batch))) for step in self.steps for piece in step
        )


def ring_plan(
    sequence: int, window: int | None, rank: int, size: int, documents: Documents | None = None
) -> RingPlan:
    """Return the pieces of rank ``rank`` of a ring for sequences of ``sequence`` positions. With
    ``documents``, positions attend inside their document only."""
    how = (sequence, window or sequence, rank, size)
    if documents is None:
        return _plan(*how)
    plans = _PLANS.setdefault(documents, {})
    if how not in plans:
        plans[how] = _plan_of_documents(*how[1:], documents.lengths)
    return plans[how]


_PLANS: "WeakKeyDictionary[Documents, dict[tuple[int, int, int, int], RingPlan]]" = WeakKeyDictionary()
"""The plans of the micro-batches in flight: all layers with the same window have the same one."""


@lru_cache(maxsize=64)
def _plan(sequence: int, window: int, rank: int, size: int) -> RingPlan:
    own, *others = (_placed(ring_ranges(sequence, (rank - step) % size, size)) for step in range(size))
    return RingPlan(tuple(tuple(_pieces(slice(None), own, keys, window)) for keys in (own, *others)))


def _plan_of_documents(window: int, rank: int, size: int, lengths: Sequence[Sequence[int]]) -> RingPlan:
    steps = []
    for step in range(size):
        pieces: list[Piece] = []
        for row, own in enumerate(lengths):
            parts = document_parts(tuple(own), size)
            for queries, keys in zip(parts[rank], parts[(rank - step) % size], strict=True):
                pieces += _pieces(slice(row, row + 1), queries, keys, window)
        steps.append(tuple(pieces))
    return RingPlan(tuple(steps))


def _placed(ranges: Sequence[_Range]) -> _Parts:
    """Return the ranges, each with its first place among all of their positions."""
    places = accumulate((stop - start for start, stop in ranges), initial=0)
    return tuple(zip(places, ranges, strict=False))


def _pieces(rows: slice, queries: _Parts, keys: _Parts, window: int) -> list[Piece]:
    """Return a piece for each pair of ranges of which a query sees a key."""
    found = []
    for query_place, (first, stop) in queries:
        for key_place, (key_first, key_stop) in keys:
            piece = Piece(
                rows,
                slice(query_place, query_place + stop - first),
                slice(key_place, key_place + key_stop - key_first),
                first - key_first,
                window,
            )
            if stop > key_first and first - key_stop < window - 1:
                found.append(piece)
    return found


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        plan: RingPlan,
        ring: Ring,
        how: Scores,
        largest: torch.Tensor | None,
    ) -> torch.Tensor:
        kept = torch.stack((k, v))
        travelling, joined = kept, Joined.nothing(q)
        for step, pieces in enumerate(plan.steps):
            arriving = ring.start_shift(travelling) if step + 1 < ring.size else None
            for piece in pieces:
                keys, values = travelling[:, piece.rows, piece.keys]
                part = q[piece.rows, piece.queries]
                if largest is not None:
                    found = piece_maxima(part, keys, piece, how.factor(q.shape[-1]))
                    torch.maximum(largest, found, out=largest)
                joined.add(piece, piece_forward(part, keys, values, piece, how))
            travelling = travelling if arriving is None else arriving.wait()
        if sinks is not None:
            joined = _with_sinks(joined, sinks)
        out = joined.out.to(q.dtype)
        ctx.save_for_backward(q, kept, out, joined.lse, sinks)
        ctx.plan, ctx.ring, ctx.how = plan, ring, how
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, travelling, out, lse, sinks = ctx.saved_tensors
        ring: Ring = ctx.ring
        grad, grad_q = grads[0].contiguous(), torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        sums: Arriving | None = None
        for step, pieces in enumerate(ctx.plan.steps):
            arriving = ring.start_shift(travelling) if step + 1 < ring.size else None
            own = torch.zeros(travelling.shape, dtype=torch.float32, device=q.device)
            for piece in pieces:
                keys, values = travelling[:, piece.rows, piece.keys]
                at = (piece.rows, piece.queries)
                of_queries, of_keys, of_values = piece_backward(
                    grad[at], q[at], keys, values, Joined(out[at], lse[at]), piece, ctx.how
                )
                grad_q[at] += of_queries
                own[0, piece.rows, piece.keys] += of_keys
                own[1, piece.rows, piece.keys] += of_values
            if sums is not None:
                own += sums.wait()
            sums = ring.start_shift(own) if ring.size > 1 else None
            travelling = travelling if arriving is None else arriving.wait()
        grad_k, grad_v = (own if sums is None else sums.wait()).to(q.dtype)
        grad_sinks = None if sinks is None else _gradient_of_sinks(grad, out, lse, sinks)
        return grad_q.to(q.dtype), grad_k, grad_v, grad_sinks, None, None, None, None


def _with_sinks(joined: Joined, sinks: torch.Tensor) -> Joined:
    """Let the sink of each head ``[N]`` take its share of the softmax."""
    lse = torch.logaddexp(joined.lse, sinks.float())
    return Joined(joined.out * (joined.lse - lse).exp().unsqueeze(-1), lse)


def _gradient_of_sinks(
    grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    delta = (grad.float() * out.float()).sum(-1)
    return -((sinks.float() - lse).exp() * delta).sum((0, 1)).to(sinks.dtype)


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: RingPlan,
    ring: Ring,
    how: Scores = Scores(),
    sinks: torch.Tensor | None = None,
    largest: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from this rank's queries ``[B, S, N, D]`` to the keys and values of all ranks, of which it has
    its own ``[B, S, K, D]``. Returns ``[B, S, N, D]``. ``sinks``: score of each head's sink, ``[N]``.
    ``largest``: raised to the largest score of each head, ``[N]``, of this rank's queries. All ranks of the
    ring call it together, and its backward too."""
    # kept for the backward: a view would also keep the keys and values that it was split from
    mixed: torch.Tensor = _RingAttention.apply(q.contiguous(), k, v, sinks, plan, ring, how, largest)
    return mixed
