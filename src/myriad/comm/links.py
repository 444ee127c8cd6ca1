"""What the links between ranks carry: measured at start where nobody declared it.

For each distance (in a node, under a switch, across) every rank of a group sends to the next one so far away,
all at once, so that links which ranks share are measured shared. Two sizes, so that the latency of a message
drops out. The group takes its slowest rank's figure: all ranks know the same numbers and decide alike.
"""

import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from myriad.comm.groups import Group
from myriad.comm.hierarchy import Level

__all__ = ["measure_rates"]

_SMALL_BYTES, _LARGE_BYTES, _REPEATS = 2**16, 2**19, 3
_SIZES = (_SMALL_BYTES, _LARGE_BYTES)
_TAG = 2**21


def measure_rates(group: Group, levels: Sequence[Level]) -> list[float]:
    """Bits a second that a rank reaches at each level while all ranks send."""
    seconds = torch.tensor([[_seconds(group, level, size) for size in _SIZES] for level in levels])
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=group)
    rates = []
    for small, large in seconds.tolist():
        without_latency = 8 * (_LARGE_BYTES - _SMALL_BYTES) / max(large - small, 1e-9)
        # a small message that took longer than its share says nothing about latency
        rates.append(min(without_latency, 2 * 8 * _LARGE_BYTES / large))
    return rates


def _seconds(group: Group, level: Level, num_bytes: int) -> float:
    """Median over repeats; the first one also opens the connection and does not count."""
    count = len(level.members)
    after, before = level.members[(level.own + 1) % count], level.members[level.own - 1]
    outgoing, incoming = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))
    found = []
    for _ in range(_REPEATS + 1):
        dist.barrier(group)
        start = time.perf_counter()
        received = group.recv([incoming], before, _TAG)
        group.send([outgoing], after, _TAG).wait()
        received.wait()
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])
