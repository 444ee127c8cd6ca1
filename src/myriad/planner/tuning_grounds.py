"""The figures that `myriad.planner.tuning` chooses by, for a picture: what the slowest flow has with 1, 2,
4 and more queue pairs, and the hours that flaps cost with each timeout."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from myriad.planner.cluster import Cluster
from myriad.planner.tuning import DEFAULT_TIMEOUT, Line, is_sprayed, most_queue_pairs, slowest_ratio

if TYPE_CHECKING:
    from myriad.network.flaps import Habits

__all__ = ["Grounds", "grounds"]

_READ = ("NCCL_IB_QPS_PER_CONNECTION", "NCCL_IB_TIMEOUT")
_TIMEOUTS = range(14, 25)
"""That `myriad.network.flaps.advise` chooses from."""


@dataclass(frozen=True)
class Grounds:
    """Of one cluster."""

    slowest: tuple[tuple[int, float], ...]
    """Queue pairs, and what the slowest flow of hashed rings between switches has of its rate with so many;
    none where switches choose for each packet."""
    num_queue_pairs: int
    """That are asked for."""
    hours: tuple[tuple[int, float], ...]
    """NCCL_IB_TIMEOUT, and hours that flaps cost in a month with it."""
    timeout: int
    """That is asked for."""


def grounds(cluster: Cluster, habits: "Habits", lines: Sequence[Line]) -> Grounds | None:
    """``lines``: what `tune` says of it; ``None``: the cluster has no RDMA, whose settings these are."""
    from myriad.network.flaps import fate
    from myriad.network.retransmission import Timers
    from myriad.network.routing import Routes
    from myriad.planner.cluster_fabric import fabric_of

    nics = cluster.nics
    if nics is None or nics.transport == "tcp":
        return None
    asked = {line.name: int(line.value) for line in lines if line.name in _READ and line.value}
    adaptive = nics.transport == "roce" and nics.adaptive_retransmission
    fates = [fate(Timers(timeout, adaptive=adaptive), habits) for timeout in _TIMEOUTS]
    slowest: list[tuple[int, float]] = []
    if not is_sprayed(nics):
        routes = Routes(fabric_of(cluster))
        counts = [2**power for power in range(most_queue_pairs().bit_length())]
        slowest = [(count, slowest_ratio(routes, count)) for count in counts]
    return Grounds(
        slowest=tuple(slowest),
        num_queue_pairs=asked.get(_READ[0], 1),
        hours=tuple((one.timers.timeout, one.hours_per_month) for one in fates),
        timeout=asked.get(_READ[1], DEFAULT_TIMEOUT),
    )
