"""One chunk's way through the levels of a hierarchy, as messages between pairs of ranks.

Every receive is posted when the trip starts. Each slice travels in partitions, and each partition goes on to
the next level as soon as it has arrived (and, in a reduction, has been added up) without the main thread.

In an all-reduce the receives of the way back are posted at the start too, in place: what they overwrite was
sent long before, or the sum that arrives could not contain it.

Legend: n ranks, P elements of a slice.
"""

from itertools import pairwise

import torch
import torch.distributed as dist

from myriad.comm.exchange import Delivery, Exchange, copy_unless_same
from myriad.comm.hierarchy import Level
from myriad.comm.pairwise import Errand, Post

__all__ = ["PairwiseExchange", "Trip"]

_Arrival = tuple[dist.Work, torch.Tensor]


class Trip:
    """The transfers of one chunk, once."""

    def __init__(
        self, post: Post, levels: tuple[Level, ...], whole: torch.Tensor, cut_bytes: int, priority: int
    ) -> None:
        """``whole [n * P]`` travels in messages of at most ``cut_bytes``."""
        self._post, self._levels, self._priority = post, levels, priority
        self.slices = whole.view(post.size, -1)
        part = self.slices.shape[1]
        bounds = [*range(0, part, max(1, cut_bytes // whole.element_size())), part]
        self._cuts = [slice(a, b) for a, b in pairwise(bounds)]
        self._first_tag = post.reserve(2 * post.size * len(self._cuts))
        self._errand = Errand()
        self._gathered: dict[tuple[int, int], dist.Work] = {}
        """Receives of a gather under way, by slice and cut."""
        self._expected: dict[tuple[int, int, int], dict[int, _Arrival]] = {}
        """Receives of a reduction under way, by depth of the level, slice and cut: from each other member."""

    def gather(self, own: torch.Tensor) -> "Trip":
        """Starts the way of every rank's slice to everybody; ``own`` is this rank's."""
        copy_unless_same(self.slices[self._post.rank], own)
        self._expect_gathered()
        for index in range(len(self._cuts)):
            self._spread(self._post.rank, index, len(self._levels))
        if len(self._levels) > 1:
            self._post.start(self._forward, self._errand)
        self._errand.settle()
        return self

    def reduce_scatter(self, into: torch.Tensor, *, add: bool) -> "Trip":
        """Starts the sum of this rank's slice over ranks."""
        self._start_reduction()
        self._post.start(lambda: self._reduce(into, add=add, spread=False), self._errand)
        self._errand.settle()
        return self

    def all_reduce(self) -> "Trip":
        """Starts the sum of all slices over ranks, for everybody."""
        self._expect_gathered()
        self._start_reduction()

        def job() -> None:
            self._reduce(self.slices[self._post.rank], add=False, spread=True)
            self._forward()

        self._post.start(job, self._errand)
        self._errand.settle()
        return self

    def wait(self) -> None:
        """Blocks until everything has arrived here and all sends from this memory are done."""
        self._errand.wait()
        while self._gathered:
            self._gathered.popitem()[1].wait()

    def _tag(self, slice_: int, index: int, *, back: bool) -> int:
        row = slice_ + self._post.size * int(back)
        return self._first_tag + row * len(self._cuts) + index

    def _send(self, peer: int, slice_: int, index: int, *, back: bool) -> None:
        data, tag = self.slices[slice_, self._cuts[index]], self._tag(slice_, index, back=back)
        self._post.send(data, peer, tag, self._errand, (self._priority, self._first_tag))

    # gather

    def _expect_gathered(self) -> None:
        for index, cut in enumerate(self._cuts):
            for level in self._levels:
                for place in level.others:
                    for slice_ in level.slices[place]:
                        tag = self._tag(slice_, index, back=True)
                        work = self._post.receive(self.slices[slice_, cut], level.members[place], tag)
                        self._gathered[slice_, index] = work

    def _spread(self, slice_: int, index: int, num_levels: int) -> None:
        """Sends a cut of a slice to the others of the innermost levels."""
        for level in reversed(self._levels[:num_levels]):
            for place in level.others:
                self._send(level.members[place], slice_, index, back=True)

    def _forward(self) -> None:
        """What arrives from outer levels goes on to the inner ones."""
        for num_inner in range(len(self._levels) - 1, 0, -1):
            level = self._levels[num_inner]
            for index in range(len(self._cuts)):
                for place in level.others:
                    for slice_ in level.slices[place]:
                        self._gathered.pop((slice_, index)).wait()
                        self._spread(slice_, index, num_inner)

    # reduction

    def _start_reduction(self) -> None:
        for index in range(len(self._cuts)):
            for depth, level in enumerate(self._levels):
                for slice_ in level.slices[level.own]:
                    self._expect_parts(depth, slice_, index)
        for index in range(len(self._cuts)):
            self._send_parts(self._levels[0], index)

    def _expect_parts(self, depth: int, slice_: int, index: int) -> None:
        level, tag = self._levels[depth], self._tag(slice_, index, back=False)
        arrivals: dict[int, _Arrival] = {}
        for place in level.others:
            part = torch.empty_like(self.slices[slice_, self._cuts[index]])
            arrivals[place] = (self._post.receive(part, level.members[place], tag), part)
        self._expected[depth, slice_, index] = arrivals

    def _send_parts(self, level: Level, index: int) -> None:
        for place in level.others:
            for slice_ in level.slices[place]:
                self._send(level.members[place], slice_, index, back=False)

    def _reduce(self, into: torch.Tensor, *, add: bool, spread: bool) -> None:
        for depth, (inner, outer) in enumerate(pairwise(self._levels)):
            for index, cut in enumerate(self._cuts):
                for slice_ in inner.slices[inner.own]:
                    self._add_up(depth, slice_, index, self.slices[slice_, cut], add=False)
                self._send_parts(outer, index)
        rank, last = self._post.rank, len(self._levels) - 1
        for index, cut in enumerate(self._cuts):
            self._add_up(last, rank, index, into[cut], add=add)
            if spread:
                self._spread(rank, index, len(self._levels))

    def _add_up(self, depth: int, slice_: int, index: int, into: torch.Tensor, *, add: bool) -> None:
        """Sums the members' parts of a cut, in their order, as they arrive."""
        level, arrivals = self._levels[depth], self._expected.pop((depth, slice_, index))
        parts = []
        for place in range(len(level.members)):
            if place == level.own:
                parts.append(self.slices[slice_, self._cuts[index]])
            else:
                work, part = arrivals[place]
                work.wait()
                parts.append(part)
        total = parts[0]
        for part in parts[1:-1]:
            total.add_(part)
        if add:
            into.add_(total.add_(parts[-1]))
        else:
            torch.add(total, parts[-1], out=into)


class PairwiseExchange(Exchange):
    """The transfers of one chunk on gloo."""

    def __init__(self, post: Post, levels: tuple[Level, ...], cut_bytes: int) -> None:
        self._post, self._levels, self._cut_bytes = post, levels, cut_bytes

    def _trip(self, whole: torch.Tensor, priority: int) -> Trip:
        return Trip(self._post, self._levels, whole, self._cut_bytes, priority)

    def gather(self, values: torch.Tensor, master: torch.Tensor, priority: int) -> Delivery:
        """Straight into place."""
        return self._trip(values, priority).gather(master)

    def reduce_scatter(self, sums: torch.Tensor, into: torch.Tensor, priority: int, *, add: bool) -> Delivery:
        """Added up in rank order by a thread of its own."""
        return self._trip(sums, priority).reduce_scatter(into, add=add)

    def all_reduce(self, sums: torch.Tensor, priority: int) -> Delivery:
        """Each partition's way back starts when its sum is there."""
        return self._trip(sums, priority).all_reduce()
