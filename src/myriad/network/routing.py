"""Which links a flow goes over: always a shortest way, and of several what a switch chooses.

    ecmp       a hash of the flow's ports and its UDP source port with the switch's own seed
    adaptive   the link with the least on it of those that the switch sees: its own
    spray      each flow as many, every switch over its links in turn; it has arrived when all have

Only switches forward. A NIC with links in several planes chooses as a switch does. Distances are kept by the
*home* of a target: the switches its port hangs on.

Arrays: F flows, P ports, H homes, S switches.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from myriad.machine import check_memory
from myriad.network.fabric import Fabric, Numbers, Ordinals
from myriad.network.flows import Flows, Paths
from myriad.network.walk import ADAPTIVE, ALIKE, FAR, HASHED, IN_TURN, follow, measure

__all__ = ["Routes", "adaptive", "ecmp", "into_queue_pairs", "spray"]


@dataclass(frozen=True, eq=False)
class Routes:
    """Distances in a fabric."""

    fabric: Fabric

    @property
    def home(self) -> Ordinals:
        """(P) Of each port: number of the set of switches that it hangs on."""
        return self._homes[0]

    @cached_property
    def distance(self) -> npt.NDArray[np.int16]:
        """(H, S) Links from a switch to the nearest of a home's."""
        fabric, (_, first, switch) = self.fabric, self._homes
        start, link = fabric.leaving
        size = (len(first) - 1, fabric.num_vertices - fabric.num_ports)
        check_memory(f"distances between {size[1]} switches", 2.0 * size[0] * size[1])
        out = np.full(size, FAR, dtype=np.int16)
        measure(out, first, switch, start, link, fabric.target, fabric.num_ports)
        return out

    @cached_property
    def most_links(self) -> int:
        """Of any way."""
        reached = self.distance[self.distance < FAR]
        return int(reached.max(initial=0)) + 2

    @cached_property
    def _homes(self) -> tuple[Ordinals, npt.NDArray[np.int64], Ordinals]:
        """Of each port; and the switches of each home as rows of different lengths."""
        fabric, sets = self.fabric, dict[tuple[int, ...], int]()
        start, link = fabric.leaving
        home = np.empty(fabric.num_ports, dtype=np.int32)
        target = fabric.target[link[: start[fabric.num_ports]]].tolist()
        bounds = start[: fabric.num_ports + 1].tolist()
        for port in range(fabric.num_ports):
            key = tuple(sorted(set(target[bounds[port] : bounds[port + 1]])))
            home[port] = sets.setdefault(key, len(sets))
        first = np.concatenate([[0], np.cumsum([len(key) for key in sets])]).astype(np.int64)
        switch = np.array([one for key in sets for one in key], dtype=np.int32)
        return home, first, switch


def into_queue_pairs(flows: Flows, num_queue_pairs: int) -> Flows:
    """Each flow as so many of equal size, which differ in their UDP source port; those of flow f begin at
    f x num_queue_pairs."""
    each = np.tile(np.arange(num_queue_pairs, dtype=np.uint16), len(flows))
    return Flows(
        source=np.repeat(flows.source, num_queue_pairs),
        target=np.repeat(flows.target, num_queue_pairs),
        num_bytes=np.repeat(flows.num_bytes / num_queue_pairs, num_queue_pairs),
        start_seconds=np.repeat(flows.start_seconds, num_queue_pairs),
        entropy=np.repeat(flows.entropy, num_queue_pairs) * np.uint16(num_queue_pairs) + each,
    )


def ecmp(routes: Routes, flows: Flows, seed: int = 0, *, alike: bool = False) -> Paths:
    """By hash: the same seed gives the same paths. ``alike``: all switches hash as one, so that flows which
    met at the first meet again further up."""
    return _walk(routes, flows, seed, ALIKE if alike else HASHED, np.zeros(len(flows)))


def adaptive(routes: Routes, flows: Flows, weights: Numbers | None = None) -> Paths:
    """Flow after flow, each over the links that have the least to carry at its turn; ``weights``: what each
    brings, off: all the same."""
    return _walk(routes, flows, 0, ADAPTIVE, np.ones(len(flows)) if weights is None else weights)


def spray(routes: Routes, flows: Flows, num_ways: int, seed: int = 0) -> tuple[Flows, Paths]:
    """Each flow as ``num_ways`` of equal size; every switch sends what is for the same switches over its
    links in turn."""
    parts = into_queue_pairs(flows, num_ways)
    return parts, _walk(routes, parts, seed, IN_TURN, np.zeros(len(parts)))


def _walk(routes: Routes, flows: Flows, seed: int, rule: int, extra: Numbers) -> Paths:
    fabric = routes.fabric
    start, link = fabric.leaving
    hop = np.empty((len(flows), routes.most_links), dtype=np.int32)
    count = np.zeros(len(flows), dtype=np.int64)
    home = routes.home[flows.target]
    ends = (flows.source, flows.target, flows.entropy, home, routes.distance)
    links = (start, link, fabric.target, fabric.bytes_per_second)
    follow(hop, count, *ends, *links, fabric.num_ports, seed, rule, extra)
    first = np.concatenate([[0], np.cumsum(count)]).astype(np.int64)
    return Paths(first=first, link=hop[np.arange(hop.shape[1]) < count[:, None]])
