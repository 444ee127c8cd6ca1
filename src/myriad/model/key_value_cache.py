"""Cache of the keys and values of earlier positions, for sampling one token at a time.

Legend: B batch, S new positions, N query heads, K key/value heads, D head size.
"""

import torch

from myriad.kernels.attention import attention_reference
from myriad.kernels.attention_choice import Scores

__all__ = ["KeyValueCache"]


class KeyValueCache:
    """The cache of one block. It holds at most ``limit`` positions and drops older ones."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.next_position = 0
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        how: Scores = Scores(),
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend from new positions to all cached ones and themselves; add their keys and values to the
        cache."""
        keys = k if self._keys is None else torch.cat([self._keys, k], 1)
        values = v if self._values is None else torch.cat([self._values, v], 1)
        self.next_position += q.shape[1]
        # Copies, because a view would keep the memory of all positions alive.
        self._keys, self._values = keys[:, -self.limit :].clone(), values[:, -self.limit :].clone()
        return attention_reference(q, keys, values, self.limit, how, sinks)
