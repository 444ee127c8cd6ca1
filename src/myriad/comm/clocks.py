"""The clocks of ranks, compared with the first rank's: for those that have no executor to do it.

    each: sent ──all gather──► received          received[mine] >= sent[first], received[first] >= sent[mine]

A message is never there before it was sent, so two gathers bound how far two clocks are apart; several bound
it closer, and ranks of one machine share their bounds, as they share a clock.
"""

import hashlib
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from myriad.telemetry.clock import ClockOffset, Compared, boot_id

__all__ = ["compare_clocks"]

_ROUNDS = 8


def compare_clocks(
    group: dist.ProcessGroup, now_ns: Callable[[], int] = time.time_ns, boot: str | None = None
) -> ClockOffset:
    """To the first rank of a gloo ``group``, all of which call this. ``boot``: of this machine, if it is to
    be another."""
    mine, low, high = group.rank(), -(2**62), 2**62
    for _ in range(_ROUNDS):
        sent = _gather(group, now_ns())
        received = now_ns()
        all_received = _gather(group, received)
        low = max(low, int(sent[0, 0]) - received)
        high = min(high, int(all_received[0, 0]) - int(sent[mine, 0]))
    return _among(_gather(group, _number_of(boot_id() if boot is None else boot), low, high), mine, now_ns())


def _among(bounds: torch.Tensor, mine: int, now_ns: int) -> ClockOffset:
    """``bounds``: machine, lowest and highest offset of each rank."""
    own = bounds[bounds[:, 0] == bounds[mine, 0]]
    low, high = int(own[:, 1].max()), int(own[:, 2].min())
    offset = ClockOffset()
    compared = Compared((low + high) // 2, abs(high - low) // 2 + 1, now_ns)
    offset.add(compared)
    if bounds[mine, 0] == bounds[0, 0] and compared.may_be_same:
        offset.same()
    return offset


def _gather(group: dist.ProcessGroup, *values: int) -> torch.Tensor:
    """Of each rank its values, as a row."""
    rows = torch.empty(group.size(), len(values), dtype=torch.int64)
    dist.all_gather_into_tensor(rows.view(-1), torch.tensor(values, dtype=torch.int64), group=group)
    return rows


def _number_of(boot: str) -> int:
    return int.from_bytes(hashlib.sha256(boot.encode()).digest()[:7], "big")
