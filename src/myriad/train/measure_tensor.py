"""Times what tensor parallelism adds to real blocks, between pairs of ranks, all pairs at once.

    block of a rank of two, whose peers are made up     compute
    the same with the peer, each tensor waited for      + what a crossing takes, copies and all
    the same with parts that take turns                 + what a crossing takes that travels behind compute

In a block a crossing takes longer than alone: the peers are never ready at the same moment, what carries it
takes turns with compute on the cores, and caches hold other data afterwards. So this is the difference of
clocks of whole blocks, forward and backward, taken in turns; the median. The processor time of all threads
tells how much of that is work, and how much another rank on the core could use.
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
from myriad.model.parts import num_parts
from myriad.parallel.tensor import GroupBoundary
from myriad.planner.machine_links import TensorTime
from myriad.program.config import OverlapConfig
from myriad.telemetry.spans import Recorder
from myriad.train.measure_compute import stack_of_blocks

__all__ = ["time_tensors"]

_SHAPES = ((128, 128, 2), (256, 256, 1), (256, 256, 4), (512, 256, 2))
"""Hidden, sequence, micro-batch."""
_STACK = 2
_ROUNDS, _CALLS = 5, 2


class _Nobody(Boundary):
    """A peer whose tensors are there already, as are the gradients that come back: none is copied."""

    size = 2

    def __init__(self) -> None:
        self._there: dict[torch.Size, torch.Tensor] = {}

    def there(self, shape: torch.Size) -> torch.Tensor:
        """The same values each time."""
        if shape not in self._there:
            self._there[shape] = torch.randn(shape)
        return self._there[shape].detach()

    def start_enter(self, x: torch.Tensor) -> Arriving:
        batch, length, hidden = x.shape
        return self._cross(x, torch.Size((batch, 2 * length, hidden)))

    def start_leave(self, x: torch.Tensor) -> Arriving:
        batch, length, hidden = x.shape
        return self._cross(x, torch.Size((batch, length // 2, hidden)))

    def start_stack(self, x: torch.Tensor) -> Arriving:
        return self._cross(x, torch.Size((2, *x.shape)))

    def _cross(self, x: torch.Tensor, shape: torch.Size) -> Arriving:
        crossed = _Cross.apply(x, self, shape)
        assert isinstance(crossed, torch.Tensor)
        return Arrived(crossed)


class _Cross(torch.autograd.Function):
    """In both directions what comes has nothing to do with what goes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, nobody: _Nobody, shape: torch.Size) -> torch.Tensor:
        ctx.nobody, ctx.shape = nobody, x.shape
        return nobody.there(shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.nobody.there(ctx.shape), None, None


def time_tensors(pair: Group) -> list[TensorTime]:
    """In float32, in which ranks on CPUs train."""
    return [_time(pair, *shape) for shape in _SHAPES]


def _time(pair: Group, hidden: int, sequence: int, micro_batch: int) -> TensorTime:
    model = ModelConfig(layers=_STACK, hidden=hidden, heads=hidden // 64, sequence=sequence)
    overlap = OverlapConfig()
    chunks, message_bytes = overlap.tensor_chunks, overlap.tensor_message
    waiting = GroupBoundary(pair, pair.rank(), 2, Recorder())
    behind = GroupBoundary(pair, pair.rank(), 2, Recorder(), chunks=chunks, message_bytes=message_bytes)
    x = torch.randn(micro_batch, sequence // 2, hidden)
    (alone, alone_work), (waited, waited_work), (hidden_behind, _) = _in_turns(
        [stack_of_blocks(model, torch.float32, boundary, x) for boundary in (_Nobody(), waiting, behind)],
        pair,
    )
    cut = {"chunks": chunks, "message_bytes": message_bytes}
    parts = num_parts(micro_batch, sequence / 2, hidden * 4, **cut, on_cpu=True)
    return TensorTime(
        4.0 * micro_batch * sequence * hidden,
        alone / _STACK,
        (waited - alone) / _STACK,
        float(parts),
        (hidden_behind - alone) / _STACK,
        (waited_work - alone_work) / _STACK,
    )


def _in_turns(iterations: Sequence[Callable[[], None]], pair: Group) -> list[tuple[float, float]]:
    """Seconds of each, by the clock and of a processor: the medians of rounds, in each of which each has a
    turn."""
    found: list[list[tuple[float, float]]] = [[] for _ in iterations]
    for number in range(_ROUNDS + 1):
        for iterate, seconds in zip(iterations, found, strict=True):
            dist.barrier(pair)
            start, worked = time.perf_counter(), time.process_time()
            for _ in range(_CALLS):
                iterate()
            taken = time.perf_counter() - start, time.process_time() - worked
            if number:  # the first opens connections
                seconds.append((taken[0] / _CALLS, taken[1] / _CALLS))
    clocks = [[statistics.median(each) for each in zip(*seconds, strict=True)] for seconds in found]
    return [(clock, work) for clock, work in clocks]
