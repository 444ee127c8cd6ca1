"""Asynchronous, hierarchical and prioritised collectives for your own program.

    from myriad import comm

    with comm.connect() as world:                       # RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
        last = world.all_reduce(gradient_of_last_layer, priority=1)
        first = world.all_reduce(gradient_of_first_layer, priority=0)       # overtakes what still waits
        first.wait()
        last.wait()

This is a small stable interface to the transports of a run's data parallelism. Every rank calls the same
collectives with tensors of the same size and type, in the same order, and waits for them in the same order. A
call returns at once; until `Transfer.wait` the tensors belong to it. Tensors are contiguous.

    priority     the smallest first: messages of ``message_bytes`` that are not yet on the wire are overtaken
    hierarchy    sums and copies go inside a node first, then between nodes, then between switches, so each
                 byte crosses a slow link once for each node
    result       sums are added in one order: the same bits on every rank, every time, on CPUs

On CPUs messages use gloo. On GPUs collectives use NCCL, on a separate stream, in the order of the calls.
Legend: n ranks, P elements of a slice.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist

from myriad.comm.bucket_collective import PendingCollective
from myriad.comm.comm_scheduler import CommScheduler
from myriad.comm.config import CommConfig
from myriad.comm.groups import Groups, close_world, open_world
from myriad.comm.hierarchy import Level, make_levels
from myriad.comm.hierarchy_choice import agree_on_hierarchy
from myriad.comm.layout import Layout
from myriad.comm.send_queue import PendingOp, SendQueue
from myriad.errors import BadInputError
from myriad.program.config import OverlapConfig

__all__ = ["Communicator", "Transfer", "connect"]

_MESSAGE_BYTES, _IN_FLIGHT_BYTES = 4 * 2**20, 16 * 2**20


class Transfer:
    """A collective in flight."""

    def __init__(self, delivery: PendingCollective | None, then: Callable[[], object] | None = None) -> None:
        self._delivery, self._then = delivery, then

    def wait(self) -> None:
        """Block until the result is there and the tensors are free (on CUDA: make the stream wait).

        Raises the error of a failed transfer: a lost connection or a timeout.
        """
        delivery, then = self._delivery, self._then
        self._delivery = self._then = None
        if delivery is not None:
            delivery.wait()
        if then is not None:
            then()


class Communicator:
    """The collectives of one world of ranks; `connect` creates it."""

    def __init__(
        self,
        groups: Groups,
        device: torch.device,
        config: CommConfig,
        message_bytes: int,
        in_flight_bytes: int,
    ) -> None:
        overlap = OverlapConfig(message_bytes=message_bytes, max_in_flight_bytes=in_flight_bytes)
        self._cut_bytes, self._device = message_bytes, device
        self._scheduler = CommScheduler(groups, "dp", overlap, config, device)
        self._group = groups.along("dp")
        self._levels: tuple[Level, ...] = ()
        self._queue: SendQueue | None = None
        if self._group is not None:
            chosen = config.model_copy(update={"hierarchy": self._scheduler.hierarchy})
            _, radices = agree_on_hierarchy(groups, "dp", chosen, device)
            self._levels = make_levels(self._group.rank(), radices)
            if dist.get_backend(self._group) == "gloo":  # the messages of a queue need their own tags
                messages = groups.along("dp", purpose="communicator")
                assert messages is not None, "the ranks of the group"
                self._queue = SendQueue(messages, in_flight_bytes)

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""
        return 0 if self._group is None else self._group.rank()

    @property
    def size(self) -> int:
        """Number of ranks, n."""
        return 1 if self._group is None else self._group.size()

    @property
    def hierarchy(self) -> str:
        """The levels that were chosen: flat, node or switch."""
        return self._scheduler.hierarchy

    @property
    def bytes_sent(self) -> Counter[int]:
        """Bytes sent so far, by receiving rank; empty on NCCL, which does not report them."""
        own = self._queue.bytes_sent if self._queue is not None else Counter[int]()
        return self._scheduler.bytes_sent + own

    def all_reduce(self, x: torch.Tensor, priority: int = 0) -> Transfer:
        """Sum ``x``, of any shape and size, over the ranks, in place. Raises `BadInputError`."""
        flat = _flat(x, "x")
        whole, then = flat, None
        if flat.numel() % self.size:
            whole = flat.new_zeros(-(-flat.numel() // self.size) * self.size)
            whole[: flat.numel()] = flat
            then = partial(_copy, flat, whole)
        exchange = self._scheduler.bucket_collective(whole.numel(), whole.dtype)
        return Transfer(exchange.all_reduce(whole, priority), then)

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, priority: int = 0) -> Transfer:
        """Sum ``x [n * P]`` over the ranks, and store slice ``rank`` in ``out [P]``, of float32 or ``x``'s
        type.

        The rest of ``x`` is scratch afterwards. Raises `BadInputError`.
        """
        flat, into = _flat(x, "x"), _flat(out, "out")
        _check_slices(into, flat, self.size)
        _need_type("out", into, {flat.dtype, torch.float32} if flat.is_floating_point() else {flat.dtype})
        exchange = self._scheduler.bucket_collective(flat.numel(), flat.dtype)
        return Transfer(exchange.reduce_scatter(flat, into, priority, add=False))

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, priority: int = 0) -> Transfer:
        """Gather every rank's ``x [P]`` into ``out [n * P]``, in rank order. Raises `BadInputError`."""
        flat, whole = _flat(x, "x"), _flat(out, "out")
        _check_slices(flat, whole, self.size)
        _need_type("out", whole, {flat.dtype})
        exchange = self._scheduler.bucket_collective(whole.numel(), whole.dtype)
        return Transfer(exchange.gather(whole, flat, priority))

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor, priority: int = 0) -> Transfer:
        """Send slice ``i`` of ``x [n * P]`` to rank ``i``, and store rank ``i``'s slice for this rank in
        slice ``i`` of ``out``.

        Slices go directly between each pair of ranks. Raises `BadInputError`.
        """
        source, into = _flat(x, "x"), _flat(out, "out")
        if source.numel() != into.numel() or source.numel() % self.size or source.dtype != into.dtype:
            allowed = f"as many elements as x, {source.numel()}, of its type, a multiple of {self.size} ranks"
            raise BadInputError("out", f"{tuple(out.shape)}, {out.dtype}", allowed)
        if self._group is None:
            into.copy_(source)
            return Transfer(None)
        if self._queue is None:
            work = dist.all_to_all_single(into, source, group=self._group, async_op=True)
            return Transfer(work)
        mine, theirs = source.view(self.size, -1), into.view(self.size, -1)
        theirs[self.rank].copy_(mine[self.rank])
        transfer = _Messages(self._queue, self._cut_bytes, priority, self.size)
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        for other in others:
            transfer.receive(theirs[other], other, slice_=other)
        for other in others:
            transfer.send(mine[other], other, slice_=self.rank)
        return Transfer(transfer.all_posted())

    def broadcast(self, x: torch.Tensor, root: int = 0, priority: int = 0) -> Transfer:
        """Copy ``x`` of rank ``root`` to every rank, in place, level by level of the hierarchy. Raises
        `BadInputError`."""
        flat = _flat(x, "x")
        if not 0 <= root < self.size:
            raise BadInputError("root", root, f"a rank from 0 to {self.size - 1}")
        if self._group is None:
            return Transfer(None)
        if self._queue is None:
            return Transfer(dist.broadcast(flat, group=self._group, group_src=root, async_op=True))
        transfer = _Messages(self._queue, self._cut_bytes, priority, 1)
        depth, source = self._broadcast_route(root)
        if source is not None:
            transfer.receive(flat, source, slice_=0)
        targets = [level.members[place] for level in reversed(self._levels[:depth]) for place in level.others]
        transfer.forward(flat, targets, received=source is not None)
        return Transfer(transfer.all_posted())

    def _broadcast_route(self, root: int) -> tuple[int, int | None]:
        """Return the number of inner levels to which this rank forwards a broadcast, and the rank that
        sends to it; ``None`` for the root."""
        for depth, level in enumerate(self._levels):
            stride = level.members[1] - level.members[0]
            place = root // stride % len(level.members)
            if place != level.own:
                return depth, level.members[place]
        return len(self._levels), None

    def close(self) -> None:
        """End the threads; transfers in flight fail."""
        if self._queue is not None:
            self._queue.close()
        self._scheduler.close()


