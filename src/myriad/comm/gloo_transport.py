"""The gloo transport: collectives of a chunk as messages between pairs of ranks, exact or encoded.

A resumed run starts without the encoding errors of earlier messages, and with an exact gather.

A `HierarchicalTransfer` is one collective of a chunk through the levels of a hierarchy. It posts every
receive when it starts. Each slice is sent in cuts. Each cut continues to the next level as soon as it has
arrived (and, in a reduction, has been summed), without the main thread.

In an all-reduce the receives of the gather are posted at the start too, in place. This is safe: the memory
that they overwrite was sent long before, or the arriving sum could not contain it.

Legend: n ranks, P elements of a slice.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.distributed as dist

from myriad.comm.bucket_collective import BucketCollective, PendingCollective, copy_unless_same
from myriad.comm.hierarchy import Level
from myriad.comm.payload_codec import Codec, EncodedGradients, EncodedUpdates, ExactPayload, PayloadCodec
from myriad.comm.send_queue import PendingOp, SendQueue

__all__ = ["GlooCollective"]

_Arrival = tuple[dist.Work, torch.Tensor]


class HierarchicalTransfer:
    """One hierarchical transfer of a chunk; an object is used once."""

    def __init__(
        self,
        queue: SendQueue,
        levels: tuple[Level, ...],
        payload: PayloadCodec,
        cut_bytes: int,
        priority: int,
    ) -> None:
        """Messages carry at most ``cut_bytes`` of the payload's slices."""
        self._queue, self._levels, self._payload, self._priority = queue, levels, payload, priority
        part = payload.slices.shape[1]
        bounds = [*range(0, part, max(1, cut_bytes // payload.slices.element_size())), part]
        self._cuts = [slice(a, b) for a, b in pairwise(bounds)]
        self._first_tag = queue.reserve(2 * queue.size * len(self._cuts))
        self._pending = PendingOp()
        self._gathered: dict[tuple[int, int], _Arrival] = {}
        """Receives of a gather in flight, by slice and cut."""
        self._expected: dict[tuple[int, int, int], dict[int, _Arrival]] = {}
        """Receives of a reduction in flight, by depth of the level, slice and cut; one from each other
        member."""

    def gather(self) -> "HierarchicalTransfer":
        """Start to send every rank's slice to all ranks."""
        self._expect_gathered()
        if self._payload.is_exact:
            self._spread_own()
            return self._start(self._forward if len(self._levels) > 1 else None)
        return self._start(self._spread_own, self._forward)

    def reduce_scatter(self, into: torch.Tensor, *, add: bool) -> "HierarchicalTransfer":
        """Start to sum this rank's slice over ranks."""
        return self._start(*self._start_reduction(), lambda: self._reduce(into, add=add, spread=False))

    def all_reduce(self, after: PendingCollective | None) -> "HierarchicalTransfer":
        """Start to sum all slices over ranks, with the result on all ranks. Sends begin ``after`` another
        collective."""
        self._expect_gathered()
        own = self._payload.slices[self._queue.rank]
        return self._start(
            *self._start_reduction(after),
            lambda: self._reduce(own, add=False, spread=True),
            self._forward,
        )

    def _start(self, *jobs: Callable[[], None] | None) -> "HierarchicalTransfer":
        """Run the jobs one after the other on a thread; the main thread has posted everything else."""
        todo = [job for job in jobs if job is not None]

        def do_all() -> None:
            for job in todo:
                job()

        if todo:
            self._queue.start(do_all, self._pending)
        self._pending.complete_part()
        return self

    def wait(self) -> None:
        """Block until everything has arrived here and all sends from this memory are done."""
        self._pending.wait()
        while self._gathered:
            self._gathered.popitem()[1][0].wait()

    def _tag(self, slice_: int, index: int, *, back: bool) -> int:
        row = slice_ + self._queue.size * int(back)
        return self._first_tag + row * len(self._cuts) + index

    def _send(self, data: torch.Tensor, peer: int, slice_: int, index: int, *, back: bool) -> None:
        tag = self._tag(slice_, index, back=back)
        self._queue.send(data, peer, tag, self._pending, (self._priority, self._first_tag))

    # gather

    def _expect_gathered(self) -> None:
        for index, cut in enumerate(self._cuts):
            for level in self._levels:
                for place in level.others:
                    for slice_ in level.slices[place]:
                        buffer = self._payload.whole_buffer(slice_, cut)
                        tag = self._tag(slice_, index, back=True)
                        work = self._queue.receive(buffer, level.members[place], tag)
                        self._gathered[slice_, index] = (work, buffer)

    def _spread_own(self) -> None:
        for index in range(len(self._cuts)):
            self._spread_own_cut(index)

    def _spread_own_cut(self, index: int) -> None:
        data = self._payload.whole(self._queue.rank, self._cuts[index])
        self._spread(data, self._queue.rank, index, len(self._levels))

    def _spread(self, data: torch.Tensor, slice_: int, index: int, num_levels: int) -> None:
        """Send a cut of a slice to the other members of the innermost levels."""
        for level in reversed(self._levels[:num_levels]):
            for place in level.others:
                self._send(data, level.members[place], slice_, index, back=True)

    def _forward(self) -> None:
        """Forward cuts from outer levels to the inner ones.

        Cuts that are not forwarded and need no decoding are left to `wait`.
        """
        for num_inner in reversed(range(len(self._levels))):
            if num_inner == 0 and self._payload.is_exact:
                return
            level = self._levels[num_inner]
            for index, cut in enumerate(self._cuts):
                for place in level.others:
                    for slice_ in level.slices[place]:
                        work, data = self._gathered.pop((slice_, index))
                        work.wait()
                        self._spread(data, slice_, index, num_inner)
                        self._payload.store_whole(slice_, cut, data)

    # reduction

    def _start_reduction(self, after: PendingCollective | None = None) -> list[Callable[[], None]]:
        """Post the receives and the sends of the first level. If encoding takes time, or the sends come
        ``after`` another collective, return them as jobs instead."""
        for index in range(len(self._cuts)):
            for depth, level in enumerate(self._levels):
                for slice_ in level.slices[level.own]:
                    self._expect_parts(depth, slice_, index)
        if after is not None:
            return [after.wait, self._send_first_parts]
        if not self._payload.is_exact:
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
            buffer = self._payload.part_buffer(slice_, self._cuts[index])
            arrivals[place] = (self._queue.receive(buffer, level.members[place], tag), buffer)
        self._expected[depth, slice_, index] = arrivals

    def _send_parts(self, level: Level, index: int) -> None:
        for place in level.others:
            for slice_ in level.slices[place]:
                data = self._payload.part(slice_, self._cuts[index])
                self._send(data, level.members[place], slice_, index, back=False)

    def _reduce(self, into: torch.Tensor, *, add: bool, spread: bool) -> None:
        for depth, (inner, outer) in enumerate(pairwise(self._levels)):
            for index, cut in enumerate(self._cuts):
                for slice_ in inner.slices[inner.own]:
                    self._add_up(depth, slice_, index, self._payload.slices[slice_, cut], add=False)
                self._send_parts(outer, index)
        rank, last = self._queue.rank, len(self._levels) - 1
        for index, cut in enumerate(self._cuts):
            self._add_up(last, rank, index, into[cut], add=add)
            if spread:
                self._spread_own_cut(index)

    def _add_up(self, depth: int, slice_: int, index: int, into: torch.Tensor, *, add: bool) -> None:
        """Sum the members' parts of a cut in member order, as they arrive."""
        level, arrivals = self._levels[depth], self._expected.pop((depth, slice_, index))
        cut = self._cuts[index]
        parts = []
        for place in range(len(level.members)):
            if place == level.own:
                parts.append(self._payload.slices[slice_, cut])
            else:
                work, buffer = arrivals[place]
                work.wait()
                parts.append(self._payload.decode_part(buffer, cut))
        total = parts[0]
        for part in parts[1:-1]:
            total.add_(part)
        if add:
            into.add_(total.add_(parts[-1]))
        else:
            torch.add(total, parts[-1], out=into)


class GlooCollective(BucketCollective):
    """The collectives of one chunk on gloo."""

    def __init__(
        self,
        queue: SendQueue,
        levels: tuple[Level, ...],
        num_elements: int,
        cut_bytes: int,
        sums: Codec | None,
        changes: Codec | None,
    ) -> None:
        """``sums`` and ``changes`` encode gradients and parameter changes; ``None`` means exact."""
        self._queue, self._levels, self._cut_bytes = queue, levels, cut_bytes
        self._gradient_codec, self._update_codec = sums, changes
        self._errors = torch.zeros(queue.size, num_elements // queue.size if sums else 0)
        self._has_values = False

    @property
    def keeps_other_slices(self) -> bool:
        """Whether there is one level only: inner levels of a hierarchy leave their partial sums in other
        slices."""
        return len(self._levels) == 1

    def gather(self, values: torch.Tensor, master: torch.Tensor, priority: int) -> PendingCollective:
        """Gather straight into place; with compression, send changes after the first time."""
        if self._update_codec is not None and self._has_values:
            return self._transfer(
                EncodedUpdates(values, self._queue.size, self._update_codec, master), priority
            ).gather()
        payload, self._has_values = ExactPayload(values, self._queue.size), True
        own = payload.slices[self._queue.rank]
        assert self._update_codec is None or own.data_ptr() != master.data_ptr(), "changes need both"
        copy_unless_same(own, master)
        return self._transfer(payload, priority).gather()

    def reduce_scatter(
        self, sums: torch.Tensor, into: torch.Tensor, priority: int, *, add: bool
    ) -> PendingCollective:
        """Sum in rank order on a separate thread."""
        return self._transfer(self._contributions(sums), priority).reduce_scatter(into, add=add)

    def all_reduce(
        self, sums: torch.Tensor, priority: int, *, after: PendingCollective | None = None
    ) -> PendingCollective:
        """Sum over ranks; each cut's gather starts when its sum is there."""
        return self._transfer(self._contributions(sums), priority).all_reduce(after)

    def restart(self) -> None:
        """Discard the encoding errors, and make the next gather exact."""
        self._errors.zero_()
        self._has_values = False

    def rescale_kept(self, ratio: float) -> None:
        """Scale the encoding errors; this is exact for powers of two."""
        self._errors.mul_(ratio)

    def _contributions(self, sums: torch.Tensor) -> PayloadCodec:
        if self._gradient_codec is None:
            return ExactPayload(sums, self._queue.size)
        return EncodedGradients(sums, self._gradient_codec, self._errors)

    def _transfer(self, payload: PayloadCodec, priority: int) -> HierarchicalTransfer:
        return HierarchicalTransfer(self._queue, self._levels, payload, self._cut_bytes, priority)
