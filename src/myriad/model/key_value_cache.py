"""Cache of the keys and values of earlier positions, or of the latents that they are computed from, for
generating text, for several texts together.

The rows of a batch have different lengths. They end in the same column, and padding fills the columns before
shorter ones. A window counts columns, so it needs no more than the position within a row:

    row 0    .  .  a0 a1 a2 | a3      new positions are one more column
    row 1    b0 b1 b2 b3 b4 | b5
    row 2    .  .  .  .  c0 | c1

Padding gets a share of exactly 0 in the softmax, so a row's result depends on other rows by rounding alone.

Legend: B batch, S new positions, N query heads, K key/value heads, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch.nn import functional as F

from myriad.kernels.attention import attention_reference
from myriad.kernels.attention_choice import Scores
from myriad.kernels.rotary import Rotary, rotary_turns, rotary_turns_of_rows

__all__ = ["KeyValueCache", "LatentCache", "NewPositions"]


@dataclass(frozen=True, eq=False)
class NewPositions:
    """Where new tokens ``[B, S]`` lie in their texts. Of a row with fewer than S, the first are padding."""

    ends: Sequence[int]
    """Number of positions of each row, with the new ones."""
    counts: Sequence[int]
    """Number of new positions of each row."""
    device: torch.device
    _turns: dict[Rotary, torch.Tensor] = field(default_factory=dict)

    @cached_property
    def positions(self) -> torch.Tensor:
        """Position of each token in its row ``[B, S]``; 0 for padding."""
        back = torch.arange(-max(self.counts), 0, device=self.device)
        return (torch.tensor(self.ends, device=self.device)[:, None] + back).clamp(min=0)

    @cached_property
    def is_token(self) -> torch.Tensor | None:
        """Which of ``[B, S]`` are no padding; ``None``: all."""
        most = max(self.counts)
        if min(self.counts) == most:
            return None
        counts = torch.tensor(self.counts, device=self.device)
        return torch.arange(-most, 0, device=self.device) >= -counts[:, None]

    def turns(self, rotary: Rotary) -> torch.Tensor:
        """Return the rotations at the positions: complex ``[S, D/2]`` if all rows have the same, else
        ``[B, S, D/2]``."""
        if rotary not in self._turns:
            if len(set(self.ends)) == 1 and self.is_token is None:
                first = self.ends[0] - self.counts[0]
                self._turns[rotary] = rotary_turns(rotary, self.counts[0], self.device, first)
            else:
                self._turns[rotary] = rotary_turns_of_rows(rotary, self.positions, self.ends)
        return self._turns[rotary]


class KeyValueCache:
    """The cache of one block. It holds at most ``limit`` positions of each row and drops older ones."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._parts: list[torch.Tensor] = []
        """What is cached ``[B, columns, K, D]``: keys and values."""
        self._is_key: torch.Tensor | None = None
        """Which columns of each row are no padding; ``None``: all."""

    @property
    def num_bytes(self) -> int:
        """Size of the cache."""
        return sum(part.nbytes for part in self._parts)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        at: NewPositions,
        how: Scores = Scores(),
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend from new positions to all cached ones and themselves; add their keys and values to the
        cache. Where the cache is not empty, all rows have as many new positions."""
        keys, values = self._extend([k, v], at)
        mixed = attention_reference(q, keys, values, self.limit, how, sinks, self._is_key)
        self._drop_old()
        return mixed

    def _extend(self, new: list[torch.Tensor], at: NewPositions) -> list[torch.Tensor]:
        """Add new columns, and return what is cached with them."""
        is_token = at.is_token
        if not self._parts:
            # Copies of views, which would keep queries alive, too.
            self._parts, self._is_key = [part.contiguous() for part in new], is_token
            return self._parts
        assert is_token is None, "padding lies before the first token of a row"
        if self._is_key is not None:
            self._is_key = F.pad(self._is_key, (0, new[0].shape[1]), value=True)
        self._parts = [torch.cat(both, 1) for both in zip(self._parts, new, strict=True)]
        return self._parts

    def _drop_old(self) -> None:
        width = self._parts[0].shape[1]
        if width > self.limit:
            # Copies, because a view would keep the memory of all positions alive.
            self._parts = [part[:, -self.limit :].clone() for part in self._parts]
            if self._is_key is not None:
                self._is_key = self._is_key[:, -self.limit :]

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order, and no column that is padding in all of them."""
        index = torch.tensor(rows, device=self._parts[0].device)
        first = 0
        if self._is_key is not None:
            is_key = self._is_key[index]
            first = int(is_key.any(0).int().argmax())
            self._is_key = None if is_key[:, first:].all() else is_key[:, first:]
        self._parts = [part[index, first:] for part in self._parts]

    def join(self, other: "KeyValueCache") -> None:
        """Add the rows of another cache of the same block after these."""
        width = max(self._parts[0].shape[1], other._parts[0].shape[1])
        masks = [cache._mask(width) for cache in (self, other)]
        pairs = zip(self._parts, other._parts, strict=True)
        self._parts = [torch.cat([_widened(part, width) for part in pair]) for pair in pairs]
        joined = torch.cat(masks)
        self._is_key = None if joined.all() else joined

    def _mask(self, width: int) -> torch.Tensor:
        part = self._parts[0]
        mask = self._is_key
        if mask is None:
            mask = torch.ones(part.shape[:2], dtype=torch.bool, device=part.device)
        return F.pad(mask, (width - mask.shape[1], 0))


def _widened(part: torch.Tensor, width: int) -> torch.Tensor:
    """Return ``[B, columns, K, D]`` with columns of zeros before, ``width`` in all."""
    return F.pad(part, (0, 0, 0, 0, width - part.shape[1], 0))


class LatentCache(KeyValueCache):
    """The cache of one block with latent attention: the latent and the shared rotated key of each position,
    whatever the number of heads."""

    def __init__(self, limit: int, rank: int) -> None:
        """``rank``: width of the latent, the first values of what is cached."""
        super().__init__(limit)
        self.rank = rank

    def attend_latents(
        self, q: torch.Tensor, latents: torch.Tensor, at: NewPositions, how: Scores
    ) -> torch.Tensor:
        """Attend from queries ``[B, S, N, R + P]`` to all cached positions and themselves, ``[B, S, 1,
        R + P]``: to mixed latents ``[B, S, N, R]``. The cache is extended."""
        (keys,) = self._extend([latents], at)
        mixed = attention_reference(q, keys, keys[..., : self.rank], self.limit, how, None, self._is_key)
        self._drop_old()
        return mixed
