"""One chunk's way through the levels of a hierarchy, as messages between pairs of ranks.

Every receive is posted when the trip starts. Each slice travels in cuts, and each cut goes on to the next
level as soon as it has arrived (and, in a reduction, has been added up) without the main thread.

In an all-reduce the receives of the way back are posted at the start too, in place: what they overwrite was
sent long before, or the sum that arrives could not contain it.

Legend: n ranks, P elements of a slice.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.distributed as dist

from myriad.comm.cargo import Cargo
from myriad.comm.hierarchy import Level
from myriad.comm.pairwise import Errand, Post

__all__ = ["Trip"]

_Arrival = tuple[dist.Work, torch.Tensor]


class Trip:
    """The transfers of one chunk, once."""

    def __init__(
        self, post: Post, levels: tuple[Level, ...], cargo: Cargo, cut_bytes: int, priority: int
    ) -> None:
        """Messages carry at most ``cut_bytes`` of the cargo's slices."""
        self._post, self._levels, self._cargo, self._priority = post, levels, cargo, priority
        part = cargo.slices.shape[1]
        bounds = [*range(0, part, max(1, cut_bytes // cargo.slices.element_size())), part]
        self._cuts = [slice(a, b) for a, b in pairwise(bounds)]
        self._first_tag = post.reserve(2 * post.size * len(self._cuts))
        self._errand = Errand()
        self._gathered: dict[tuple[int, int], _Arrival] = {}
        """Receives of a gather under way, by slice and cut."""
        self._expected: dict[tuple[int, int, int], dict[int, _Arrival]] = {}
        """Receives of a reduction under way, by depth of the level, slice and cut: from each other member."""

    def gather(self) -> "Trip":
        """Starts the way of every rank's slice to everybody."""
        self._expect_gathered()
        if self._cargo.is_exact:
            self._spread_own()
            return self._go(self._forward if len(self._levels) > 1 else None)
        return self._go(self._spread_own, self._forward)

    def reduce_scatter(self, into: torch.Tensor, *, add: bool) -> "Trip":
        """Starts the sum of this rank's slice over ranks."""
        return self._go(*self._start_reduction(), lambda: self._reduce(into, add=add, spread=False))

    def all_reduce(self) -> "Trip":
        """Starts the sum of all slices over ranks, for everybody."""
        self._expect_gathered()
        own = self._cargo.slices[self._post.rank]
        return self._go(
            *self._start_reduction(), lambda: self._reduce(own, add=False, spread=True), self._forward
        )

    def _go(self, *jobs: Callable[[], None] | None) -> "Trip":
        """Everything is posted that the main thread posts; the jobs follow each other on a thread."""
        todo = [job for job in jobs if job is not None]

        def do_all() -> None:
            for job in todo:
                job()

        if todo:
            self._post.start(do_all, self._errand)
        self._errand.settle()
        return self

    def wait(self) -> None:
        """Blocks until everything has arrived here and all sends from this memory are done."""
        self._errand.wait()
        while self._gathered:
            self._gathered.popitem()[1][0].wait()

    def _tag(self, slice_: int, index: int, *, back: bool) -> int:
        row = slice_ + self._post.size * int(back)
        return self._first_tag + row * len(self._cuts) + index

    def _send(self, data: torch.Tensor, peer: int, slice_: int, index: int, *, back: bool) -> None:
        tag = self._tag(slice_, index, back=back)
        self._post.send(data, peer, tag, self._errand, (self._priority, self._first_tag))

    # gather

    def _expect_gathered(self) -> None:
        for index, cut in enumerate(self._cuts):
            for level in self._levels:
                for place in level.others:
                    for slice_ in level.slices[place]:
                        room = self._cargo.room_for_whole(slice_, cut)
                        tag = self._tag(slice_, index, back=True)
                        work = self._post.receive(room, level.members[place], tag)
                        self._gathered[slice_, index] = (work, room)

    def _spread_own(self) -> None:
        for index in range(len(self._cuts)):
            self._spread_own_cut(index)

    def _spread_own_cut(self, index: int) -> None:
        data = self._cargo.whole(self._post.rank, self._cuts[index])
        self._spread(data, self._post.rank, index, len(self._levels))

    def _spread(self, data: torch.Tensor, slice_: int, index: int, num_levels: int) -> None:
        """Sends a cut of a slice to the others of the innermost levels."""
        for level in reversed(self._levels[:num_levels]):
            for place in level.others:
                self._send(data, level.members[place], slice_, index, back=True)

    def _forward(self) -> None:
        """What arrives from outer levels goes on to the inner ones. What goes nowhere from here, and needs no
        decoding, is left to `wait`."""
        for num_inner in reversed(range(len(self._levels))):
            if num_inner == 0 and self._cargo.is_exact:
                return
            level = self._levels[num_inner]
            for index, cut in enumerate(self._cuts):
                for place in level.others:
                    for slice_ in level.slices[place]:
                        work, data = self._gathered.pop((slice_, index))
                        work.wait()
                        self._spread(data, slice_, index, num_inner)
                        self._cargo.put(slice_, cut, data)

    # reduction

    def _start_reduction(self) -> list[Callable[[], None]]:
        """Posts the receives, and the sends too or gives them as a job, where it takes time to encode."""
        for index in range(len(self._cuts)):
            for depth, level in enumerate(self._levels):
                for slice_ in level.slices[level.own]:
                    self._expect_parts(depth, slice_, index)
        if not self._cargo.is_exact:
            return [self._send_first_parts]
        self._send_first_parts()
        return []

    def _send_first_parts(self) -> None:
        for index in range(len(self._cuts)):
            self._send_parts(self._levels[0], index)

    def _expect_parts(self, depth: int, slice_: int, index: int) -> None:
        level, tag = self._levels[depth], self._tag(slice_, index, back=False)
        arrivals: dict[int, _Arrival] = {}
        for place in level.others:
            room = self._cargo.room_for_part(slice_, self._cuts[index])
            arrivals[place] = (self._post.receive(room, level.members[place], tag), room)
        self._expected[depth, slice_, index] = arrivals

    def _send_parts(self, level: Level, index: int) -> None:
        for place in level.others:
            for slice_ in level.slices[place]:
                data = self._cargo.part(slice_, self._cuts[index])
                self._send(data, level.members[place], slice_, index, back=False)

    def _reduce(self, into: torch.Tensor, *, add: bool, spread: bool) -> None:
        for depth, (inner, outer) in enumerate(pairwise(self._levels)):
            for index, cut in enumerate(self._cuts):
                for slice_ in inner.slices[inner.own]:
                    self._add_up(depth, slice_, index, self._cargo.slices[slice_, cut], add=False)
                self._send_parts(outer, index)
        rank, last = self._post.rank, len(self._levels) - 1
        for index, cut in enumerate(self._cuts):
            self._add_up(last, rank, index, into[cut], add=add)
            if spread:
                self._spread_own_cut(index)

    def _add_up(self, depth: int, slice_: int, index: int, into: torch.Tensor, *, add: bool) -> None:
        """Sums the members' parts of a cut, in their order, as they arrive."""
        level, arrivals = self._levels[depth], self._expected.pop((depth, slice_, index))
        cut = self._cuts[index]
        parts = []
        for place in range(len(level.members)):
            if place == level.own:
                parts.append(self._cargo.slices[slice_, cut])
            else:
                work, room = arrivals[place]
                work.wait()
                parts.append(self._cargo.read_part(room, cut))
        total = parts[0]
        for part in parts[1:-1]:
            total.add_(part)
        if add:
            into.add_(total.add_(parts[-1]))
        else:
            torch.add(total, parts[-1], out=into)
