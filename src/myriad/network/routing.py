"""Routing: the links that each flow takes, always on a shortest path.

    ecmp       the switch hashes the flow's ports and UDP source port with a seed of its own
    adaptive   the switch takes its least loaded link
    spray      each flow is split in many; every switch uses its links in turn, and the flow has arrived
               when all parts have

Only switches forward packets. A NIC with links in several planes chooses among them as a switch does.
Distances are stored for each *home*: the set of switches that a target port is connected to.

At a switch, the *options* for a flow are the links to switches one hop nearer to the target's home; at the
NIC, the links to the nearest switches; at the last switch, the cables of the target port. The inner loops
are compiled.

Arrays: F flows, P ports, H homes, S switches.
"""

from dataclasses import dataclass
from functools import cached_property

import numba
import numpy as np
import numpy.typing as npt

from myriad.network.fabric import Fabric, Flows, Numbers, Ordinals, Paths
from myriad.system.machine import check_memory

__all__ = ["Routes", "adaptive", "ecmp", "into_queue_pairs", "spray"]


@dataclass(frozen=True, eq=False)
class Routes:
    """Distances between the switches of a fabric."""

    fabric: Fabric

    @property
    def home(self) -> Ordinals:
        """(P) Home of each port: the number of its set of switches."""
        return self._homes[0]

    @cached_property
    def distance(self) -> npt.NDArray[np.int16]:
        """(H, S) Hops from each switch to the nearest switch of each home."""
        fabric, (_, first, switch) = self.fabric, self._homes
        start, link = fabric.leaving
        size = (len(first) - 1, fabric.num_vertices - fabric.num_ports)
        check_memory(f"distances between {size[1]} switches", 2.0 * size[0] * size[1])
        out = np.full(size, UNREACHABLE, dtype=np.int16)
        measure_distances(out, first, switch, start, link, fabric.target, fabric.num_ports)
        return out

    @cached_property
    def most_links(self) -> int:
        """The number of links of the longest path."""
        reached = self.distance[self.distance < UNREACHABLE]
        return int(reached.max(initial=0)) + 2

    @cached_property
    def _homes(self) -> tuple[Ordinals, npt.NDArray[np.int64], Ordinals]:
        """Home of each port; and the switches of each home as rows of different lengths."""
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
    """Split each flow in queue pairs of equal size that differ in their UDP source port. Those of flow f
    begin at f x num_queue_pairs."""
    each = np.tile(np.arange(num_queue_pairs, dtype=np.uint16), len(flows))
    return Flows(
        source=np.repeat(flows.source, num_queue_pairs),
        target=np.repeat(flows.target, num_queue_pairs),
        num_bytes=np.repeat(flows.num_bytes / num_queue_pairs, num_queue_pairs),
        start_seconds=np.repeat(flows.start_seconds, num_queue_pairs),
        entropy=np.repeat(flows.entropy, num_queue_pairs) * np.uint16(num_queue_pairs) + each,
    )


def ecmp(routes: Routes, flows: Flows, seed: int = 0, *, alike: bool = False) -> Paths:
    """Route by hash: the same seed gives the same paths. With ``alike`` all switches use the same hash, so
    flows that share a link at the first switch share links further up."""
    return _route(routes, flows, seed, SAME_HASH if alike else HASHED, np.zeros(len(flows)))


def adaptive(routes: Routes, flows: Flows, weights: Numbers | None = None) -> Paths:
    """Route flows one after the other, each over the least loaded links at that time. ``weights``: the load
    that each flow adds; default: the same for all."""
    return _route(routes, flows, 0, ADAPTIVE, np.ones(len(flows)) if weights is None else weights)


def spray(routes: Routes, flows: Flows, num_ways: int, seed: int = 0) -> tuple[Flows, Paths]:
    """Split each flow in ``num_ways`` of equal size; every switch sends the flows to one home over its links
    in turn."""
    parts = into_queue_pairs(flows, num_ways)
    return parts, _route(routes, parts, seed, ROUND_ROBIN, np.zeros(len(parts)))


def _route(routes: Routes, flows: Flows, seed: int, rule: int, extra: Numbers) -> Paths:
    fabric = routes.fabric
    start, link = fabric.leaving
    hop = np.empty((len(flows), routes.most_links), dtype=np.int32)
    count = np.zeros(len(flows), dtype=np.int64)
    home = routes.home[flows.target]
    ends = (flows.source, flows.target, flows.entropy, home, routes.distance)
    links = (start, link, fabric.target, fabric.bytes_per_second)
    route_flows(hop, count, *ends, *links, fabric.num_ports, seed, rule, extra)
    first = np.concatenate([[0], np.cumsum(count)]).astype(np.int64)
    return Paths(first=first, link=hop[np.arange(hop.shape[1]) < count[:, None]])


HASHED, ROUND_ROBIN, ADAPTIVE, SAME_HASH = 0, 1, 2, 3
UNREACHABLE = 2**14
"""Distance of a switch without a path to the home."""

_Int64s = npt.NDArray[np.int64]
_Int16s = npt.NDArray[np.int16]


