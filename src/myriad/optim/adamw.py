"""AdamW (Loshchilov & Hutter 2019). Every element moves by itself, so sharding changes nothing."""

from collections.abc import Sequence

import torch

from myriad.optim.moments import Moments

__all__ = ["AdamW"]


class AdamW(Moments):
    """One fused kernel over the regions that decay, one over the others."""

    def update(self, indices: Sequence[int], stays: torch.Tensor | None = None) -> None:
        """Moves these regions."""
        self.move_in_place(indices, decays=True, stays=stays)
        self.move_in_place(indices, decays=False, stays=stays)
