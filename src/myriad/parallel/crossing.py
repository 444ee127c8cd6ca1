"""One tensor crossing a tensor-parallel boundary: posted in one place, waited for in another, and in the
backward the other way round.

    forward    [B, S/tp, H] --post--> (token) ... other work ... (token) --arrive--> [B, S, H]
    backward   [B, S/tp, H] <--wait-- (token) ... other work ... (token) <--post---- [B, S, H]

Between the two halves autograd sees an empty token, so nothing can read, or add to, memory that is not filled
yet. A gather's transposed is a reduce-scatter and the other way round, so one pair of nodes serves both.

Weight products that the backward left for later are computed when a gradient has been posted (MegaScale,
arXiv 2402.15627, section 3.2).

Legend: B batch, S sequence, H hidden.
"""

from enum import Enum
from typing import Any, Protocol

import torch

from myriad.kernels.gradient import DeferredProduct, apply_deferred
from myriad.parallel.travelling import Gathering, Peers, Reducing, Travelling

__all__ = ["Direction", "cross"]


class Direction(Enum):
    """What the forward does; the backward does the other."""

    GATHER = 0
    REDUCE = 1


class _Boundary(Peers, Protocol):
    """The peers, and the weight products that wait for a time to compute them."""

    later: list[DeferredProduct] | None


class _Crossing:
    """What the two halves share."""

    def __init__(self, peers: _Boundary, direction: Direction) -> None:
        self._peers, self._forward = peers, direction
        self._travelling: Travelling | None = None

    def post(self, x: torch.Tensor, *, forward: bool) -> None:
        gathers = (self._forward is Direction.GATHER) == forward
        self._travelling = Gathering(x, self._peers) if gathers else Reducing(x, self._peers)

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


def cross(x: torch.Tensor, peers: _Boundary, direction: Direction) -> _Posted:
    """Posts ``x``; what arrives is differentiable."""
    crossing = _Crossing(peers, direction)
    return _Posted(_Post.apply(x, crossing), crossing)
