"""Parameters out, gradients in: the transfers of data parallelism, chunk by chunk, behind the compute.

Every rank of the group calls the same methods, and waits for their results, in the same order. What travels
first is another matter: each chunk has a priority, the smallest first, and its slices travel in partitions,
so that an urgent chunk waits for one credit of bytes at most (BytePS, Jiang et al., OSDI 2020).

    gather           slice i of rank i to everybody, straight into place
    reduce-scatter   slice i of everybody to rank i, which adds them in rank order: the same bits every time
    all-reduce       both, each partition's way back as soon as its sum is there

On gloo these are messages between pairs of ranks (`myriad.comm.pairwise`), level by level
(`myriad.comm.hierarchy`). No deadlock: a rank that waits for a delivery waits for sends that come before the
same wait in every other rank's order, and all that can hold those back is sends of calls before that wait,
whose receives each rank posts before it comes to that wait.

Legend: n ranks, P elements of a slice.
"""

from abc import ABC, abstractmethod
from typing import Protocol

import torch

from myriad.comm.collectives import start_all_gather, start_all_reduce, start_reduce_scatter
from myriad.comm.config import CommConfig
from myriad.comm.groups import Group, Groups
from myriad.comm.hierarchy import Level, make_levels
from myriad.comm.pairwise import Post
from myriad.comm.trip import Trip
from myriad.program.config import OverlapConfig

__all__ = ["Courier", "Delivery", "Exchange"]


class Delivery(Protocol):
    """A chunk's transfer under way."""

    def wait(self) -> None:
        """Blocks until the result is there and this rank's memory is free again; raises what went wrong."""


class Exchange(ABC):
    """The transfers of one chunk."""

    @abstractmethod
    def gather(self, values: torch.Tensor, master: torch.Tensor, priority: int) -> Delivery:
        """``master [P]``, float32, of every rank into its slice of ``values [n * P]``. It may be that slice's
        own memory."""

    @abstractmethod
    def reduce_scatter(self, sums: torch.Tensor, into: torch.Tensor, priority: int, *, add: bool) -> Delivery:
        """The sum over ranks of this rank's slice of ``sums [n * P]`` into ``into [P]``, or added to it.
        ``into`` may be that slice's own memory; the rest of ``sums`` is scratch afterwards."""

    @abstractmethod
    def all_reduce(self, sums: torch.Tensor, priority: int) -> Delivery:
        """The sum over ranks, in place; the same bits on every rank."""


class Courier:
    """Makes the exchanges of one axis; `close` when the last delivery has been waited for."""

    def __init__(
        self, groups: Groups, axis: str, overlap: OverlapConfig, comm: CommConfig, device: torch.device
    ) -> None:
        self._group = groups.along(axis, purpose=f"{axis} courier")
        self._cut_bytes = overlap.partition
        self._post: Post | None = None
        if self._group is not None and device.type == "cpu":
            self._post = Post(self._group, overlap.credit)

    def exchange(self, num_elements: int, dtype: torch.dtype) -> Exchange:
        """For a chunk of ``num_elements``, a multiple of the group's size, with values of ``dtype``."""
        if self._group is None:
            return _Alone()
        assert num_elements % self._group.size() == 0, (num_elements, self._group.size())
        if self._post is None:
            return _ByCollectives(self._group)
        levels = make_levels(self._group.rank(), (self._group.size(),))
        return _Pairwise(self._post, levels, self._cut_bytes)

    def close(self) -> None:
        """Ends its threads."""
        if self._post is not None:
            self._post.close()


class _Done:
    def wait(self) -> None:
        pass


class _Alone(Exchange):
    """One rank."""

    def gather(self, values: torch.Tensor, master: torch.Tensor, priority: int) -> Delivery:
        _copy(master, values)
        return _Done()

    def reduce_scatter(self, sums: torch.Tensor, into: torch.Tensor, priority: int, *, add: bool) -> Delivery:
        into.add_(sums) if add else _copy(sums, into)
        return _Done()

    def all_reduce(self, sums: torch.Tensor, priority: int) -> Delivery:
        return _Done()


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)


class _ByCollectives(Exchange):
    """NCCL: its own collectives, one a chunk, in order of call. The priority is the caller's order of
    calls."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def gather(self, values: torch.Tensor, master: torch.Tensor, priority: int) -> Delivery:
        own = values.view(self._group.size(), -1)[self._group.rank()]
        _copy(master, own)
        return start_all_gather(values, own, self._group)

    def reduce_scatter(self, sums: torch.Tensor, into: torch.Tensor, priority: int, *, add: bool) -> Delivery:
        if not add:
            return start_reduce_scatter(into, sums, self._group)
        total = torch.empty_like(into)
        return _ThenAdd(start_reduce_scatter(total, sums, self._group), total, into)

    def all_reduce(self, sums: torch.Tensor, priority: int) -> Delivery:
        return start_all_reduce(sums, self._group)


class _ThenAdd:
    def __init__(self, started: Delivery, total: torch.Tensor, into: torch.Tensor) -> None:
        self._started, self._total, self._into = started, total, into

    def wait(self) -> None:
        self._started.wait()
        self._into.add_(self._total)


class _Pairwise(Exchange):
    """gloo: messages between pairs of ranks."""

    def __init__(self, post: Post, levels: tuple[Level, ...], cut_bytes: int) -> None:
        self._post, self._levels, self._cut_bytes = post, levels, cut_bytes

    def _trip(self, whole: torch.Tensor, priority: int) -> Trip:
        return Trip(self._post, self._levels, whole, self._cut_bytes, priority)

    def gather(self, values: torch.Tensor, master: torch.Tensor, priority: int) -> Delivery:
        return self._trip(values, priority).gather(master)

    def reduce_scatter(self, sums: torch.Tensor, into: torch.Tensor, priority: int, *, add: bool) -> Delivery:
        return self._trip(sums, priority).reduce_scatter(into, add=add)

    def all_reduce(self, sums: torch.Tensor, priority: int) -> Delivery:
        return self._trip(sums, priority).all_reduce()
