"""Attention of a sequence that several ranks share: keys and values travel around a ring of ranks (Liu et
al., arXiv 2310.01889).

Every rank keeps its queries. In each of ``size`` steps it attends to the keys and values that it has, while
others travel, and joins the results (`myriad.kernels.attention_pieces`). A share travels in two halves, each
of which goes on to the next rank as soon as it is there, and is attended to while the other one arrives. In
the backward they travel once more, and the sums of their gradients follow them from the first rank that has
any to their owner, which adds its own. A rank attends to some of its own keys first, while the first halves
arrive, and to the rest last, while the last sums return:

    forward     own keys ......... | first half | second half | ...
    backward    some own keys | first half | second half, send sums | ... | rest of the own keys, wait

Halves that no further rank sees stay where they are (`myriad.kernels.ring_plan`).

If `myriad.kernels.ring_plan` finds that few positions of other ranks are seen, ranks send each other only
these, all at once, and sums of gradients return the same way:

    forward     send ............................ wait | keys of other ranks
                own keys ........................
    backward    send ............... wait | keys of other ranks | return ......... wait
                half of the own keys                              the other half

In memory, shares are ``[S, 2, B, K, D]``, so that each half is one message.

Legend: B batch, S sequence positions of a rank, N query heads, K key/value heads, D head size.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch

from myriad.kernels.attention_choice import Scores
from myriad.kernels.attention_pieces import Joined, PieceGradients, join_pieces, piece_maxima
from myriad.kernels.config import Kernels
from myriad.kernels.ring_plan import Message, Pieces, RingPlan

__all__ = ["Ring", "ring_attention"]


class _Pending(Protocol):
    """Messages that were posted together and have not all arrived."""

    def wait(self) -> object:
        """Wait for all of them. Call it once."""
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

    def start_shift(self, leaving: torch.Tensor, arriving: torch.Tensor, step: int) -> _Pending:
        """Send ``leaving`` to the next rank, and receive into ``arriving`` from the one before. Both are
        contiguous, and empty where nothing is sent. ``leaving`` must not change until the other has arrived.
        ``step``: the one that waits for it. A collective call of all ranks."""
        ...

    def start_exchange(
        self, leaving: Mapping[int, torch.Tensor], arriving: Mapping[int, torch.Tensor]
    ) -> _Pending:
        """Send each tensor of ``leaving`` to its rank, and receive into each of ``arriving`` what its rank
        sends. A collective call of all ranks."""
        ...

    def block(self, step: int) -> AbstractContextManager[None]:
        """Return the span of the pieces of a step for a ``with`` block."""
        ...


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
        kernels: Kernels,
    ) -> torch.Tensor:
        kept = torch.stack((k.transpose(0, 1), v.transpose(0, 1)), 1).permute(1, 2, 0, 3, 4)
        joined = Joined.nothing(q)
        for turn in _travelling(kept, plan, ring):
            with ring.block(turn.step) if turn.pieces else nullcontext():
                keys, values = turn.share
                if largest is not None:
                    _raise_to_maxima(largest, q, keys, turn.pieces, how.factor(q.shape[-1]))
                join_pieces(joined, q, keys, values, turn.pieces, how, kernels)
        if sinks is not None:
            joined = _with_sinks(joined, sinks)
        out = joined.out.to(q.dtype)
        ctx.save_for_backward(q, kept, out, joined.lse, sinks)
        ctx.plan, ctx.ring, ctx.how, ctx.kernels = plan, ring, how, kernels
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, kept, out, lse, sinks = ctx.saved_tensors
        grad = grads[0].contiguous()
        gradients = PieceGradients(grad, q, Joined(out, lse), ctx.how, ctx.kernels)

        def add(step: int, pieces: Pieces, travelling: torch.Tensor, sums: torch.Tensor) -> None:
            """Add the gradients of pieces to those of the queries and to ``sums``, those of the keys and
            values."""
            with ctx.ring.block(step) if pieces else nullcontext():
                gradients.add(pieces, *travelling, *sums)

        walk = _backward_around if ctx.plan.sent is None else _backward_directly
        grad_k, grad_v = walk(kept, ctx.plan, ctx.ring, add).to(q.dtype)
        grad_sinks = None if sinks is None else _gradient_of_sinks(grad, out, lse, sinks)
        of_queries = gradients.of_queries.to(q.dtype)
        return of_queries, grad_k, grad_v, grad_sinks, None, None, None, None, None


_Add = Callable[[int, Pieces, torch.Tensor, torch.Tensor], None]
"""Adds the gradients of pieces of a step; the keys and values, and the sums of their gradients."""


class _Turn(NamedTuple):
    """Pieces that a rank computes next."""

    step: int
    pieces: Pieces
    share: torch.Tensor
    """Keys and values ``[2, B, P, K, D]``, of which those of the pieces have arrived."""
    complete: int | None = None
    """The half of which these are the last pieces."""


def _travelling(kept: torch.Tensor, plan: RingPlan, ring: Ring) -> Iterator[_Turn]:
    """Yield the turns of each step, while keys and values of others are in flight."""
    if plan.sent is not None:
        exchange, arrived = _start_messages(kept, plan, ring)
        yield _Turn(0, plan.steps[0], kept)
        exchange.wait()
        yield from (_Turn(step, plan.steps[step], share) for step, share in arrived.items())
        return
    # a half arrives where the one of two steps before was, which has left
    rooms = [torch.empty_like(kept) for _ in range(min(ring.size - 1, 2))] or [kept]
    coming = [_start_keys(half, 0, kept, rooms[0], plan, ring) for half in range(2)]
    yield _Turn(0, plan.steps[0], kept)
    for step in range(1, ring.size):
        share, following = rooms[(step - 1) % len(rooms)], rooms[step % len(rooms)]
        early, across, late = plan.steps[step].by_keys(share.shape[2] // 2)
        coming.pop(0).wait()
        coming.append(_start_keys(0, step, share, following, plan, ring))
        yield _Turn(step, early, share)
        coming.pop(0).wait()
        coming.append(_start_keys(1, step, share, following, plan, ring))
        yield _Turn(step, across, share, complete=0)
        yield _Turn(step, late, share, complete=1)


def _half(share: torch.Tensor, number: int) -> torch.Tensor:
    """Return a half of a share ``[2, B, P, ...]`` as the contiguous ``[P / 2, 2, B, ...]``."""
    cut = share.shape[2] // 2
    return (share[:, :, cut:] if number else share[:, :, :cut]).permute(2, 0, 1, 3, 4)


def _start_keys(
    half: int, step: int, share: torch.Tensor, following: torch.Tensor, plan: RingPlan, ring: Ring
) -> _Pending:
    """Send a half of a step's keys and values to the next rank, and receive that of the next step."""
    hops = plan.leaving[step].keys[half], plan.arriving[step].keys[half]
    return _start_half(half, hops, (share, following), ring, step + 1)


