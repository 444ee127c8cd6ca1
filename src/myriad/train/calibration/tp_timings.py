"""Time what tensor parallelism adds to real blocks, between pairs of ranks, all pairs at once.

    block of a rank of two, with a simulated peer       compute
    the same with the peer, each tensor waited for      + an exposed collective, copies included
    the same with parts that take turns                 + a collective that overlaps with compute

A collective takes longer in a block than alone. The peers are never ready at the same moment, the transport
shares the cores with compute, and caches hold other data afterwards. The measure is therefore the difference
of clock times of whole blocks, forward and backward. The variants alternate, and the median counts. The
processor time of all threads shows how much of the difference is work, and how much another rank on the core
could use.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from myriad.comm.groups import Group
from myriad.model.boundary import Arrived, Arriving, Boundary
from myriad.model.config import ModelConfig
from myriad.model.overlap_parts import num_parts
from myriad.parallel.tensor_parallel import GroupBoundary
from myriad.planner.rehearsal.machine_fit import TensorParallelTiming
from myriad.program.config import OverlapConfig
from myriad.telemetry.spans import Recorder
from myriad.train.calibration.compute_timings import stack_of_blocks

__all__ = ["time_tensors"]

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
