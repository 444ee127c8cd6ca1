"""Asynchronous tensor-parallel all-gather and reduce-scatter: issued in one place, waited for in another. The
backward issues and waits the other way round.

    forward    [B, S/tp, H] --issue-> (token) ... other work ... (token) --wait----> [B, S, H]
    backward   [B, S/tp, H] <--wait-- (token) ... other work ... (token) <--issue--- [B, S, H]

Between the two halves autograd sees an empty token, so no operator can read or write memory that is not
filled yet. The transpose of an all-gather is a reduce-scatter and vice versa, so one pair of nodes serves
both.

When the backward has issued a gradient's collective, it computes the weight products that were deferred
(MegaScale, arXiv 2402.15627, section 3.2).

On gloo every collective is an exchange of messages between pairs. A reduce-scatter is then an all-to-all with
a local sum in rank order: half the bytes of gloo's own, and the same bits every time. Each peer gets one
message. One message per sequence, sent from and received in place, would save two copies but costs more: each
message is three on the wire, and wakes two threads.

Other backends (NCCL) use their own collectives. Seconds spent in `wait` are recorded as tensor_comm.

Legend: B batch, S sequence, H hidden.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol

import torch
import torch.distributed as dist

from myriad.comm.groups import Group
from myriad.kernels.gradient import LaterProducts
from myriad.kernels.memory_order import is_sequence_first
from myriad.kernels.side_by_side import PartSlots, Slot
from myriad.telemetry.spans import Recorder

__all__ = [
    "AsyncCollective",
    "AsyncStack",
    "AsyncState",
    "Direction",
    "Peers",
    "issue",
    "start_async",
    "sum_in_rank_order",
]

# torch 2.13 renamed these functions; 2.11 has the old names only
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Peers(Protocol):
    """The ranks of the group; `myriad.parallel.tensor_parallel.GroupBoundary` is one implementation."""

    group: Group | None
    rank: int
    size: int
    recorder: Recorder


class AsyncCollective:
    """A collective in flight. It keeps the memory that the transport reads alive."""

    span = "tensor_comm"
    """Name of the span of `wait`."""
    step = -1
    """Step of a ring that waits for it; -1: it has no steps."""

    def __init__(self, peers: Peers, kept: torch.Tensor) -> None:
        self._peers, self._kept = peers, kept
        self._works: list[dist.Work] = []

    def wait(self) -> torch.Tensor:
        """Wait for the collective and return its result. Call it once."""
        with self._peers.recorder.span(self.span, chunk=self.step):
            for work in self._works:
                work.wait()
        return self._arrived()

    def _arrived(self) -> torch.Tensor:
        raise NotImplementedError


class AsyncStack(AsyncCollective):
    """All-gather of ``[...]`` of every rank to ``[tp, ...]``."""

    def __init__(self, x: torch.Tensor, peers: Peers, slot: Slot | None = None) -> None:
        """``slot``: the memory of the result; ``None``: new memory."""
        super().__init__(peers, x.contiguous())
        shape = peers.size, *x.shape
        self._stack = x.new_empty(shape) if slot is None else slot.take(x, *shape)
        if x.is_meta:
            return
        if _is_pairwise(peers):
            self._works = _exchange([self._kept] * peers.size, self._stack.unbind(), peers)
            self._stack[peers.rank].copy_(self._kept)
        else:
            flat, part = self._stack.view(-1), self._kept.view(-1)
            self._works = [_all_gather(flat, part, group=peers.group, async_op=True)]

    def _arrived(self) -> torch.Tensor:
        return self._stack


class AsyncAllGather(AsyncStack):
    """All-gather of ``[B, S/tp, H]`` of every rank to ``[B, S, H]``, in the memory order of ``x``."""

    def __init__(self, x: torch.Tensor, peers: Peers, slot: Slot | None = None) -> None:
        self._is_first = is_sequence_first(x)
        super().__init__(x.transpose(0, 1) if self._is_first else x, peers, slot)

    def _arrived(self) -> torch.Tensor:
        if self._is_first:
            return self._stack.flatten(0, 1).transpose(0, 1)
        return self._stack.transpose(0, 1).flatten(1, 2)


class AsyncReduceScatter(AsyncCollective):
    """Reduce-scatter of ``[B, S, H]`` of every rank to this rank's part ``[B, S/tp, H]`` of the sum, in the
    memory order of ``x``."""

    def __init__(self, x: torch.Tensor, peers: Peers) -> None:
        self._is_first = is_sequence_first(x)
        if self._is_first:
            shares = x.transpose(0, 1).unflatten(0, (peers.size, -1))
        else:
            shares = x.unflatten(1, (peers.size, -1)).transpose(0, 1)
        super().__init__(peers, shares.contiguous())  # a copy only where they are not contiguous yet
        own = self._kept[peers.rank]
        self._parts = [own]
        if x.is_meta:
            return
        if _is_pairwise(peers):
            self._parts = [own if rank == peers.rank else torch.empty_like(own) for rank in range(peers.size)]
            self._works = _exchange(self._kept.unbind(), self._parts, peers)
        else:
            self._parts = [torch.empty_like(own)]
            flat = self._kept.view(-1)
            self._works = [_reduce_scatter(self._parts[0].view(-1), flat, group=peers.group, async_op=True)]

    def _arrived(self) -> torch.Tensor:
        part = self._parts[0] if len(self._parts) == 1 else sum_in_rank_order(self._parts)
        return part.transpose(0, 1) if self._is_first else part


def sum_in_rank_order(parts: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the sum of every rank's part, added in float32 in the order of ``parts``. The result is written
    to ``out`` if that is given."""
    first, *others = parts
    if first.dtype == torch.float32 and len(others) == 1:
        return torch.add(first, others[0], out=out)
    total = first.to(torch.float32, copy=True)
    for part in others:
        total += part
    return total.to(first.dtype) if out is None else out.copy_(total)


