"""Tensor and sequence parallelism: the `Boundary` that communicates within a group.

    enter    all-gather forward, reduce-scatter backward
    leave    reduce-scatter forward, all-gather backward
    copy     identity forward, all-reduce backward
    join     all-reduce forward, identity backward

``enter`` and ``leave`` are for models whose residual stream is sharded along the sequence (Korthikanti et
al., arXiv 2205.05198, section 4.2). ``copy`` and ``join`` are for models that keep it whole (Shoeybi et al.,
arXiv 1909.08053). On meta tensors every method returns the right shape without a group, so that a model can
be described without other ranks.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from myriad.comm.collectives import all_reduce, start_all_reduce
from myriad.comm.groups import Group, Groups
from myriad.kernels.config import Kernels
from myriad.kernels.gradient import LaterProducts, apply_deferred
from myriad.kernels.remade import Remade
from myriad.model.boundary import Arrived, Arriving, Boundary, Factors
from myriad.model.context_share import ContextPeers
from myriad.parallel.context_exchange import ContextGroup
from myriad.parallel.expert_exchange import ExpertPeers, start_counts, start_rows
from myriad.parallel.sliced_products import (
    GlooSliceTransport,
    SliceTransport,
    gather_products,
    scatter_products,
)
from myriad.parallel.symmetric_memory import SymmetricSliceTransport
from myriad.parallel.tp_async import AsyncStack, Direction, start_async
from myriad.program.config import OverlapConfig
from myriad.telemetry.spans import Recorder

__all__ = ["ExpertWidth", "GroupBoundary", "TensorPeers", "make_boundary"]


class TensorPeers(NamedTuple):
    """Some of the tensor-parallel ranks, as one of them sees them."""

    group: Group | None
    rank: int
    size: int

    @classmethod
    def along(cls, groups: Groups, axis: str) -> "TensorPeers":
        """Return the peers of a rank along ``axis``. A collective call of these."""
        return cls(groups.along(axis), groups.grid.index(axis), groups.grid.size(axis))


class ExpertWidth(NamedTuple):
    """How fewer than all tensor-parallel ranks share the width of each expert (``layout.etp``)."""

    sharing: TensorPeers
    """Those that share it."""
    parts: TensorPeers
    """Those with this rank's place in other groups that share it."""

    @classmethod
    def of(cls, groups: Groups) -> "ExpertWidth | None":
        """Return it for a rank; ``None``: all share it. A collective call of the tensor-parallel ranks."""
        if groups.grid.layout.num_etp_groups == 1:
            return None
        return cls(TensorPeers.along(groups, "etp"), TensorPeers.along(groups, "etp_group"))


