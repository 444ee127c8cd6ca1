"""Context parallelism: which positions of a sequence a rank has, and its attention to those of the others.

The ranks of ``layout.cp`` form a grid. Between rows keys and values travel around a ring
(`myriad.kernels.ring_attention`). The ``layout.ulysses`` ranks of a row exchange positions for heads
(DeepSpeed-Ulysses, arXiv 2309.14509): each then has some of the heads, of all positions of the row.

    cp=4 ulysses=2     chunks of row 0: 0 3     rank 0: 0    rank 1: 3
    (4 chunks)         chunks of row 1: 1 2     rank 2: 1    rank 3: 2

All other operators work on single positions, so they need nothing of the others.

Legend: B batch, S positions of a rank, U ranks of a row, N query heads, K key/value heads, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Protocol

import torch

from myriad.kernels.attention_choice import Scores
from myriad.kernels.config import Kernels
from myriad.kernels.document_shares import document_parts
from myriad.kernels.documents import Documents
from myriad.kernels.ring_attention import Ring, ring_attention
from myriad.kernels.ring_plan import ring_plan, ring_ranges
from myriad.kernels.rotary import rotary_turns
from myriad.kernels.rotary_scaling import Rotary

__all__ = ["ContextPeers", "ContextShare", "attend_in_context", "share_of", "turns_of"]


_Ranges = tuple[tuple[int, int], ...]
"""First position of each range, and the one after its last; ascending."""


@dataclass(frozen=True)
class ContextShare:
    """The positions of sequences that one rank has."""

    sequence: int
    """Positions of a whole sequence."""
    rows: tuple[_Ranges, ...]
    """The positions in each sequence of a micro-batch; one entry: they are the same in all sequences."""

    @property
    def length(self) -> int:
        """Number of positions that the rank has of each sequence."""
        return sum(stop - start for start, stop in self.rows[0])

    @cached_property
    def _positions(self) -> dict[torch.device, torch.Tensor]:
        return {}

    def positions(self, device: torch.device) -> torch.Tensor:
        """Return the positions, int64 ``[S]``, or ``[B, S]`` if sequences have others."""
        if device not in self._positions:
            rows = [torch.cat([torch.arange(*ends, device="cpu") for ends in row]) for row in self.rows]
            self._positions[device] = (rows[0] if len(rows) == 1 else torch.stack(rows)).to(device)
        return self._positions[device]

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Return the values at these positions, of whole sequences ``[B, S]``."""
        if len(self.rows) > 1:
            return x.gather(1, self.positions(x.device))
        return torch.cat([x[:, start:stop] for start, stop in self.rows[0]], 1)

    def split(self, sizes: Sequence[int]) -> "list[ContextShare]":
        """Return the shares of consecutive sequences, a value for each of ``sizes``."""
        if len(self.rows) == 1:
            return [self] * len(sizes)
        ends = list(accumulate(sizes))
        return [
            ContextShare(self.sequence, self.rows[end - size : end])
            for end, size in zip(ends, sizes, strict=True)
        ]


def share_of(
    sequence: int, rank: int, size: int, ulysses: int, documents: Documents | None = None
) -> ContextShare:
    """Return the share of rank ``rank`` of ``size``; ``ulysses`` ranks are a row. The sequence must be
    divisible into equal chunks (`myriad.job`)."""
    ring = size // ulysses
    if documents is None:
        return _plain_share(sequence, rank, ring, ulysses)
    place, column = divmod(rank, ulysses)
    rows = []
    for lengths in documents.lengths:
        ranges = [
            ends for parts in document_parts(lengths, ring, documents.sharing)[place] for _, ends in parts
        ]
        rows.append(_column_of(ranges, sequence // size, column))
    return ContextShare(sequence, tuple(rows))


@lru_cache(maxsize=64)
def _plain_share(sequence: int, rank: int, ring: int, ulysses: int) -> ContextShare:
    place, column = divmod(rank, ulysses)
    ranges = ring_ranges(sequence, place, ring)
    return ContextShare(sequence, (_column_of(ranges, sequence // (ring * ulysses), column),))


def _column_of(ranges: Sequence[tuple[int, int]], each: int, column: int) -> _Ranges:
    """Return the part of a row's positions that one of its ranks has: ``each``, in order."""
    found, passed = [], 0
    for start, stop in ranges:
        low, high = (min(max(start, start + end * each - passed), stop) for end in (column, column + 1))
        if low < high:
            found.append((low, high))
        passed += stop - start
    return tuple(found)


class ContextPeers(Protocol):
    """The ranks that share a sequence, seen from one of them."""

    @property
    def ring(self) -> Ring:
        """The ranks of this one's column."""
        ...

    @property
    def ulysses(self) -> int:
        """Number of ranks of a row."""
        ...

    @property
    def column(self) -> int:
        """Index of this rank in its row."""
        ...

    @property
    def num_ranks(self) -> int:
        """Number of all ranks that share a sequence."""
        ...

    def share(self, sequence: int, documents: Documents | None = None) -> ContextShare:
        """Return this rank's share of sequences of this length, or of windows of documents."""
        ...

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """Send ``x[u]`` ``[U, ...]`` to rank u of the row; the result has what each rank sent. It is
        differentiable."""
        ...

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``x`` over all ranks that share the sequence. It is not differentiable."""
        ...


def turns_of(rotary: Rotary, x: torch.Tensor, share: ContextShare | None) -> torch.Tensor:
    """Return the rotations (`rotary_turns`) at the positions of ``x`` ``[B, S, ...]``: all of the sequence,
    or those of a share."""
    if share is None:
        return rotary_turns(rotary, x.shape[1], x.device)
    return rotary_turns(rotary, share.sequence, x.device)[share.positions(x.device)]


def attend_in_context(
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    peers: ContextPeers,
    share: ContextShare,
    window: int | None,
    how: Scores,
    sinks: torch.Tensor | None = None,
    documents: Documents | None = None,
    largest: torch.Tensor | None = None,
    kernels: Kernels = "auto",
) -> torch.Tensor:
    """Attend from this rank's queries ``[B, S, N, D]`` to keys and values of the whole sequence, of which it
    has its own ``[B, S, K, D]``. Returns ``[B, S, N, D]``. ``largest``: of `ring_attention`; heads that the
    ranks of a row have taken over are raised there."""
    q, k, v = heads
    num_columns, ring = peers.ulysses, peers.ring
    plan = ring_plan(share.sequence, window, ring.rank, ring.size, documents)
    if num_columns == 1:
        return ring_attention(q, k, v, plan, ring, how, sinks, largest, kernels)
    copies = max(1, num_columns // k.shape[2])
    if copies > 1:
        k, v = k.repeat_interleave(copies, 2), v.repeat_interleave(copies, 2)
    sizes = [one.shape[2] // num_columns for one in (q, k, v)]
    by_column = torch.cat([one.unflatten(2, (num_columns, -1)) for one in (q, k, v)], 3)
    arrived = peers.exchange(by_column.permute(2, 0, 1, 3, 4))  # [U, B, S, heads, D]
    q, k, v = arrived.transpose(0, 1).flatten(1, 2).split(sizes, 2)
    own_sinks, own_largest = (
        None if one is None else one.unflatten(0, (num_columns, -1))[peers.column] for one in (sinks, largest)
    )
    mixed = ring_attention(q, k, v, plan, ring, how, own_sinks, own_largest, kernels)
    back = peers.exchange(mixed.unflatten(1, (num_columns, -1)).transpose(0, 1))
    return back.permute(1, 2, 0, 3, 4).flatten(2, 3)
