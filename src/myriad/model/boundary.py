"""Where the model meets its tensor-parallel peers, so that it need not know them.

Every place of the transformer at which tensor + sequence parallelism communicates goes through a `Boundary`.
On one device each method is the identity; `myriad.parallel.tensor` provides the one that talks to a group.

    [B, S/tp, H]  --enter-->  [B, S, H]  column-parallel ... row-parallel  --leave-->  [B, S/tp, H]

``enter`` is all-gather forward, reduce-scatter backward; ``leave`` is reduce-scatter forward, all-gather
backward. In the parallel block one ``enter`` feeds attention and MLP and one ``leave`` takes both (MegaScale,
section 3.1). Both come in two halves, so that a layer can do something else meanwhile:

    arriving = boundary.start_enter(x)      posted
    ...                                     other work; forward and backward each do theirs here
    whole = arriving.wait()

Or the products around the communication go with it, slice by slice (``overlap.tensor = "slices"``): a layer
then calls `Boundary.gather_products` and `Boundary.scatter_products` in place of the halves.

Legend: B batch, S sequence, H hidden, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from myriad.kernels.config import Kernels
from myriad.kernels.gradient import DeferredProduct
from myriad.kernels.linear import linear
from myriad.kernels.remade import Remade

__all__ = ["Arrived", "Arriving", "Boundary", "Factors"]


class Arriving(Protocol):
    """A tensor on its way from the peers."""

    def wait(self) -> torch.Tensor:
        """The tensor, when it is there; once."""
        ...


class Arrived:
    """A tensor that is here already."""

    def __init__(self, x: torch.Tensor) -> None:
        self._x = x

    def wait(self) -> torch.Tensor:
        """The tensor."""
        return self._x


class Factors(NamedTuple):
    """A row-parallel product ``x weight^T``: ``[B, S, I]`` and ``[H, I]`` to ``[B, S, H]``."""

    x: torch.Tensor
    weight: torch.Tensor
    remade: Remade | None = None
    """Recomputed activation from which the backward takes ``x``; ``x`` is then not kept."""


class Boundary:
    """One device: nothing to gather, nothing to sum."""

    rank: int = 0
    """Index among the tensor-parallel peers."""
    size: int = 1
    """Number of tensor-parallel peers."""
    chunks: int = 1
    """Parts of a micro-batch that take turns, each computing while the others' tensors travel; 1: nothing
    travels behind anything."""
    message_bytes: int = 1
    """Least bytes of a part's, or of a slice's, message to a peer."""
    token_multiple: int = 1
    """Each part of a micro-batch has a multiple of so many tokens, if the whole has."""
    in_slices: bool = False
    """Layers are to call `gather_products` and `scatter_products`: what they gather and scatter travels in
    slices behind these products."""
    later: list[DeferredProduct] | None = None
    """Where the backward of a linear may put its weight's product, to be computed while a gradient travels;
    ``None``: nowhere."""
    remakes: bool = False
    """Outputs of norms and activation functions are made again in the backward instead of being kept
    (``layout.recompute = "selective"``)."""
    kernels: Kernels = "auto"
    """Whose kernels compute the operators (``train.kernels``)."""

    def start_enter(self, x: torch.Tensor) -> Arriving:
        """``[B, S/size, H]`` to ``[B, S, H]``; differentiable."""
        return Arrived(x)

    def start_leave(self, x: torch.Tensor) -> Arriving:
        """Partial sums ``[B, S, H]`` to this rank's part ``[B, S/size, H]`` of the total; differentiable."""
        return Arrived(x)

    def gather_products(
        self,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        remade: Remade | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """`start_enter`, and the column-parallel products of the result: ``x`` ``[B, S/size, H]`` and weights
        ``[O, H]`` to ``[B, S, O]`` each, with the biases (or ``None``) added. ``remade``: where the backward
        finds ``x``; then nothing of it is kept, and the peers gather it again."""
        pairs = zip(weights, biases, strict=True)
        return tuple(linear(x, weight, bias, self.later, remade) for weight, bias in pairs)

    def scatter_products(self, factors: Sequence[Factors]) -> torch.Tensor:
        """The sum of row-parallel products, and `start_leave` of it: ``[B, S/size, H]``."""
        first, *others = (linear(one.x, one.weight, None, self.later, one.remade) for one in factors)
        return sum(others, first)

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        """For models that keep the residual stream whole: identity forward, sum over peers backward."""
        return x

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """For models that keep the residual stream whole: sum over peers forward, identity backward."""
        return x

    def start_stack(self, x: torch.Tensor) -> Arriving:
        """Every rank's ``x``: ``[...]`` to ``[size, ...]``; not differentiable (used where gradients are
        made)."""
        return Arrived(x[None])
