"""Cache of the keys and values of earlier positions, or of the latents that they are computed from, for
sampling one token at a time.

Legend: B batch, S new positions, N query heads, K key/value heads, D head size.
"""

import torch

from myriad.kernels.attention import attention_reference
from myriad.kernels.attention_choice import Scores

__all__ = ["KeyValueCache", "LatentCache"]


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


class LatentCache(KeyValueCache):
    """The cache of one block with latent attention: the latent and the shared rotated key of each position,
    whatever the number of heads."""

    def __init__(self, limit: int, rank: int) -> None:
        """``rank``: width of the latent, the first values of what is cached."""
        super().__init__(limit)
        self.rank = rank

    def attend_latents(self, q: torch.Tensor, latents: torch.Tensor, how: Scores) -> torch.Tensor:
        """Attend from queries ``[B, S, N, R + P]`` to all cached positions and themselves, ``[B, S, 1,
        R + P]``: to mixed latents ``[B, S, N, R]``. The cache is extended."""
        keys = latents if self._keys is None else torch.cat([self._keys, latents], 1)
        self.next_position += q.shape[1]
        self._keys = keys[:, -self.limit :].clone()
        return attention_reference(q, keys, keys[..., : self.rank], self.limit, how)

    @property
    def num_bytes(self) -> int:
        """Size of the cache."""
        return 0 if self._keys is None else self._keys.nbytes
