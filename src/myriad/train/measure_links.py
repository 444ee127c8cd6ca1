"""Times transfers between pairs of ranks, all pairs at once, by what carries them in training: the courier
for gathers and sums, messages of a group for what goes from stage to stage.

The clock's seconds, the median of several: a rank that waits for its peer has no processor time to count.
What is sent comes from memory and not from a core's caches, as when a training has computed meanwhile.
"""

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.nn import functional as F

from myriad.comm.config import CommConfig
from myriad.comm.courier import Courier, Exchange
from myriad.comm.groups import Group, Groups
from myriad.program.config import OverlapConfig

__all__ = ["LinkTimes", "time_links"]

_ELEMENTS = (2**8, 2**12, 2**14, 2**16, 2**18, 2**20, 2**22)
_REPEATS = 7
_WIDTH = 256
_TAG = 2**21
_BESIDE_ELEMENTS, _BESIDE_SECONDS, _BESIDE_ROUNDS, _COMPUTES = 2**20, 0.15, 4, 25
"""Size of transfers, for how long something computes beside them and how often, and how many times alone."""
_BESIDE_BUFFERS, _SWEPT_ELEMENTS = 8, 2**22
"""How many of that size take turns, and what is gone over before a transfer that is timed: more than caches
of a core hold."""


@dataclass(frozen=True)
class LinkTimes:
    """Of one rank: bytes and seconds."""

    messages: Sequence[tuple[float, float]]
    """Sent and received at the same time."""
    half_sums: Sequence[tuple[float, float]]
    """Gathers and reduce-scatters, by the bytes of the whole; sums for everybody, as two of them."""
    busy_ratio: float
    """Seconds by which a second of large transfers, as long as they take alone, delays what computes beside
    them."""


def time_links(groups: Groups) -> LinkTimes:
    """Over the tensor-parallel pair of each rank."""
    pair = groups.along("tp")
    assert pair is not None, "two ranks at least"
    courier = Courier(groups, "tp", OverlapConfig(), CommConfig(hierarchy="flat"), torch.device("cpu"))
    messages, halves = [], []
    for count in _ELEMENTS:
        whole, part, other = torch.zeros(count), torch.zeros(count // 2), torch.zeros(count)
        exchange = courier.exchange(count, torch.float32)
        collectives: tuple[tuple[Callable[[], object], float], ...] = (
            (partial(_gather, exchange, whole, part), 1.0),
            (partial(_scatter, exchange, whole, part), 1.0),
            (partial(_sum, exchange, whole), 0.5),
        )
        for function, weight in collectives:
            halves.append((4.0 * count, weight * _usual(function, pair)))
        messages.append((4.0 * count, _usual(partial(_swap, whole, other, pair), pair)))
    taken = _taken_ratio(pair, courier.exchange(_BESIDE_ELEMENTS, torch.float32))
    dist.barrier(pair)
    courier.close()
    return LinkTimes(messages, halves, taken)


def _gather(exchange: Exchange, whole: torch.Tensor, part: torch.Tensor) -> None:
    exchange.gather(whole, part, 0).wait()


def _scatter(exchange: Exchange, whole: torch.Tensor, part: torch.Tensor) -> None:
    exchange.reduce_scatter(whole, part, 0, add=False).wait()


def _sum(exchange: Exchange, whole: torch.Tensor) -> None:
    exchange.all_reduce(whole, 0).wait()


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
    """Seconds of the median repeat; the first one opens connections."""
    function()
    found, swept = [], torch.zeros(_SWEPT_ELEMENTS)
    for _ in range(_REPEATS):
        swept.add_(1.0)
        dist.barrier(pair)
        found.append(_clocked(function))
    return statistics.median(found)


def _taken_ratio(pair: Group, exchange: Exchange) -> float:
    """What transfers take from compute is more than their threads' processor time: interrupts, and caches
    that hold other data after each."""
    wholes = torch.zeros(_BESIDE_BUFFERS, _BESIDE_ELEMENTS)
    parts = torch.zeros(_BESIDE_BUFFERS, _BESIDE_ELEMENTS // 2)

    def transfer(times: int = 1) -> None:
        for index in range(times):
            whole, part = wholes[index % _BESIDE_BUFFERS], parts[index % _BESIDE_BUFFERS]
            _scatter(exchange, whole, part)
            _gather(exchange, whole, part)

    alone = _usual(transfer, pair)
    wanted = torch.tensor([_BESIDE_SECONDS / alone / pair.size()])
    dist.all_reduce(wanted, group=pair)
    repeats = max(1, int(wanted.item()))
    delays = [_delay(partial(transfer, repeats), pair) for _ in range(1 + _BESIDE_ROUNDS)]
    return max(0.0, statistics.mean(delays[1:])) / (repeats * alone)  # without the first, which warms up


def _delay(transfers: Callable[[], None], pair: Group) -> float:
    """Seconds by which a thread that transfers delays what computes meanwhile."""
    compute = _feed_forward()
    dist.barrier(pair)
    compute_seconds = statistics.mean(_clocked(compute) for _ in range(_COMPUTES))
    courier = threading.Thread(target=transfers)
    dist.barrier(pair)
    start, calls = time.perf_counter(), 0
    courier.start()
    while courier.is_alive():
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