def _start_half(
    half: int, hops: tuple[bool, bool], shares: tuple[torch.Tensor, torch.Tensor], ring: Ring, step: int
) -> _Pending:
    """Send a half of one share, and receive that of another. ``hops``: whether each of them travels."""
    leaving, arriving = (
        _half(share, half)[: None if travels else 0] for share, travels in zip(shares, hops, strict=True)
    )
    return ring.start_shift(leaving, arriving, step)


def _start_messages(
    kept: torch.Tensor, plan: RingPlan, ring: Ring
) -> tuple[_Pending, dict[int, torch.Tensor]]:
    """Send what other ranks see of ``kept``. Returns what arrives, by step, after a wait."""
    assert plan.sent is not None, "the plan is of whole shares"
    leaving = {
        (ring.rank + step) % ring.size: _packed(kept, message)
        for step, message in enumerate(plan.sent)
        if message.length
    }
    arrived = {step: _room(kept, length, kept.dtype) for step, length in enumerate(plan.received) if length}
    arriving = {(ring.rank - step) % ring.size: room for step, room in arrived.items()}
    return ring.start_exchange(leaving, arriving), arrived


def _packed(kept: torch.Tensor, message: Message) -> torch.Tensor:
    packed = kept.new_zeros((*kept.shape[:2], message.length, *kept.shape[3:]))
    for part in message.parts:
        packed[:, part.rows, part.at] = kept[:, part.rows, part.places]
    return packed


