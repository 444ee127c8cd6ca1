"""Time transfers between pairs of ranks, all pairs at once, and what tensor parallelism adds to real blocks.

Gathers and reduce-scatters use the data-parallel scheduler (`CommScheduler`); messages between stages use
point-to-point operations of a group. The clock's seconds count, the median of several: a rank that waits for
its peer uses no processor time. The sent data comes from memory and not from a core's caches, as after the
computation of a training step.

    block of a rank of two, with a simulated peer       compute
    the same with the peer, each tensor waited for      + an exposed collective, copies included
    the same with parts that take turns                 + a collective that overlaps with compute

A tensor-parallel collective takes longer in a block than alone. The peers are never ready at the same moment,
the transport shares the cores with compute, and caches hold other data afterwards. The measure
(`time_tensors`) is therefore the difference of clock times of whole blocks, forward and backward. The
variants alternate, and the median counts. The processor time of all threads shows how much of the difference
is work, and how much another rank on the core could use.
"""

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from myriad.comm.comm_scheduler import BucketCollective, CommScheduler
from myriad.comm.config import CommConfig
from myriad.comm.groups import Group, Groups
from myriad.model.boundary import Arrived, Arriving, Boundary
from myriad.model.config import ModelConfig
from myriad.model.overlap_parts import num_parts
from myriad.parallel.tensor_parallel import GroupBoundary
from myriad.planner.rehearsal.machine_fit import TensorParallelTiming
from myriad.program.config import OverlapConfig
from myriad.telemetry.spans import Recorder
from myriad.train.calibration.compute_timings import stack_of_blocks

__all__ = ["LinkTimes", "time_links", "time_tensors"]

_ELEMENTS = (2**8, 2**12, 2**14, 2**16, 2**18, 2**20, 2**22)
_REPEATS = 7
_WIDTH = 256
_TAG = 2**21
_BESIDE_ELEMENTS, _BESIDE_SECONDS, _BESIDE_ROUNDS, _COMPUTES = 2**20, 0.15, 4, 25
"""The overlap measurement: elements of a transfer, seconds of compute beside transfers, rounds, and
compute calls alone."""
_BESIDE_BUFFERS, _SWEPT_ELEMENTS = 8, 2**22
"""Number of transfer buffers that alternate, and elements swept before a timed transfer: more than a
core's caches hold."""


@dataclass(frozen=True)
class LinkTimes:
    """The transfer times of one rank, as (bytes, seconds)."""

    messages: Sequence[tuple[float, float]]
    """Messages that are sent and received at the same time."""
    half_sums: Sequence[tuple[float, float]]
    """Gathers and reduce-scatters, by the bytes of the whole tensor; an all-reduce counts as two of them."""
    busy_ratio: float
    """Slowdown of concurrent compute: seconds of delay for each second that the transfers take alone."""


