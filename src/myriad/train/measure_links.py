"""Times transfers between pairs of ranks, all pairs at once, by the functions that training uses.

The clock's seconds, the smallest of several: a rank that waits for its peer has no processor time to count.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from myriad.comm.collectives import start_all_gather, start_all_reduce, start_reduce_scatter
from myriad.comm.groups import Group, Groups
from myriad.parallel.tensor import GroupBoundary
from myriad.telemetry.spans import Recorder

__all__ = ["LinkTimes", "time_links"]

_ELEMENTS = (2**8, 2**12, 2**14, 2**16, 2**18, 2**20)
_REPEATS = 7
_WIDTH, _CROSSING_ROWS, _CROSSINGS = 256, (64, 256, 1024, 2048), 40
_TAG = 2**21


@dataclass(frozen=True)
class LinkTimes:
    """Of one rank: bytes and seconds."""

    messages: Sequence[tuple[float, float]]
    """Sent and received at the same time."""
    half_sums: Sequence[tuple[float, float]]
    """Gathers and reduce-scatters, by the bytes of the whole; all-reduces, as two of them."""
    crossings: Sequence[tuple[float, float]]
    """Gathers and scatters as tensor parallelism does them, copies included, by the bytes of the whole."""
    busy_ratio: float
    """Processor time of the rank, all its threads, for each second of a large transfer."""


def time_links(groups: Groups) -> LinkTimes:
    """Over the tensor-parallel pair of each rank."""
    pair = groups.along("tp")
    assert pair is not None, "two ranks at least"
    messages, halves, busy = [], [], []
    for count in _ELEMENTS:
        whole, part, other = torch.zeros(count), torch.zeros(count // 2), torch.zeros(count)
        collectives: tuple[tuple[Callable[[], object], float], ...] = (
            (partial(_gather, whole, part, pair), 1.0),
            (partial(_scatter, whole, part, pair), 1.0),
            (partial(_sum, whole, pair), 0.5),
        )
        for function, weight in collectives:
            seconds, processor = _best(function, pair)
            halves.append((4.0 * count, weight * seconds))
            if count == _ELEMENTS[-1]:
                busy.append(processor / seconds)
        messages.append((4.0 * count, _best(partial(_swap, whole, other, pair), pair)[0]))
    return LinkTimes(messages, halves, list(_crossings(pair)), sum(busy) / len(busy))


def _crossings(pair: Group) -> Iterator[tuple[float, float]]:
    """The median: what gathers many times in each layer meets the usual case, not the best."""
    boundary = GroupBoundary(pair, pair.rank(), 2, Recorder())
    for rows in _CROSSING_ROWS:
        whole, part = torch.zeros(1, rows, _WIDTH), torch.zeros(1, rows // 2, _WIDTH)
        for start, tensor in ((boundary.start_enter, part), (boundary.start_leave, whole)):
            found = []
            for _ in range(_CROSSINGS):
                fresh = tensor + 1
                dist.barrier(pair)
                begun = time.perf_counter()
                start(fresh).wait()
                found.append(time.perf_counter() - begun)
            yield 4.0 * rows * _WIDTH, statistics.median(found)


def _gather(whole: torch.Tensor, part: torch.Tensor, pair: Group) -> None:
    start_all_gather(whole, part, pair).wait()


def _scatter(whole: torch.Tensor, part: torch.Tensor, pair: Group) -> None:
    start_reduce_scatter(part, whole, pair).wait()


def _sum(whole: torch.Tensor, pair: Group) -> None:
    start_all_reduce(whole, pair).wait()


def _swap(outgoing: torch.Tensor, incoming: torch.Tensor, pair: Group) -> None:
    peer = 1 - pair.rank()
    works = [
        dist.irecv(incoming, group=pair, group_src=peer, tag=_TAG),
        dist.isend(outgoing, group=pair, group_dst=peer, tag=_TAG),
    ]
    for work in works:
        assert work is not None
        work.wait()


def _best(function: Callable[[], object], pair: Group) -> tuple[float, float]:
    """Clock and processor seconds of the quickest repeat; the first one opens connections."""
    function()
    found = []
    for _ in range(_REPEATS):
        dist.barrier(pair)
        start, processor = time.perf_counter(), time.process_time()
        function()
        found.append((time.perf_counter() - start, time.process_time() - processor))
    return min(found)