def _room(like: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Return memory for a message of so many positions."""
    return torch.empty((*like.shape[:2], length, *like.shape[3:]), dtype=dtype, device=like.device)


def _backward_around(kept: torch.Tensor, plan: RingPlan, ring: Ring, add: _Add) -> torch.Tensor:
    """Return the float32 sums of the gradients of this rank's keys and values. Those of a share begin at the
    first rank after its owner."""
    own = torch.zeros_like(kept, dtype=torch.float32)
    first, last = plan.steps[0].halves
    coming: list[_Pending] = []
    arrived, sums = torch.empty_like(own), torch.empty_like(own)
    following = torch.empty_like(own) if ring.size > 2 else own
    for step, pieces, share, complete in _travelling(kept, plan, ring):
        if step == 0:
            add(0, first, kept, own)
            continue
        if complete is None:  # sums arrive where those were that have left
            sums, arrived, following = arrived.zero_(), following, sums
        add(step, pieces, share, sums)
        if complete is not None:
            if step > 1:
                coming.pop(0).wait()
                if plan.arriving[step - 1].sums[complete]:
                    _half(sums, complete).add_(_half(arrived, complete))
            hops = plan.leaving[step].sums[complete], plan.arriving[step].sums[complete]
            coming.append(_start_half(complete, hops, (sums, following), ring, step + 1))
    add(0, last, kept, own)
    for half, pending in enumerate(coming):
        pending.wait()
        if plan.arriving[-1].sums[half]:
            _half(own, half).add_(_half(following, half))
    return own


def _backward_directly(kept: torch.Tensor, plan: RingPlan, ring: Ring, add: _Add) -> torch.Tensor:
    """Return the same sums; those of other ranks return to this one at once."""
    exchange, arrived = _start_messages(kept, plan, ring)
    assert plan.sent is not None, "the plan is of whole shares"
    first, last = plan.steps[0].halves
    own = torch.zeros(kept.shape, dtype=torch.float32, device=kept.device)
    add(0, first, kept, own)
    exchange.wait()
    sums = {step: torch.zeros_like(keys, dtype=torch.float32) for step, keys in arrived.items()}
    for step, keys in arrived.items():
        add(step, plan.steps[step], keys, sums[step])
    returned = {
        step: _room(kept, message.length, torch.float32)
        for step, message in enumerate(plan.sent)
        if message.length
    }
    exchange = ring.start_exchange(
        {(ring.rank - step) % ring.size: one for step, one in sums.items()},
        {(ring.rank + step) % ring.size: one for step, one in returned.items()},
    )
    add(0, last, kept, own)
    exchange.wait()
    for step, found in returned.items():
        for part in plan.sent[step].parts:
            own[:, part.rows, part.places] += found[:, part.rows, part.at]
    return own


def _raise_to_maxima(
    largest: torch.Tensor, q: torch.Tensor, k: torch.Tensor, pieces: Pieces, scale: float
) -> None:
    for piece in pieces:
        found = piece_maxima(q[piece.rows, piece.queries], k[piece.rows, piece.keys], piece, scale)
        torch.maximum(largest, found, out=largest)


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
    kernels: Kernels = "auto",
) -> torch.Tensor:
    """Attend from this rank's queries ``[B, S, N, D]`` to the keys and values of all ranks, of which it has
    its own ``[B, S, K, D]``. Returns ``[B, S, N, D]``. ``sinks``: score of each head's sink, ``[N]``.
    ``largest``: raised to the largest score of each head, ``[N]``, of this rank's queries. All ranks of the
    ring call it together, and its backward too."""
    # kept for the backward: a view would also keep the keys and values that it was split from
    mixed: torch.Tensor = _RingAttention.apply(q.contiguous(), k, v, sinks, plan, ring, how, largest, kernels)
    return mixed