def time_links(groups: Groups) -> LinkTimes:
    """Time the transfers over the tensor-parallel pair of each rank."""
    pair = groups.along("tp")
    assert pair is not None, "two ranks at least"
    scheduler = CommScheduler(
        groups, "tp", OverlapConfig(), CommConfig(hierarchy="flat"), torch.device("cpu")
    )
    messages, halves = [], []
    for count in _ELEMENTS:
        whole, part, other = torch.zeros(count), torch.zeros(count // 2), torch.zeros(count)
        collective = scheduler.bucket_collective(count, torch.float32)
        collectives: tuple[tuple[Callable[[], object], float], ...] = (
            (partial(_gather, collective, whole, part), 1.0),
            (partial(_scatter, collective, whole, part), 1.0),
            (partial(_sum, collective, whole), 0.5),
        )
        for function, weight in collectives:
            halves.append((4.0 * count, weight * _usual(function, pair)))
        messages.append((4.0 * count, _usual(partial(_swap, whole, other, pair), pair)))
    taken = _taken_ratio(pair, scheduler.bucket_collective(_BESIDE_ELEMENTS, torch.float32))
    dist.barrier(pair)
    scheduler.close()
    return LinkTimes(messages, halves, taken)


def _gather(collective: BucketCollective, whole: torch.Tensor, part: torch.Tensor) -> None:
    collective.gather(whole, part, 0).wait()


def _scatter(collective: BucketCollective, whole: torch.Tensor, part: torch.Tensor) -> None:
    collective.reduce_scatter(whole, part, 0, add=False).wait()


def _sum(collective: BucketCollective, whole: torch.Tensor) -> None:
    collective.all_reduce(whole, 0).wait()


def _swap(outgoing: torch.Tensor, incoming: torch.Tensor, pair: Group) -> None:
    peer = 1 - pair.rank()
    works = [
        dist.irecv(incoming, group=pair, group_src=peer, tag=_TAG),
        dist.isend(outgoing, group=pair, group_dst=peer, tag=_TAG),
    ]
    for work in works:
        assert work is not None
        work.wait()


def _usual(function: Callable[[], object], pair: Group) -> float:
    """Return the median seconds of several calls, after a first call that opens connections."""
    function()
    found, swept = [], torch.zeros(_SWEPT_ELEMENTS)
    for _ in range(_REPEATS):
        swept.add_(1.0)
        dist.barrier(pair)
        found.append(_clocked(function))
    return statistics.median(found)


def _taken_ratio(pair: Group, collective: BucketCollective) -> float:
    """Return the slowdown of compute by concurrent transfers (`LinkTimes.busy_ratio`).

    It exceeds the processor time of the transfer threads, because of interrupts and because caches hold other
    data after each transfer.
    """
    wholes = torch.zeros(_BESIDE_BUFFERS, _BESIDE_ELEMENTS)
    parts = torch.zeros(_BESIDE_BUFFERS, _BESIDE_ELEMENTS // 2)

    def transfer(times: int = 1) -> None:
        for index in range(times):
            whole, part = wholes[index % _BESIDE_BUFFERS], parts[index % _BESIDE_BUFFERS]
            _scatter(collective, whole, part)
            _gather(collective, whole, part)

    alone = _usual(transfer, pair)
    wanted = torch.tensor([_BESIDE_SECONDS / alone / pair.size()])
    dist.all_reduce(wanted, group=pair)
    repeats = max(1, int(wanted.item()))
    delays = [_delay(partial(transfer, repeats), pair) for _ in range(1 + _BESIDE_ROUNDS)]
    return max(0.0, statistics.mean(delays[1:])) / (repeats * alone)  # without the first, which is a warm-up


def _delay(transfers: Callable[[], None], pair: Group) -> float:
    """Return the seconds by which a transferring thread delays concurrent compute."""
    compute = _feed_forward()
    dist.barrier(pair)
    compute_seconds = statistics.mean(_clocked(compute) for _ in range(_COMPUTES))
    transferring = threading.Thread(target=transfers)
    dist.barrier(pair)
    start, calls = time.perf_counter(), 0
    transferring.start()
    while transferring.is_alive():
        compute()
        calls += 1
    return time.perf_counter() - start - calls * compute_seconds


def _clocked(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _feed_forward() -> Callable[[], object]:
    rows, inner = torch.randn(4 * _WIDTH, _WIDTH), 4 * _WIDTH
    up, down = torch.randn(inner, _WIDTH), torch.randn(_WIDTH, inner)
    return lambda: F.linear(F.gelu(F.linear(rows, up)), down)


_SHAPES = ((128, 128, 2), (256, 256, 1), (256, 256, 4), (512, 256, 2))
"""Hidden size, sequence length and micro-batch of each measured block."""
_STACK = 2
_ROUNDS, _CALLS = 5, 2


class _SimulatedPeer(Boundary):
    """A simulated peer: its tensors and the returning gradients are available at once, and none is copied."""

    size = 2

    def __init__(self) -> None:
        self._there: dict[torch.Size, torch.Tensor] = {}

    def there(self, shape: torch.Size) -> torch.Tensor:
        """Return values of a shape, the same values each time."""
        if shape not in self._there:
            self._there[shape] = torch.randn(shape)
        return self._there[shape].detach()

    def start_all_gather(self, x: torch.Tensor) -> Arriving:
        batch, length, hidden = x.shape
        return self._cross(x, torch.Size((batch, 2 * length, hidden)))

    def start_reduce_scatter(self, x: torch.Tensor) -> Arriving:
        batch, length, hidden = x.shape
        return self._cross(x, torch.Size((batch, length // 2, hidden)))

    def start_stack(self, x: torch.Tensor) -> Arriving:
        return self._cross(x, torch.Size((2, *x.shape)))

    def _cross(self, x: torch.Tensor, shape: torch.Size) -> Arriving:
        crossed = _Cross.apply(x, self, shape)
        assert isinstance(crossed, torch.Tensor)
        return Arrived(crossed)


class _Cross(torch.autograd.Function):
    """Replace a tensor by one of another shape, forward and backward; the values are unrelated."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, peer: _SimulatedPeer, shape: torch.Size) -> torch.Tensor:
        ctx.peer, ctx.shape = peer, x.shape
        return peer.there(shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.peer.there(ctx.shape), None, None


def time_tensors(pair: Group) -> list[TensorParallelTiming]:
    """Time the blocks in float32, the type in which ranks on CPUs train."""
    return [_time(pair, *shape) for shape in _SHAPES]


def _time(pair: Group, hidden: int, sequence: int, micro_batch: int) -> TensorParallelTiming:
    model = ModelConfig(layers=_STACK, hidden=hidden, heads=hidden // 64, sequence=sequence)
    overlap = OverlapConfig()
    chunks, message_bytes = overlap.tensor_chunks, overlap.tensor_message
    waiting = GroupBoundary(pair, pair.rank(), 2, Recorder())
    behind = GroupBoundary(pair, pair.rank(), 2, Recorder(), chunks=chunks, message_bytes=message_bytes)
    x = torch.randn(micro_batch, sequence // 2, hidden)
    (alone, alone_work), (waited, waited_work), (hidden_behind, _) = _in_turns(
        [
            stack_of_blocks(model, torch.float32, boundary, x)
            for boundary in (_SimulatedPeer(), waiting, behind)
        ],
        pair,
    )
    cut = {"chunks": chunks, "message_bytes": message_bytes}
    parts = num_parts(micro_batch, sequence / 2, hidden * 4, **cut, on_cpu=True)
    return TensorParallelTiming(
        4.0 * micro_batch * sequence * hidden,
        alone / _STACK,
        (waited - alone) / _STACK,
        float(parts),
        (hidden_behind - alone) / _STACK,
        (waited_work - alone_work) / _STACK,
    )


def _in_turns(iterations: Sequence[Callable[[], None]], pair: Group) -> list[tuple[float, float]]:
    """Return the clock and processor seconds of each function: medians of rounds in which the functions
    alternate."""
    found: list[list[tuple[float, float]]] = [[] for _ in iterations]
    for number in range(_ROUNDS + 1):
        for iterate, seconds in zip(iterations, found, strict=True):
            dist.barrier(pair)
            start, worked = time.perf_counter(), time.process_time()
            for _ in range(_CALLS):
                iterate()
            taken = time.perf_counter() - start, time.process_time() - worked
            if number:  # the first round opens connections
                seconds.append((taken[0] / _CALLS, taken[1] / _CALLS))
    clocks = [[statistics.median(each) for each in zip(*seconds, strict=True)] for seconds in found]
    return [(clock, work) for clock, work in clocks]
