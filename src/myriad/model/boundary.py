"""Where the model meets its tensor-parallel peers, so that it need not know them.

Every place of the transformer at which tensor + sequence parallelism communicates goes through a `Boundary`.
On one device each method is the identity; `myriad.parallel.tensor` provides the one that talks to a group.

    [B, S/tp, H]  --enter-->  [B, S, H]  column-parallel ... row-parallel  --leave-->  [B, S/tp, H]

``enter`` is all-gather forward, reduce-scatter backward; ``leave`` is reduce-scatter forward, all-gather
backward. In the parallel block one ``enter`` feeds attention and MLP and one ``leave`` takes both (MegaScale,
section 3.1).

Legend: B batch, S sequence, H hidden, V vocabulary.
"""

import torch

__all__ = ["Boundary"]


class Boundary:
    """One device: nothing to gather, nothing to sum."""

    rank: int = 0
    """Index among the tensor-parallel peers."""
    size: int = 1
    """Number of tensor-parallel peers."""

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, S/size, H]`` to ``[B, S, H]``; differentiable."""
        return x

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Partial sums ``[B, S, H]`` to this rank's part ``[B, S/size, H]`` of the total; differentiable."""
        return x

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        """For models that keep the residual stream whole: identity forward, sum over peers backward."""
        return x

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """For models that keep the residual stream whole: sum over peers forward, identity backward."""
        return x

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sequence of a tensor every rank holds whole: ``[B, S, ...]`` to ``[B,
        S/size, ...]``."""
        return x

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over peers, in place; not differentiable (used inside autograd functions)."""
        return x

    def max(self, x: torch.Tensor) -> torch.Tensor:
        """Maximum over peers, in place; not differentiable."""
        return x
