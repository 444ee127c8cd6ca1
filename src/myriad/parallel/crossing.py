"""One tensor crossing a tensor-parallel boundary: posted in one place, waited for in another, and in the
backward the other way round.

    forward    [B, S/tp, H] --post--> (token) ... other work ... (token) --arrive--> [B, S, H]
    backward   [B, S/tp, H] <--wait-- (token) ... other work ... (token) <--post---- [B, S, H]

Between the two halves autograd sees an empty token, so nothing can read, or add to, memory that is not filled
yet. A gather's transposed is a reduce-scatter and the other way round, so one pair of nodes serves both. The
reduce-scatter is an all-to-all and a local sum in rank order: half the bytes of gloo's own, and the same bits
every time.

Weight products that the backward left for later are computed when a gradient has been posted (MegaScale,
arXiv 2402.15627, section 3.2).

Legend: B batch, S sequence, H hidden.
"""

from enum import Enum
from typing import Any, Protocol

import torch
import torch.distributed as dist

from myriad.comm.groups import Group
from myriad.kernels.gradient import DeferredProduct, apply_deferred
from myriad.telemetry.spans import Recorder

__all__ = ["Direction", "Peers", "cross"]


class Direction(Enum):
    """What the forward does; the backward does the other."""

    GATHER = 0
    REDUCE = 1


class Peers(Protocol):
    """The ranks on the other side; `myriad.parallel.tensor.GroupBoundary` is one."""

    group: Group | None
    size: int
    recorder: Recorder
    later: list[DeferredProduct] | None


# torch 2.13 renamed it; 2.11 has the old name only
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class _Gathering:
    """``[B, S/tp, H]`` of every rank to ``[B, S, H]``."""

    def __init__(self, x: torch.Tensor, peers: Peers) -> None:
        self._kept, self._recorder = x.contiguous(), peers.recorder
        self._shares = x.new_empty(peers.size, *x.shape)
        self._work = None
        if not x.is_meta:
            flat = self._shares.flatten(0, 1)
            self._work = _all_gather(flat, self._kept, group=peers.group, async_op=True)

    def wait(self) -> torch.Tensor:
        _wait(self._work, self._recorder)
        return self._shares.transpose(0, 1).flatten(1, 2)


class _Reducing:
    """``[B, S, H]`` of every rank to this rank's part ``[B, S/tp, H]`` of their sum."""

    def __init__(self, x: torch.Tensor, peers: Peers) -> None:
        self._kept = x.unflatten(1, (peers.size, -1)).transpose(0, 1).contiguous()
        self._recorder, self._rank_sums, self._work = peers.recorder, True, None
        if x.is_meta:
            self._received = self._kept
        elif dist.get_backend(peers.group) == "gloo":
            self._received = torch.empty_like(self._kept)
            self._work = dist.all_to_all_single(self._received, self._kept, group=peers.group, async_op=True)
        else:
            self._received = torch.empty_like(self._kept[:1])
            self._work = _reduce_scatter(
                self._received.flatten(0, 1), self._kept.flatten(0, 1), group=peers.group, async_op=True
            )

    def wait(self) -> torch.Tensor:
        _wait(self._work, self._recorder)
        total, *rows = self._received.unbind(0)
        if not rows:
            return total
        wide = torch.promote_types(total.dtype, torch.float32)
        total = total.to(wide, copy=True)
        for row in rows:
            total += row
        return total.to(self._received.dtype)


_Travelling = _Gathering | _Reducing


def _wait(work: dist.Work | None, recorder: Recorder) -> None:
    if work is not None:
        with recorder.span("tensor_comm"):
            work.wait()


class _Crossing:
    """What the two halves share."""

    def __init__(self, peers: Peers, direction: Direction) -> None:
        self._peers, self._forward = peers, direction
        self._travelling: _Travelling | None = None

    def post(self, x: torch.Tensor, *, forward: bool) -> None:
        gathers = (self._forward is Direction.GATHER) == forward
        self._travelling = (_Gathering if gathers else _Reducing)(x, self._peers)

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
