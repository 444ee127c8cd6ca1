"""One tensor crossing a tensor-parallel boundary: posted in one place, waited for in another, and in the
backward the other way round.

    forward    [B, S/tp, H] --post--> (token) ... other work ... (token) --arrive--> [B, S, H]
    backward   [B, S/tp, H] <--wait-- (token) ... other work ... (token) <--post---- [B, S, H]

Between the two halves autograd sees an empty token, so nothing can read, or add to, memory that is not filled
yet. A gather's transposed is a reduce-scatter and the other way round, so one pair of nodes serves both. On
gloo both are exchanges between pairs, the reduce-scatter with a local sum in rank order: half the bytes of
gloo's own, and the same bits every time.

Weight products that the backward left for later are computed when a gradient has been posted (MegaScale,
arXiv 2402.15627, section 3.2).

Legend: B batch, S sequence, H hidden.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol

import torch
import torch.distributed as dist

from myriad.comm.groups import Group
from myriad.kernels.gradient import DeferredProduct, apply_deferred
from myriad.telemetry.spans import Recorder

__all__ = ["Direction", "Peers", "cross", "stack"]


class Direction(Enum):
    """What the forward does; the backward does the other."""

    GATHER = 0
    REDUCE = 1


class Peers(Protocol):
    """The ranks on the other side; `myriad.parallel.tensor.GroupBoundary` is one."""

    group: Group | None
    rank: int
    size: int
    recorder: Recorder
    later: list[DeferredProduct] | None


# torch 2.13 renamed them; 2.11 has the old names only
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class _Travelling:
    """Work posted to the transport, with what it reads kept alive."""

    def __init__(self, peers: Peers, kept: torch.Tensor) -> None:
        self._recorder, self._kept = peers.recorder, kept
        self._works: list[dist.Work] = []

    def _wait(self) -> None:
        with self._recorder.span("tensor_comm"):
            for work in self._works:
                work.wait()

    def wait(self) -> torch.Tensor:
        """What came."""
        raise NotImplementedError


class _Stacking(_Travelling):
    """``[...]`` of every rank to ``[tp, ...]``."""

    def __init__(self, x: torch.Tensor, peers: Peers) -> None:
        super().__init__(peers, x.contiguous())
        self._shares = x.new_empty(peers.size, *x.shape)
        if x.is_meta:
            return
        if _is_pairwise(peers):
            self._works = _exchange([self._kept] * peers.size, self._shares.unbind(), peers)
            self._shares[peers.rank].copy_(self._kept)
        else:
            self._works = [
                _all_gather(self._shares.view(-1), self._kept.view(-1), group=peers.group, async_op=True)
            ]

    def wait(self) -> torch.Tensor:
        self._wait()
        return self._shares


class _Gathering(_Stacking):
    """``[B, S/tp, H]`` of every rank to ``[B, S, H]``."""

    def wait(self) -> torch.Tensor:
        return super().wait().transpose(0, 1).flatten(1, 2)


class _Reducing(_Travelling):
    """``[B, S, H]`` of every rank to this rank's part ``[B, S/tp, H]`` of their sum."""

    def __init__(self, x: torch.Tensor, peers: Peers) -> None:
        super().__init__(peers, x.unflatten(1, (peers.size, -1)).transpose(0, 1).contiguous())
        own = self._kept[peers.rank]
        if x.is_meta:
            self._parts = [own]
        elif _is_pairwise(peers):
            self._parts = [own if rank == peers.rank else torch.empty_like(own) for rank in range(peers.size)]
            self._works = _exchange(self._kept.unbind(), self._parts, peers)
        else:
            self._parts = [torch.empty_like(own)]
            parts = self._kept.flatten(0, 1)
            self._works = [_reduce_scatter(self._parts[0], parts, group=peers.group, async_op=True)]

    def wait(self) -> torch.Tensor:
        self._wait()
        first, *others = self._parts
        if not others:
            return first
        if first.dtype == torch.float32 and len(others) == 1:
            return first + others[0]
        total = first.to(torch.float32, copy=True)
        for part in others:
            total += part
        return total.to(first.dtype)


def _is_pairwise(peers: Peers) -> bool:
    return dist.get_backend(peers.group) == "gloo"


def _exchange(
    outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], peers: Peers
) -> list[dist.Work]:
    """``outgoing[r]`` to every other rank r, what it sends to this one into ``incoming[r]``.

    Receives are posted first: a gloo connection whose request to send back waits behind its own data moves
    one way at a time (measured: its all-to-all takes up to twice as long).
    """
    others = [(peers.rank + step) % peers.size for step in range(1, peers.size)]
    works = [dist.irecv(incoming[rank], group=peers.group, group_src=rank) for rank in reversed(others)]
    works += [dist.isend(outgoing[rank], group=peers.group, group_dst=rank) for rank in others]
    return [work for work in works if work is not None]


class _Crossing:
    """What the two halves share."""

    def __init__(self, peers: Peers, direction: Direction) -> None:
        self._peers, self._forward = peers, direction
        self._travelling: _Travelling | None = None

    def post(self, x: torch.Tensor, *, forward: bool) -> None:
        gathers = (self._forward is Direction.GATHER) == forward
        self._travelling = _Gathering(x, self._peers) if gathers else _Reducing(x, self._peers)

    def arrive(self) -> torch.Tensor:
        assert self._travelling is not None, "waited for twice, or never posted"
        travelling, self._travelling = self._travelling, None
        return travelling.wait()

    def use_the_wait(self) -> None:
        if self._peers.later is not None:
            apply_deferred(self._peers.later)


class _Post(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, crossing: _Crossing) -> torch.Tensor:
        ctx.crossing = crossing
        crossing.post(x, forward=True)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.crossing.arrive(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, crossing: _Crossing) -> torch.Tensor:
        ctx.crossing = crossing
        return crossing.arrive()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.crossing.post(gradients[0], forward=False)
        ctx.crossing.use_the_wait()
        return gradients[0].new_empty(0), None


class _Posted:
    """A tensor on its way; `myriad.model.boundary.Arriving`."""

    def __init__(self, token: torch.Tensor, crossing: _Crossing) -> None:
        self._token, self._crossing = token, crossing

    def wait(self) -> torch.Tensor:
        y: torch.Tensor = _Arrive.apply(self._token, self._crossing)
        return y


def cross(x: torch.Tensor, peers: Peers, direction: Direction) -> _Posted:
    """Posts ``x``; what arrives is differentiable."""
    crossing = _Crossing(peers, direction)
    return _Posted(_Post.apply(x, crossing), crossing)


def stack(x: torch.Tensor, peers: Peers) -> _Stacking:
    """Posts ``x``; what arrives is every rank's, ``[tp, ...]``, and not differentiable."""
    return _Stacking(x, peers)
