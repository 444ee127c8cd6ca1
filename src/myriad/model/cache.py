"""Keys and values of positions already seen, for sampling one token at a time.

Legend: B batch, S new positions, N query heads, K key/value heads, D head size.
"""

import torch

from myriad.kernels.attention import attention_reference

__all__ = ["KeyValueCache"]


class KeyValueCache:
    """Of one block. Holds at most ``limit`` positions; older ones are forgotten."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.next_position = 0
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of new positions on all kept ones and themselves; keeps their keys and values."""
        keys = k if self._keys is None else torch.cat([self._keys, k], 1)
        values = v if self._values is None else torch.cat([self._values, v], 1)
        self.next_position += q.shape[1]
        # Copies: a view would keep the memory of all positions alive.
        self._keys, self._values = keys[:, -self.limit :].clone(), values[:, -self.limit :].clone()
        return attention_reference(q, keys, values, self.limit)