@numba.njit(cache=True)
def measure_distances(
    out: _Int16s,
    first: _Int64s,
    switch: Ordinals,
    start: _Int64s,
    link: Ordinals,
    target: Ordinals,
    num_ports: int,
) -> None:
    """Fill ``out`` (H, S) with the hops from each switch to the nearest switch of home h, which are
    ``switch[first[h] : first[h + 1]]``, by breadth-first search; ``start`` and ``link`` as in
    `Fabric.leaving`."""
    queue = np.empty(out.shape[1], dtype=np.int32)
    for home in range(out.shape[0]):
        head, tail = 0, 0
        for index in range(first[home], first[home + 1]):
            queue[tail] = switch[index]
            out[home, switch[index] - num_ports] = 0
            tail += 1
        while head < tail:
            here = queue[head]
            head += 1
            beyond = out[home, here - num_ports] + 1
            for index in range(start[here], start[here + 1]):
                there = target[link[index]]
                if there >= num_ports and out[home, there - num_ports] > beyond:
                    out[home, there - num_ports] = beyond
                    queue[tail] = there
                    tail += 1


@numba.njit(cache=True)
def route_flows(
    hop: npt.NDArray[np.int32],
    count: _Int64s,
    source: Ordinals,
    target: Ordinals,
    entropy: npt.NDArray[np.uint16],
    home: Ordinals,
    distance: _Int16s,
    start: _Int64s,
    link: Ordinals,
    end: Ordinals,
    rate: Numbers,
    num_ports: int,
    seed: int,
    rule: int,
    extra: Numbers,
) -> None:
    """Fill ``hop[f, : count[f]]`` with the links of each flow, by one rule:

    HASHED       the hash of the switch; SAME_HASH: one hash for all switches
    ROUND_ROBIN  the link after the last one that the switch took for this home; the hash gives the first
    ADAPTIVE     the link with the least load, to which the flow adds ``extra[f]``
    """
    load = np.zeros(len(end))
    turn = np.zeros((distance.shape[0], len(start)) if rule == ROUND_ROBIN else (1, 1), dtype=np.int32)
    options = np.empty(max(1, np.max(start[1:] - start[:-1])), dtype=np.int32)
    for flow in range(len(source)):
        here, goal, near = source[flow], target[flow], distance[home[flow]]
        while here != goal:
            num = _options(options, here, goal, near, start, link, end, num_ports)
            if rule == ADAPTIVE:
                taken = _least_loaded(options[:num], load)
                load[taken] += extra[flow] / rate[taken]
            elif rule == ROUND_ROBIN:
                drawn = _hash_flow(seed, here, 0, home[flow], 0) + np.uint64(turn[home[flow], here])
                taken = options[drawn % np.uint64(num)]
                turn[home[flow], here] += 1
            else:
                own = 0 if rule == SAME_HASH else here
                taken = options[_hash_flow(seed, own, source[flow], goal, entropy[flow]) % np.uint64(num)]
            hop[flow, count[flow]] = taken
            count[flow] += 1
            here = end[taken]


@numba.njit(cache=True)
def _options(
    options: npt.NDArray[np.int32],
    here: int,
    goal: int,
    near: _Int16s,
    start: _Int64s,
    link: Ordinals,
    end: Ordinals,
    num_ports: int,
) -> int:
    """Write the options of a flow at a vertex to ``options`` and return how many there are."""
    num = 0
    if here >= num_ports and near[here - num_ports] == 0:  # a cable's other direction is its neighbour
        for index in range(start[goal], start[goal + 1]):
            if end[link[index]] == here:
                options[num] = link[index] ^ 1
                num += 1
        return num
    least = UNREACHABLE
    if here >= num_ports:
        least = near[here - num_ports] - 1
    else:
        for index in range(start[here], start[here + 1]):
            least = min(least, near[end[link[index]] - num_ports])
    for index in range(start[here], start[here + 1]):
        there = end[link[index]]
        if there >= num_ports and near[there - num_ports] == least:
            options[num] = link[index]
            num += 1
    return num


@numba.njit(cache=True)
def _least_loaded(options: npt.NDArray[np.int32], load: Numbers) -> int:
    best = options[0]
    for link in options:
        if load[link] < load[best]:
            best = link
    return best


@numba.njit(cache=True)
def _hash_flow(seed: int, here: int, source: int, goal: int, entropy: int) -> np.uint64:
    """Return a switch's hash of a flow; each switch mixes in a seed of its own."""
    own = _mix(np.uint64(seed) ^ _mix(np.uint64(here) + np.uint64(1)))
    flow = (np.uint64(source) << np.uint64(40)) ^ (np.uint64(goal) << np.uint64(16)) ^ np.uint64(entropy)
    return _mix(own ^ _mix(flow))


@numba.njit(cache=True)
def _mix(number: np.uint64) -> np.uint64:
    """SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): each bit of the result depends on all input bits."""
    number = number + np.uint64(0x9E3779B97F4A7C15)
    number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return number ^ (number >> np.uint64(31))