class GroupBoundary(Boundary):
    """The boundary of one of ``size`` tensor-parallel ranks.

    With ``chunks`` = 1 each collective is waited for where it is issued; with more, messages of at least
    ``message_bytes`` overlap with computation. ``slices``: the largest number of slices in which each rank's
    part of a gather or scatter is communicated, overlapped with the adjacent matrix products. ``on_nccl``:
    use the memory order that is fastest on GPUs (`Boundary.sequence_first`, `Boundary.joins_parts`).
    """

    def __init__(
        self,
        group: Group | None,
        rank: int,
        size: int,
        recorder: Recorder,
        *,
        chunks: int = 1,
        slices: int = 0,
        message_bytes: int = 1,
        remakes: bool = False,
        on_nccl: bool = False,
        kernels: Kernels = "auto",
        experts: ExpertPeers | None = None,
        expert_hops: Sequence[ExpertPeers] = (),
        width: ExpertWidth | None = None,
        context: ContextPeers | None = None,
    ) -> None:
        """``experts``: the ranks that share the experts of a block; ``None``: this one has all.
        ``expert_hops``: the destinations of each of `Boundary.expert_hops`. ``width``: how fewer than all
        peers share the width of experts; ``None``: all do. ``context``: `Boundary.context`."""
        self.group, self.rank, self.size, self.recorder = group, rank, size, recorder
        self.chunks, self.message_bytes, self.remakes = chunks, message_bytes, remakes
        self.kernels = kernels
        self.sequence_first = on_nccl and size > 1
        self.joins_parts = self.sequence_first and not remakes  # recomputed activations have their own memory
        self.in_slices = slices > 0 and size > 1
        self._experts = experts
        if experts is not None:
            self.expert_rank, self.expert_ranks = experts.rank, experts.size
        self._hops, self.expert_hops = expert_hops, tuple((one.rank, one.size) for one in expert_hops)
        hides = (size > 1 and (chunks > 1 or slices > 0)) or self.expert_ranks > 1
        self.later: LaterProducts | None = LaterProducts() if hides else None
        self._slices, self.context = slices, context
        self._stream_is_whole, self._width = False, width

    def _among(self, peers: TensorPeers) -> Self:
        """Return this boundary, as it is now, with some of the peers only."""
        found = copy.copy(self)
        found.group, found.rank, found.size = peers
        found.in_slices = False
        return found

    @property
    def of_width(self) -> Boundary:
        return self if self._width is None else self._among(self._width.sharing)

    @property
    def of_parts(self) -> Boundary:
        return super().of_parts if self._width is None else self._among(self._width.parts)

    @contextmanager
    def whole_stream(self) -> Iterator[None]:
        """Keep the residual stream whole on every rank inside the block: nothing is gathered, and partial
        sums are added up over the ranks. Nothing in the block computes gradients."""
        in_slices, self.in_slices, self._stream_is_whole = self.in_slices, False, True
        try:
            yield
        finally:
            self.in_slices, self._stream_is_whole = in_slices, False

    def start_all_gather(self, x: torch.Tensor) -> Arriving:
        return Arrived(x) if self._stream_is_whole else self._start(x, Direction.GATHER)

    def start_reduce_scatter(self, x: torch.Tensor) -> Arriving:
        if self._stream_is_whole:
            return Arrived(x if self.size == 1 else self.sum(x.contiguous()))
        return self._start(x, Direction.REDUCE)

    def _start(self, x: torch.Tensor, direction: Direction) -> Arriving:
        if self.size == 1:
            return Arrived(x)
        posted = start_async(x, self, direction)
        return posted if self.chunks > 1 else Arrived(posted.wait())

    @cached_property
    def slice_transport(self) -> SliceTransport:
        """The implementation of fused products and communication for this backend."""
        if dist.get_backend(self.group) == "gloo":
            return GlooSliceTransport(self, self._slices, self.message_bytes)
        return SymmetricSliceTransport(self)

    def gather_products(
        self,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        remade: Remade | None = None,
    ) -> tuple[torch.Tensor, ...]:
        if self.in_slices and not x.is_meta:
            return gather_products(x, self, weights, biases, remade)
        return super().gather_products(self.start_all_gather(x).wait(), weights, biases, remade)

    def scatter_products(self, factors: Sequence[Factors]) -> torch.Tensor:
        if self.in_slices and not factors[0].x.is_meta:
            return scatter_products(factors, self)
        return self.start_reduce_scatter(super().scatter_products(factors)).wait()

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.size == 1 else _Copy.apply(x, self)

    def join(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.size == 1 else _Join.apply(x, self)

    def start_counts(self, counts: torch.Tensor, hop: int | None = None) -> Arriving:
        peers = self._experts if hop is None else self._hops[hop]
        return super().start_counts(counts, hop) if peers is None else start_counts(counts, peers)

    def start_exchange(
        self, rows: torch.Tensor, leaving: Sequence[int], arriving: Sequence[int], hop: int | None = None
    ) -> Arriving:
        peers = self._experts if hop is None else self._hops[hop]
        if peers is None:
            return super().start_exchange(rows, leaving, arriving, hop)
        self.has_posted = True
        return start_rows(rows, peers, leaving, arriving, self.later, self._run_paired)

    def _run_paired(self) -> None:
        if self.meanwhile is not None:
            self.meanwhile()

    def start_stack(self, x: torch.Tensor) -> Arriving:
        return Arrived(x[None]) if self.size == 1 else AsyncStack(x, self)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum ``x`` over the ranks, in place. The sum is not differentiable."""
        if x.is_meta:
            return x
        with self.recorder.span("tensor_comm"):
            return all_reduce(x, self.group)


def make_boundary(
    groups: Groups, overlap: OverlapConfig, recorder: Recorder, kernels: Kernels, device: torch.device
) -> GroupBoundary:
    """Return the boundary of this rank's tensor-parallel group, in the layout of ``groups``. A collective
    call of all ranks."""
    group = groups.along("tp")
    experts = ExpertPeers.of(groups, recorder, device) if groups.grid.layout.ep > 1 else None
    hops = () if experts is None else experts.hops(groups, device)
    return GroupBoundary(
        group,
        groups.grid.index("tp"),
        groups.grid.layout.tp,
        recorder,
        chunks=overlap.tensor_chunks if overlap.tensor_kind == "turns" else 1,
        slices=overlap.tensor_chunks if overlap.tensor_kind == "slices" else 0,
        message_bytes=overlap.tensor_message,
        remakes=groups.grid.layout.recompute == "selective",
        on_nccl=group is not None and dist.get_backend(group) != "gloo",
        kernels=kernels,
        experts=experts,
        expert_hops=hops,
        width=ExpertWidth.of(groups),
        context=ContextGroup(groups, recorder, device) if groups.grid.layout.cp > 1 else None,
    )


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, boundary: GroupBoundary) -> torch.Tensor:
        ctx.boundary = boundary
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        boundary: GroupBoundary = ctx.boundary
        pending = start_all_reduce(total := gradients[0].clone(), boundary.group)
        apply_deferred(boundary.later or [])
        with boundary.recorder.span("tensor_comm"):
            pending.wait()
        return total, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, boundary: GroupBoundary) -> torch.Tensor:
        return boundary.sum(x.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None
