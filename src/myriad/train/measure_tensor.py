"""Times what tensor parallelism adds to real blocks, between pairs of ranks, all pairs at once.

    block of a rank of two, whose peers are made up     compute, and the copies of a gather
    the same with the peer, each tensor waited for      + what a crossing takes
    the same with parts that take turns                 + what a crossing takes that travels behind compute

In a block a crossing takes longer than alone: the peers are never ready at the same moment, what carries it
takes turns with compute on the cores, and caches hold other data afterwards. So this is the difference of
clocks of whole blocks, forward and backward, taken in turns; the median.
"""

import statistics
import time
from collections.abc import Callable, Sequence

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
    """A peer whose tensors are this rank's own."""

    size = 2

    def start_enter(self, x: torch.Tensor) -> Arriving:
        return Arrived(torch.cat([x, x], 1))

    def start_leave(self, x: torch.Tensor) -> Arriving:
        return Arrived(x[:, : x.shape[1] // 2].contiguous())

    def start_stack(self, x: torch.Tensor) -> Arriving:
        return Arrived(torch.stack([x, x]))


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
    alone, waited, hidden_behind = _in_turns(
        [stack_of_blocks(model, torch.float32, boundary, x) for boundary in (_Nobody(), waiting, behind)],
        pair,
    )
    parts = num_parts(micro_batch, sequence / 2, hidden * 4, chunks=chunks, message_bytes=message_bytes)
    return TensorTime(
        4.0 * micro_batch * sequence * hidden,
        alone / _STACK,
        (waited - alone) / _STACK,
        float(parts),
        (hidden_behind - alone) / _STACK,
    )


def _in_turns(iterations: Sequence[Callable[[], None]], pair: Group) -> list[float]:
    """Seconds of each: the median of rounds, in each of which each has a turn."""
    found: list[list[float]] = [[] for _ in iterations]
    for number in range(_ROUNDS + 1):
        for iterate, seconds in zip(iterations, found, strict=True):
            dist.barrier(pair)
            start = time.perf_counter()
            for _ in range(_CALLS):
                iterate()
            if number:  # the first opens connections
                seconds.append((time.perf_counter() - start) / _CALLS)
    return [statistics.median(seconds) for seconds in found]