class _Messages:
    """The messages of one all-to-all or broadcast on gloo, cut so that others can overtake them."""

    def __init__(self, queue: SendQueue, cut_bytes: int, priority: int, num_slices: int) -> None:
        self._queue, self._cut_bytes, self._priority = queue, cut_bytes, priority
        self._pending, self._num_slices = PendingOp(), num_slices
        self._first_tag: int | None = None
        self._num_cuts = 0
        self._arrivals: list[dist.Work] = []

    def _cuts(self, x: torch.Tensor) -> list[torch.Tensor]:
        cuts = list(x.split(max(1, self._cut_bytes // x.element_size())))
        if self._first_tag is None:
            self._num_cuts = len(cuts)
            self._first_tag = self._queue.reserve(self._num_slices * self._num_cuts)
        return cuts

    def receive(self, into: torch.Tensor, peer: int, slice_: int) -> None:
        """Post the receives of a slice."""
        for index, cut in enumerate(self._cuts(into)):
            self._arrivals.append(self._queue.receive(cut, peer, self._tag(slice_, index)))

    def send(self, x: torch.Tensor, peer: int, slice_: int) -> None:
        """Queue the sends of a slice."""
        for index, cut in enumerate(self._cuts(x)):
            self._send(cut, peer, self._tag(slice_, index))

    def forward(self, x: torch.Tensor, peers: list[int], *, received: bool) -> None:
        """Send each cut to the peers; if it is ``received``, as soon as it has arrived."""
        cuts, works = self._cuts(x), self._arrivals

        def pass_on() -> None:
            for index, cut in enumerate(cuts):
                if received:
                    works[index].wait()
                for peer in peers:
                    self._send(cut, peer, self._tag(0, index))

        if received and peers:
            self._arrivals = []
            self._queue.start(pass_on, self._pending)
        elif peers:
            pass_on()

    def _tag(self, slice_: int, index: int) -> int:
        assert self._first_tag is not None, "reserved with the first cuts"
        return self._first_tag + slice_ * self._num_cuts + index

    def _send(self, cut: torch.Tensor, peer: int, tag: int) -> None:
        assert self._first_tag is not None, "reserved with the first cuts"
        self._queue.send(cut, peer, tag, self._pending, (self._priority, self._first_tag))

    def all_posted(self) -> "_Messages":
        """Mark that every message is posted."""
        self._pending.complete_part()
        return self

    def wait(self) -> None:
        """Block until every message has arrived or been sent."""
        self._pending.wait()
        for work in self._arrivals:
            work.wait()


def _copy(flat: torch.Tensor, whole: torch.Tensor) -> None:
    flat.copy_(whole[: flat.numel()])


def _flat(x: torch.Tensor, name: str) -> torch.Tensor:
    if not x.is_contiguous() or x.requires_grad:
        raise BadInputError(name, tuple(x.shape), "a contiguous tensor without gradient (detach it)")
    return x.view(-1)


def _check_slices(part: torch.Tensor, whole: torch.Tensor, size: int) -> None:
    if part.numel() * size != whole.numel():
        allowed = f"{size} slices (one for each rank) of the {part.numel()} elements of a slice"
        raise BadInputError("elements", whole.numel(), allowed)


def _need_type(name: str, x: torch.Tensor, allowed: set[torch.dtype]) -> None:
    """Refuse another type before anything is sent, because peers would wait for bytes that never come."""
    if x.dtype not in allowed:
        raise BadInputError(name, str(x.dtype), " or ".join(sorted(map(str, allowed))))


@contextmanager
def connect(
    *,
    device: str = "cpu",
    hierarchy: Literal["auto", "flat", "node", "switch"] = "auto",
    node_size: int | None = None,
    island_size: int | None = None,
    switch_size: int | None = None,
    message_bytes: int = _MESSAGE_BYTES,
    in_flight_bytes: int = _IN_FLIGHT_BYTES,
    timeout_seconds: float = 600.0,
    store: str = "tcp",
) -> Iterator[Communicator]:
    """Join the world that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe, and leave it at the end.

    Without these variables, the world is one rank. ``node_size`` is the number of ranks of a node, by default
    LOCAL_WORLD_SIZE. ``island_size`` is the number of ranks of a node that share NVLink, a PCIe switch or a
    processor. ``switch_size`` is the number of nodes under a switch. ``message_bytes`` is the size of one
    message, which more urgent ones cannot overtake. ``in_flight_bytes`` bounds the bytes sent but not yet
    delivered. ``store`` is tcp or redis://HOST:PORT. Raises `BadInputError`, and `RunFailedError` when the
    ranks do not meet.
    """
    if message_bytes < 1 or in_flight_bytes < message_bytes:
        raise BadInputError("in_flight_bytes", in_flight_bytes, f"at least message_bytes = {message_bytes}")
    config = CommConfig(
        hierarchy=hierarchy,
        node_size=node_size,
        island_size=island_size,
        switch_size=switch_size,
        timeout_seconds=timeout_seconds,
        store=store,
    )
    where = torch.device(device)
    groups = open_world(Layout(dp=int(os.environ.get("WORLD_SIZE", "1"))), where, comm=config)
    world: Communicator | None = None
    try:
        world = Communicator(groups, where, config, message_bytes, in_flight_bytes)
        yield world
    finally:
        if world is not None:
            world.close()
        close_world()