def _is_pairwise(peers: Peers) -> bool:
    return dist.get_backend(peers.group) == "gloo"


def _exchange(
    outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], peers: Peers
) -> list[dist.Work]:
    """Send ``outgoing[r]`` to every other rank r, and receive the message of rank r into ``incoming[r]``.

    Receives are posted first. If a gloo connection's request to send back waits behind its own data, it
    carries data one way at a time (measured: gloo's all-to-all takes up to twice as long).
    """
    others = [(peers.rank + step) % peers.size for step in range(1, peers.size)]
    works = [dist.irecv(incoming[rank], group=peers.group, group_src=rank) for rank in reversed(others)]
    works += [dist.isend(outgoing[rank], group=peers.group, group_dst=rank) for rank in others]
    return [work for work in works if work is not None]


class Direction(Enum):
    """The collective of the forward; the backward runs the transposed one."""

    GATHER = 0
    REDUCE = 1


class _Boundary(Peers, Protocol):
    """The peers, the deferred weight products, and the memory for gathered tensors."""

    later: LaterProducts | None
    place: PartSlots | None


class AsyncState:
    """The state that the two autograd nodes of a differentiable collective share."""

    def __init__(self, later: LaterProducts | None) -> None:
        """``later``: weight products that the backward computes when it has issued its collective."""
        self._later = later
        self._collective: AsyncCollective | None = None

    def post(self, x: torch.Tensor, *, forward: bool) -> None:
        """Issue the collective of the forward, or that of the backward."""
        self._collective = self._start(x, forward=forward)

    def _start(self, x: torch.Tensor, *, forward: bool) -> AsyncCollective:
        raise NotImplementedError

    def arrive(self) -> torch.Tensor:
        """Wait for the collective and return its result."""
        assert self._collective is not None, "waited for twice, or never posted"
        collective, self._collective = self._collective, None
        return collective.wait()

    def use_the_wait(self) -> None:
        """Compute the weight products that were deferred."""
        if self._later is not None:
            self._later.apply_complete()


class _TensorParallelState(AsyncState):
    """The state of a gather or a reduce-scatter."""

    def __init__(self, peers: _Boundary, direction: Direction) -> None:
        super().__init__(peers.later)
        self._peers, self._forward = peers, direction
        self._slot = None if peers.place is None else peers.place.slot()  # of the gather, either way

    def _start(self, x: torch.Tensor, *, forward: bool) -> AsyncCollective:
        gathers = (self._forward is Direction.GATHER) == forward
        if gathers:
            return AsyncAllGather(x, self._peers, self._slot)
        return AsyncReduceScatter(x, self._peers)


class _Issue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, state: AsyncState) -> torch.Tensor:
        ctx.state = state
        state.post(x, forward=True)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.state.arrive(), None


class _Complete(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, state: AsyncState) -> torch.Tensor:
        ctx.state = state
        return state.arrive()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.state.post(gradients[0], forward=False)
        ctx.state.use_the_wait()
        return gradients[0].new_empty(0), None


class _PendingTensor:
    """A tensor in flight; an implementation of `myriad.model.boundary.Arriving`."""

    def __init__(self, token: torch.Tensor, state: AsyncState) -> None:
        self._token, self._state = token, state

    def wait(self) -> torch.Tensor:
        y: torch.Tensor = _Complete.apply(self._token, self._state)
        return y


def issue(x: torch.Tensor, state: AsyncState) -> _PendingTensor:
    """Issue the collective of ``x`` that ``state`` describes. The result that arrives is differentiable."""
    return _PendingTensor(_Issue.apply(x, state), state)


def start_async(x: torch.Tensor, peers: _Boundary, direction: Direction) -> _PendingTensor:
    """Issue a gather or a reduce-scatter of ``x``. The result that arrives is differentiable."""
    return issue(x, _TensorParallelState(peers, direction))
