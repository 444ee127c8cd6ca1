"""A chunk's transfers as messages between pairs of ranks: on gloo. Exact, or encoded where that is asked for.

A resumed run starts without what earlier messages lost, and with an exact gather.
"""

import torch

from myriad.comm.cargo import Cargo, EncodedChanges, EncodedSums, Exact
from myriad.comm.codec import Codec
from myriad.comm.exchange import Delivery, Exchange, copy_unless_same
from myriad.comm.hierarchy import Level
from myriad.comm.pairwise import Post
from myriad.comm.trip import Trip

__all__ = ["ByPairs"]


class ByPairs(Exchange):
    """The transfers of one chunk."""

    def __init__(
        self,
        post: Post,
        levels: tuple[Level, ...],
        num_elements: int,
        cut_bytes: int,
        sums: Codec | None,
        changes: Codec | None,
    ) -> None:
        """``sums``, ``changes``: what encodes gradients and changes of parameters; ``None``: exact."""
        self._post, self._levels, self._cut_bytes = post, levels, cut_bytes
        self._sums, self._changes = sums, changes
        self._lost = torch.zeros(post.size, num_elements // post.size if sums else 0)
        self._has_values = False

    def gather(self, values: torch.Tensor, master: torch.Tensor, priority: int) -> Delivery:
        """Straight into place, or as changes after the first time."""
        if self._changes is not None and self._has_values:
            return self._trip(
                EncodedChanges(values, self._post.size, self._changes, master), priority
            ).gather()
        cargo, self._has_values = Exact(values, self._post.size), True
        own = cargo.slices[self._post.rank]
        assert self._changes is None or own.data_ptr() != master.data_ptr(), "changes need both"
        copy_unless_same(own, master)
        return self._trip(cargo, priority).gather()

    def reduce_scatter(self, sums: torch.Tensor, into: torch.Tensor, priority: int, *, add: bool) -> Delivery:
        """Added up in rank order by a thread of its own."""
        return self._trip(self._contributions(sums), priority).reduce_scatter(into, add=add)

    def all_reduce(self, sums: torch.Tensor, priority: int) -> Delivery:
        """Each cut's way back starts when its sum is there."""
        return self._trip(self._contributions(sums), priority).all_reduce()

    def restart(self) -> None:
        """Forgets."""
        self._lost.zero_()
        self._has_values = False

    def rescale_kept(self, ratio: float) -> None:
        """Exact for powers of two."""
        self._lost.mul_(ratio)

    def _contributions(self, sums: torch.Tensor) -> Cargo:
        if self._sums is None:
            return Exact(sums, self._post.size)
        return EncodedSums(sums, self._sums, self._lost)

    def _trip(self, cargo: Cargo, priority: int) -> Trip:
        return Trip(self._post, self._levels, cargo, self._cut_bytes, priority)
