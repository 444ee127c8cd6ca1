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

Legend: B batch, S sequence, H hidden, V vocabulary.
"""

from typing import Protocol

import torch

from myriad.kernels.config import Kernels
from myriad.kernels.gradient import DeferredProduct

__all__ = ["Arrived", "Arriving", "Boundary"]


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
    """Least bytes of a part's message to a peer."""
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
