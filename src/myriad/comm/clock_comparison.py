"""Compare the clocks of ranks with the first rank's, for ranks without a node agent.

    each: sent ──all gather──► received          received[mine] >= sent[first], received[first] >= sent[mine]

A message never arrives before it was sent, so two gathers bound the difference of two clocks. Several gathers
tighten the bound. Ranks of one machine share a clock, so they share their bounds.
"""

import hashlib
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from myriad.telemetry.shipping.clock_offset import ClockOffset, Compared, boot_id

__all__ = ["compare_clocks"]

_ROUNDS = 8


def compare_clocks(
    group: dist.ProcessGroup, now_ns: Callable[[], int] = time.time_ns, boot: str | None = None
) -> ClockOffset:
    """Return the offset to the clock of the first rank of a gloo ``group``. All its ranks call this together.

    ``boot`` replaces the boot id of this machine.
    """
    rank, low, high = group.rank(), -(2**62), 2**62
    for _ in range(_ROUNDS):
        sent = _gather(group, now_ns())
        received = now_ns()
        all_received = _gather(group, received)
        low = max(low, int(sent[0, 0]) - received)
        high = min(high, int(all_received[0, 0]) - int(sent[rank, 0]))
    return _offset_from_bounds(
        _gather(group, _number_of(boot_id() if boot is None else boot), low, high), rank, now_ns()
    )


def _offset_from_bounds(bounds: torch.Tensor, rank: int, now_ns: int) -> ClockOffset:
    """Return the offset of rank ``rank``. ``bounds`` holds the machine, lowest and highest offset of each
    rank."""
    own = bounds[bounds[:, 0] == bounds[rank, 0]]
    low, high = int(own[:, 1].max()), int(own[:, 2].min())
    offset = ClockOffset()
    compared = Compared((low + high) // 2, abs(high - low) // 2 + 1, now_ns)
    offset.add(compared)
    if bounds[rank, 0] == bounds[0, 0] and compared.may_be_same:
        offset.same()
    return offset


def _gather(group: dist.ProcessGroup, *values: int) -> torch.Tensor:
    """Gather the values of each rank, as a row."""
    rows = torch.empty(group.size(), len(values), dtype=torch.int64)
    dist.all_gather_into_tensor(rows.view(-1), torch.tensor(values, dtype=torch.int64), group=group)
    return rows


def _number_of(boot: str) -> int:
    return int.from_bytes(hashlib.sha256(boot.encode()).digest()[:7], "big")
