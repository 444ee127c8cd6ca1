"""Tensors that the backward recomputes instead of keeping them: cheap to compute, large to keep.

    kept          source --function--> x --product--> y      keeps source and x, for the two backwards
    recomputed    source --function--> x --product--> y      keeps source; the product's backward recomputes x

The function's own backward needs the source in any case, so nothing is kept in place of x. Function and
source are those of the forward, so x has the same bits.
"""

from collections.abc import Callable

import torch

from myriad.kernels.host_copies import keeps_storage

__all__ = ["Remade"]


class Remade:
    """A tensor ``function(source)`` that is recomputed in the backward. The first of ``num_takers`` products
    computes it, and the last one drops it, as autograd does with saved tensors."""

    def __init__(
        self, function: Callable[[torch.Tensor], torch.Tensor], source: torch.Tensor, num_takers: int = 1
    ) -> None:
        self._function, self._num_takers = function, num_takers
        self._source: torch.Tensor | None = source.detach()
        keeps_storage(self._source)
        self._made: torch.Tensor | None = None

    def take(self) -> torch.Tensor:
        """Return the tensor. Call it once for each taker."""
        if self._made is None:
            assert self._source is not None, "taken more often than announced"
            with torch.no_grad():
                self._made = self._function(self._source)
            self._source = None
        made = self._made
        self._num_takers -= 1
        if self._num_takers == 0:
            self._made = None
        return made
