"""Interface between the model and its tensor-parallel peers.

All tensor- and sequence-parallel communication of the transformer goes through a `Boundary`. On one device
each method is the identity; `myriad.parallel.tensor_parallel` provides the boundary that communicates in a
group.

    [B, S/tp, H]  --enter-->  [B, S, H]  column-parallel ... row-parallel  --leave-->  [B, S/tp, H]

``enter`` is all-gather forward, reduce-scatter backward; ``leave`` is reduce-scatter forward, all-gather
backward. In the parallel block one ``enter`` serves attention and MLP and one ``leave`` serves both
(MegaScale, section 3.1). Both have two halves, so that a layer can compute something else meanwhile:

    arriving = boundary.start_all_gather(x)     issued
    ...                                         other work, in the forward and in the backward
    whole = arriving.wait()

With ``overlap.tensor = "slices"``, the communication overlaps with the adjacent products, slice by slice: a
layer then calls `Boundary.gather_products` and `Boundary.scatter_products` instead of the halves.

Legend: B batch, S sequence, H hidden, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from myriad.kernels.config import Kernels
from myriad.kernels.gradient import LaterProducts
from myriad.kernels.linear import linear
from myriad.kernels.remade import Remade
from myriad.kernels.side_by_side import PartSlots
from myriad.model.context_share import ContextPeers

__all__ = ["Arrived", "Arriving", "Boundary", "Factors"]


class Arriving(Protocol):
    """A tensor in flight."""

    def wait(self) -> torch.Tensor:
        """Wait for the tensor and return it. Call it once."""
        ...


class Arrived:
    """A tensor that is already available."""

    def __init__(self, x: torch.Tensor) -> None:
        self._x = x

    def wait(self) -> torch.Tensor:
        """Return the tensor at once."""
        return self._x


class Factors(NamedTuple):
    """A row-parallel product ``x weight^T``: ``[B, S, I]`` and ``[H, I]`` to ``[B, S, H]``."""

    x: torch.Tensor
    weight: torch.Tensor
    remade: Remade | None = None
    """Recomputed activation from which the backward takes ``x``; ``x`` is then not kept."""


class Boundary:
    """The boundary on one device, which gathers and sums nothing."""

    rank: int = 0
    """Index among the tensor-parallel peers."""
    size: int = 1
    """Number of tensor-parallel peers."""
    chunks: int = 1
    """Parts of a micro-batch that alternate: one computes while the others communicate. 1: communication does
    not overlap."""
    message_bytes: int = 1
    """Smallest message of a part or a slice to a peer, in bytes."""
    token_multiple: int = 1
    """Each part of a micro-batch has a multiple of this many tokens, if the whole micro-batch has."""
    joins_parts: bool = False
    """Whether parts write the operands of weight gradients to adjacent memory, so that each gradient is one
    product."""
    place: PartSlots | None = None
    """Memory place of the part that runs, with `joins_parts`."""
    sequence_first: bool = False
    """Whether stages of several sequences order their input position by position in memory
    (`myriad.kernels.memory_order`), as the peers gather it."""
    in_slices: bool = False
    """Whether layers call `gather_products` and `scatter_products`, whose communication overlaps with these
    products in slices."""
    later: LaterProducts | None = None
    """List on which the backward of a linear may put its weight product, to be computed while a gradient is
    in flight; ``None``: products are computed directly."""
    remakes: bool = False
    """Whether outputs of norms and activation functions are recomputed in the backward instead of kept
    (``layout.recompute = "selective"``)."""
    kernels: Kernels = "auto"
    """Choice of the kernels that compute the operators (``train.kernels``)."""
    expert_rank: int = 0
    """Index among the ranks that share the experts of a block."""
    expert_ranks: int = 1
    """Number of ranks that share the experts of a block."""
    expert_hops: tuple[tuple[int, int], ...] = ()
    """Where tokens travel once for several experts (`myriad.model.expert_dispatch`), for each hop of their
    way this rank's index and the number of destinations; empty: a token travels once for each expert."""
    has_posted: bool = False
    """Whether tokens were sent to their experts, or results back, since a part of the micro-batch began its
    turn."""
    meanwhile: Callable[[], None] | None = None
    """What a backward calls when gradients have left for experts, or for the tokens of experts: the forward
    of another micro-batch computes a part (`myriad.parallel.paired_forward`)."""
    context: ContextPeers | None = None
    """The ranks that share each sequence; ``None``: this one has all positions."""

    @property
    def communicates(self) -> bool:
        """Whether layers exchange tensors with other ranks."""
        return self.size > 1 or self.expert_ranks > 1

    @property
    def of_width(self) -> "Boundary":
        """The boundary of the tensor-parallel peers that share the width of each expert, and route the same
        tokens: all of them, or ``layout.etp`` neighbours, which have a part of each sequence."""
        return self

    @property
    def of_parts(self) -> "Boundary":
        """The boundary of the tensor-parallel peers with this one's place among those of `of_width`, which
        have the parts of each sequence."""
        return Boundary()

    def start_all_gather(self, x: torch.Tensor) -> Arriving:
        """Gather ``[B, S/size, H]`` to ``[B, S, H]``. The result is differentiable."""
        return Arrived(x)

    def start_reduce_scatter(self, x: torch.Tensor) -> Arriving:
        """Reduce partial sums ``[B, S, H]`` to this rank's part ``[B, S/size, H]`` of the total. The result
        is differentiable."""
        return Arrived(x)

    def gather_products(
        self,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        remade: Remade | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Gather ``x`` as `start_all_gather` does, and return its column-parallel products.

        ``x`` ``[B, S/size, H]`` and weights ``[O, H]`` give ``[B, S, O]`` each, with the biases (or ``None``)
        added. ``remade``: recomputes ``x`` in the backward; then ``x`` is not kept, and the peers gather it
        again.
        """
        pairs = zip(weights, biases, strict=True)
        return tuple(linear(x, weight, bias, self.later, remade) for weight, bias in pairs)

    def scatter_products(self, factors: Sequence[Factors]) -> torch.Tensor:
        """Sum row-parallel products and reduce the sum as `start_reduce_scatter` does: ``[B, S/size, H]``."""
        first, *others = (linear(one.x, one.weight, None, self.later, one.remade) for one in factors)
        return sum(others, first)

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` forward, and sum its gradient over the peers backward. For models that keep the
        residual stream whole."""
        return x

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """Sum ``x`` over the peers forward, and pass its gradient backward. For models that keep the residual
        stream whole."""
        return x

    def start_counts(self, counts: torch.Tensor, hop: int | None = None) -> Arriving:
        """Exchange the numbers of tokens for each expert ``[E]`` with the ranks that share experts, or for
        each destination of one of `expert_hops` with those. The result ``[ranks, E/ranks]`` has the tokens of
        each rank for the experts of this one."""
        return Arrived(counts[None])

    def start_exchange(
        self, rows: torch.Tensor, leaving: Sequence[int], arriving: Sequence[int], hop: int | None = None
    ) -> Arriving:
        """Send ``leaving[r]`` of the rows ``[N, H]``, in order, to each rank r of those that share experts,
        or to each destination r of one of `expert_hops`. The result has the ``arriving[r]`` rows of each, in
        order of the ranks. It is differentiable."""
        return Arrived(rows)

    def start_stack(self, x: torch.Tensor) -> Arriving:
        """Stack every rank's ``x``: ``[...]`` to ``[size, ...]``. The result is not differentiable; operators
        that compute gradients use it."""
        return Arrived(x[None])
