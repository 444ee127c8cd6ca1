"""Rates of flows that share links fairly, and when each has arrived.

*Max-min fair*: no flow can have more without another that has no more than it having less. So each flow has a
bottleneck: a full link on its way on which none has more than it. Progressive filling finds the rates
(Bertsekas and Gallager, Data Networks, section 6.5.2): all grow alike; when a link is full, its flows stay as
they are.

Arrays: F flows, L links.
"""

import numpy as np
import numpy.typing as npt

from myriad.network.fabric import Fabric, Numbers
from myriad.network.filling import fill, send
from myriad.network.flows import Flows, Paths

__all__ = ["coupled", "finish_seconds", "latency_seconds", "max_min"]


def max_min(bytes_per_second: Numbers, paths: Paths, limit: Numbers | None = None) -> Numbers:
    """(F) Rate of each flow on links of (L) rates. ``limit``: (F) what each can use at most. A flow that
    goes over no link has its limit, or no bound."""
    most = np.full(len(paths), np.inf) if limit is None else np.asarray(limit, dtype=np.float64)
    order = np.arange(0) if limit is None else np.argsort(most, kind="stable")
    return fill(bytes_per_second, paths.first, paths.link, most, order)


def coupled(paths: Paths, group: npt.NDArray[np.int64]) -> Paths:
    """Flows that can only go at one pace, such as those of a ring, as one over all their links: as often over
    a link as it has members there. ``group[f]``: its number, from 0 without gaps."""
    length = np.diff(paths.first)
    order = np.argsort(np.repeat(group, length), kind="stable")
    total = np.bincount(group, weights=length).astype(np.int64)
    return Paths(first=np.concatenate([[0], np.cumsum(total)]), link=paths.link[order])


def finish_seconds(fabric: Fabric, flows: Flows, paths: Paths, *, tolerance: float = 0.0) -> Numbers:
    """(F) When each flow's last byte has arrived: at every moment all that are under way have max-min rates.
    With a ``tolerance``, flows that would need so much longer than the next one that is done are done in the
    same step, at the rate they have: rates are worked out far less often, and each step is off by no more."""
    rates = fabric.bytes_per_second
    sent = send(rates, paths.first, paths.link, flows.start_seconds, flows.num_bytes, tolerance)
    return sent + latency_seconds(fabric, paths)


def latency_seconds(fabric: Fabric, paths: Paths) -> Numbers:
    """(F) Of a way without queues."""
    owner = np.repeat(np.arange(len(paths)), np.diff(paths.first))
    weights = fabric.latency_seconds[paths.link]
    return np.bincount(owner, weights=weights, minlength=len(paths)).astype(np.float64)
