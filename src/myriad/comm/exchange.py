"""What a chunk's transfers look like to their caller, whatever carries them.

Legend: n ranks, P elements of a slice; slice ``i`` belongs to group rank ``i``.
"""

from abc import ABC, abstractmethod
from typing import Protocol

import torch

__all__ = ["Alone", "Delivery", "Exchange", "copy_unless_same"]


class Delivery(Protocol):
    """A chunk's transfer under way."""

    def wait(self) -> None:
        """Blocks until the result is there and this rank's memory is free again (on CUDA: makes the stream
        wait); raises what went wrong."""


class Exchange(ABC):
    """The transfers of one chunk."""

    @abstractmethod
    def gather(self, values: torch.Tensor, master: torch.Tensor, priority: int) -> Delivery:
        """``master [P]``, float32, of every rank into its slice of ``values [n * P]``. It may be that slice's
        own memory, unless parameters travel compressed. It stays as it is until the delivery's `wait`."""

    @abstractmethod
    def reduce_scatter(self, sums: torch.Tensor, into: torch.Tensor, priority: int, *, add: bool) -> Delivery:
        """The sum over ranks of this rank's slice of ``sums [n * P]`` into ``into [P]``, or added to it.
        ``into`` may be that slice's own memory; the rest of ``sums`` is scratch afterwards."""

    @abstractmethod
    def all_reduce(self, sums: torch.Tensor, priority: int) -> Delivery:
        """The sum over ranks, in place; the same bits on every rank."""

    @abstractmethod
    def restart(self) -> None:
        """Values were loaded: what earlier transfers lost counts no more. On every rank."""

    @abstractmethod
    def rescale_kept(self, ratio: float) -> None:
        """Multiply what earlier sums lost by ``ratio``: from now on gradients are so much larger. On every
        rank."""


class Alone(Exchange):
    """A group of one."""

    def gather(self, values: torch.Tensor, master: torch.Tensor, priority: int) -> Delivery:
        """Copies."""
        copy_unless_same(values, master)
        return _Done()

    def reduce_scatter(self, sums: torch.Tensor, into: torch.Tensor, priority: int, *, add: bool) -> Delivery:
        """Copies or adds."""
        into.add_(sums) if add else copy_unless_same(into, sums)
        return _Done()

    def all_reduce(self, sums: torch.Tensor, priority: int) -> Delivery:
        """Nothing to add."""
        return _Done()

    def restart(self) -> None:
        """Nothing was lost."""

    def rescale_kept(self, ratio: float) -> None:
        """Do nothing: a group of one loses nothing to compression."""


class _Done:
    def wait(self) -> None:
        pass


def copy_unless_same(into: torch.Tensor, source: torch.Tensor) -> None:
    """Copies, but not onto itself."""
    if into.data_ptr() != source.data_ptr():
        into.copy_(source)
