"""Attention of a sequence that several ranks share: keys and values travel around a ring of ranks (Liu et
al., arXiv 2310.01889).

Every rank keeps its queries. In each of ``size`` steps it attends to the keys and values that it has, while
they travel on to the next rank, and joins the results (`myriad.kernels.attention_pieces`). In the backward
they travel once more, and the sums of their gradients follow them, one step behind, until they are back.

If `myriad.kernels.ring_plan` finds that few positions of other ranks are seen, ranks send each other only
these, all at once, and sums of gradients return the same way:

    forward     send ............................ wait | keys of other ranks
                own keys ........................
    backward    send ............... wait | keys of other ranks | return ......... wait
                half of the own keys                              the other half

Legend: B batch, S sequence positions of a rank, N query heads, K key/value heads, D head size.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from myriad.kernels.attention_choice import Scores
from myriad.kernels.attention_pieces import Joined, piece_backward, piece_forward, piece_maxima
from myriad.kernels.ring_plan import Message, Piece, RingPlan

__all__ = ["Arriving", "Ring", "ring_attention"]


class Arriving(Protocol):
    """A tensor in flight."""

    def wait(self) -> torch.Tensor:
        """Wait for the tensor and return it. Call it once."""
        ...


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

    def start_shift(self, x: torch.Tensor, step: int) -> Arriving:
        """Send ``x`` to the next rank, and receive as much from the one before. ``x`` must not change until
        the other has arrived. ``step``: the one that waits for it."""
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
    ) -> torch.Tensor:
        kept = torch.stack((k, v))
        joined = Joined.nothing(q)
        for step, travelling in _travelling(kept, plan, ring):
            with ring.block(step):
                for piece in plan.steps[step]:
                    keys, values = travelling[:, piece.rows, piece.keys]
                    part = q[piece.rows, piece.queries]
                    if largest is not None:
                        found = piece_maxima(part, keys, piece, how.factor(q.shape[-1]))
                        torch.maximum(largest, found, out=largest)
                    joined.add(piece, piece_forward(part, keys, values, piece, how))
        if sinks is not None:
            joined = _with_sinks(joined, sinks)
        out = joined.out.to(q.dtype)
        ctx.save_for_backward(q, kept, out, joined.lse, sinks)
        ctx.plan, ctx.ring, ctx.how = plan, ring, how
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, kept, out, lse, sinks = ctx.saved_tensors
        grad, grad_q = grads[0].contiguous(), torch.zeros(q.shape, dtype=torch.float32, device=q.device)

        def add(step: int, pieces: Sequence[Piece], travelling: torch.Tensor, sums: torch.Tensor) -> None:
            """Add the gradients of pieces to those of the queries and to ``sums``, those of the keys and
            values."""
            with ctx.ring.block(step):
                for piece in pieces:
                    keys, values = travelling[:, piece.rows, piece.keys]
                    at = (piece.rows, piece.queries)
                    of_queries, of_keys, of_values = piece_backward(
                        grad[at], q[at], keys, values, Joined(out[at], lse[at]), piece, ctx.how
                    )
                    grad_q[at] += of_queries
                    sums[0, piece.rows, piece.keys] += of_keys
                    sums[1, piece.rows, piece.keys] += of_values

        walk = _backward_around if ctx.plan.sent is None else _backward_directly
        grad_k, grad_v = walk(kept, ctx.plan, ctx.ring, add).to(q.dtype)
        grad_sinks = None if sinks is None else _gradient_of_sinks(grad, out, lse, sinks)
        return grad_q.to(q.dtype), grad_k, grad_v, grad_sinks, None, None, None, None


_Add = Callable[[int, Sequence[Piece], torch.Tensor, torch.Tensor], None]
"""Adds the gradients of pieces of a step; the keys and values, and the sums of their gradients."""


def _travelling(kept: torch.Tensor, plan: RingPlan, ring: Ring) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield each step and its keys and values ``[2, B, P, K, D]``, while those of the next are in flight."""
    if plan.sent is not None:
        exchange, arrived = _start_messages(kept, plan, ring)
        yield 0, kept
        exchange.wait()
        yield from arrived.items()
        return
    travelling = kept
    for step in range(ring.size):
        arriving = ring.start_shift(travelling, step + 1) if step + 1 < ring.size else None
        yield step, travelling
        if arriving is not None:
            travelling = arriving.wait()


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
    """Return the float32 sums of the gradients of this rank's keys and values, which travel after them."""
    sums: Arriving | None = None
    own = kept.new_zeros(())
    for step, travelling in _travelling(kept, plan, ring):
        own = torch.zeros(travelling.shape, dtype=torch.float32, device=kept.device)
        add(step, plan.steps[step], travelling, own)
        if sums is not None:
            own += sums.wait()
        sums = ring.start_shift(own, step + 1) if ring.size > 1 else None
    return own if sums is None else sums.wait()


def _backward_directly(kept: torch.Tensor, plan: RingPlan, ring: Ring, add: _Add) -> torch.Tensor:
    """Return the same sums; those of other ranks return to this one at once."""
    exchange, arrived = _start_messages(kept, plan, ring)
    assert plan.sent is not None, "the plan is of whole shares"
    local = plan.steps[0]
    half = len(local) // 2
    own = torch.zeros(kept.shape, dtype=torch.float32, device=kept.device)
    add(0, local[:half], kept, own)
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
    add(0, local[half:], kept, own)
    exchange.wait()
    for step, found in returned.items():
        for part in plan.sent[step].parts:
            own[:, part.rows, part.places] += found[:, part.rows, part.at]
    return own


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
