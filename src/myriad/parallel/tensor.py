"""Tensor + sequence parallelism: the `Boundary` that talks to a group.

    enter    all-gather forward, reduce-scatter backward
    leave    reduce-scatter forward, all-gather backward
    copy     identity forward, all-reduce backward
    join     all-reduce forward, identity backward

``enter`` and ``leave`` are for models whose residual stream is cut along the sequence (Korthikanti et al.,
arXiv 2205.05198, section 4.2), ``copy`` and ``join`` for those that keep it whole (Shoeybi et al., arXiv
1909.08053). On meta tensors every method gives the right shape without a group, so that a model can be
described alone.
"""

from typing import Any

import torch

from myriad.comm.collectives import all_gather, all_reduce, all_reduce_max, reduce_scatter
from myriad.comm.groups import Group
from myriad.model.boundary import Boundary
from myriad.telemetry.spans import Recorder

__all__ = ["GroupBoundary"]

_SEQUENCE = 1
"""Dimension of the sequence in ``[B, S, H]``."""


class GroupBoundary(Boundary):
    """One of ``size`` tensor-parallel ranks."""

    def __init__(self, group: Group | None, rank: int, size: int, recorder: Recorder) -> None:
        self.group, self.rank, self.size, self.recorder = group, rank, size, recorder

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.size == 1 else _Enter.apply(x, self)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.size == 1 else _Leave.apply(x, self)

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.size == 1 else _Copy.apply(x, self)

    def join(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.size == 1 else _Join.apply(x, self)

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.size == 1 else x.chunk(self.size, _SEQUENCE)[self.rank]

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        if self.size == 1 or x.is_meta:
            return x
        with self.recorder.span("tensor_comm"):
            return all_reduce(x, self.group)

    def max(self, x: torch.Tensor) -> torch.Tensor:
        if self.size == 1 or x.is_meta:
            return x
        with self.recorder.span("tensor_comm"):
            return all_reduce_max(x, self.group)

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's part of the sequence; not differentiable."""
        if x.is_meta:
            return x.repeat_interleave(self.size, _SEQUENCE)
        with self.recorder.span("tensor_comm"):
            return all_gather(x, self.group, _SEQUENCE)

    def reduced(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sequence of the sum; not differentiable."""
        if x.is_meta:
            return x[:, : x.shape[_SEQUENCE] // self.size]
        with self.recorder.span("tensor_comm"):
            return reduce_scatter(x, self.group, _SEQUENCE)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, boundary: GroupBoundary) -> torch.Tensor:
        ctx.boundary = boundary
        return boundary.gathered(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.boundary.reduced(gradients[0]), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, boundary: GroupBoundary) -> torch.Tensor:
        ctx.boundary = boundary
        return boundary.reduced(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.boundary.gathered(gradients[0]), None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, boundary: GroupBoundary) -> torch.Tensor:
        ctx.boundary = boundary
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.boundary.sum(gradients[0].clone()), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, boundary: GroupBoundary) -> torch.Tensor:
        return boundary.sum(x.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None
