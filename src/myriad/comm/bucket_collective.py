"""The interface of a chunk's collectives, independent of the transport.

Legend: n ranks, P elements of a slice; slice ``i`` belongs to group rank ``i``.
"""

from abc import ABC, abstractmethod
from typing import Protocol

import torch

__all__ = ["BucketCollective", "PendingCollective", "SingleRankCollective", "copy_unless_same"]


class PendingCollective(Protocol):
    """A collective of a chunk in flight."""

    def wait(self) -> None:
        """Block until the result is there and this rank's memory is free again (on CUDA: make the stream
        wait).

        Raises the error of a failed transfer.
        """


class BucketCollective(ABC):
    """The collectives of one chunk."""

    @property
    @abstractmethod
    def keeps_other_slices(self) -> bool:
        """Whether `reduce_scatter` leaves other ranks' slices of this rank's buffer as they were."""

    @abstractmethod
    def gather(self, values: torch.Tensor, master: torch.Tensor, priority: int) -> PendingCollective:
        """Gather ``master [P]``, float32, of every rank into its slice of ``values [n * P]``.

        ``master`` may be that slice's own memory, unless parameters are compressed. It must not change until
        the delivery's `wait`.
        """

    @abstractmethod
    def reduce_scatter(
        self, sums: torch.Tensor, into: torch.Tensor, priority: int, *, add: bool
    ) -> PendingCollective:
        """Sum this rank's slice of ``sums [n * P]`` over ranks, and store it in ``into [P]`` or add it there.

        ``into`` may be that slice's own memory. This slice of ``sums`` is scratch afterwards, and so is the
        rest unless `keeps_other_slices`.
        """

    @abstractmethod
    def all_reduce(
        self, sums: torch.Tensor, priority: int, *, after: PendingCollective | None = None
    ) -> PendingCollective:
        """Sum over ranks in place, with the same bits on every rank. ``after``: a collective in flight that
        writes ``sums``; the sum starts when it has ended."""

    @abstractmethod
    def restart(self) -> None:
        """Discard the kept compression errors, because values were loaded. Every rank calls it."""

    @abstractmethod
    def rescale_kept(self, ratio: float) -> None:
        """Multiply the kept compression errors by ``ratio``, the factor by which gradients grow from now on.

        Every rank calls it.
        """


class SingleRankCollective(BucketCollective):
    """The collectives of a group of one rank."""

    @property
    def keeps_other_slices(self) -> bool:
        """True: a group of one has no other slices."""
        return True

    def gather(self, values: torch.Tensor, master: torch.Tensor, priority: int) -> PendingCollective:
        """Copy ``master`` into ``values``."""
        copy_unless_same(values, master)
        return _Done()

    def reduce_scatter(
        self, sums: torch.Tensor, into: torch.Tensor, priority: int, *, add: bool
    ) -> PendingCollective:
        """Copy ``sums`` into ``into``, or add them."""
        into.add_(sums) if add else copy_unless_same(into, sums)
        return _Done()

    def all_reduce(
        self, sums: torch.Tensor, priority: int, *, after: PendingCollective | None = None
    ) -> PendingCollective:
        """Do nothing: the sum over one rank is the value."""
        return _Done()

    def restart(self) -> None:
        """Do nothing: a group of one has no compression errors."""

    def rescale_kept(self, ratio: float) -> None:
        """Do nothing: a group of one has no compression errors."""


class _Done:
    def wait(self) -> None:
        pass


def copy_unless_same(into: torch.Tensor, source: torch.Tensor) -> None:
    """Copy, unless both tensors are the same memory."""
    if into.data_ptr() != source.data_ptr():
        into.copy_(source)
