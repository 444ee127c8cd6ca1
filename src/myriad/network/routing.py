"""Which links a flow goes over: always a shortest way, and of several what a switch chooses.

    ecmp       a hash of the flow's ports and its UDP source port with the switch's own seed
    adaptive   the link with the least on it of those that the switch sees: its own
    spray      each flow as many, over as many ways; it has arrived when the last of them has

Only switches forward. A NIC with links in several planes chooses as a switch does. Distances are kept by the
*home* of a target: the switches its port hangs on.

Arrays: F flows, H homes, S switches.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numba
import numpy as np
import numpy.typing as npt

from myriad.network.fabric import Fabric, Numbers, Ordinals
from myriad.network.flows import Flows, Paths

__all__ = ["Routes", "adaptive", "ecmp", "into_queue_pairs", "spray"]

_Int64s = npt.NDArray[np.int64]
_FAR = np.int16(2**14)


@dataclass(frozen=True, eq=False)
class Routes:
    """Distances in a fabric."""

    fabric: Fabric

    @cached_property
    def home(self) -> Ordinals:
        """(P) Of each port: number of the set of switches that it hangs on."""
        return self._homes[0]

    @cached_property
    def distance(self) -> npt.NDArray[np.int16]:
        """(H, S) Links from a switch to the nearest of a home's."""
        fabric, (first, switch) = self.fabric, self._homes[1:]
        start, link = fabric.leaving
        num = fabric.num_vertices - fabric.num_ports
        out = np.full((len(first) - 1, num), _FAR, dtype=np.int16)
        _measure(out, first, switch, start, link, fabric.target, fabric.num_ports)
        return out

    @cached_property
    def most_links(self) -> int:
        """Of any way."""
        reached = self.distance[self.distance < _FAR]
        return int(reached.max(initial=0)) + 2

    @cached_property
    def _homes(self) -> tuple[Ordinals, _Int64s, Ordinals]:
        """Of each port; and the switches of each home as rows of different lengths."""
        fabric = self.fabric
        start, link = fabric.leaving
        sets: dict[tuple[int, ...], int] = {}
        home = np.empty(fabric.num_ports, dtype=np.int32)
        target = fabric.target[link[: start[fabric.num_ports]]].tolist()
        bounds = start[: fabric.num_ports + 1].tolist()
        for port in range(fabric.num_ports):
            key = tuple(sorted(set(target[bounds[port] : bounds[port + 1]])))
            home[port] = sets.setdefault(key, len(sets))
        first = np.concatenate([[0], np.cumsum([len(key) for key in sets])]).astype(np.int64)
        switch = np.array([one for key in sets for one in key], dtype=np.int32)
        return home, first, switch


@numba.njit(cache=True)
def _measure(out, first, switch, start, link, target, num_ports):  # type: ignore[no-untyped-def]
    queue = np.empty(out.shape[1], dtype=np.int32)
    for home in range(out.shape[0]):
        tail = 0
        for index in range(first[home], first[home + 1]):
            queue[tail] = switch[index]
            out[home, switch[index] - num_ports] = 0
            tail += 1
        head = 0
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
    return out


def into_queue_pairs(flows: Flows, num_queue_pairs: int) -> Flows:
    """Each flow as so many of equal size, which differ in their UDP source port; those of flow f begin at
    f x num_queue_pairs."""
    each = np.tile(np.arange(num_queue_pairs, dtype=np.uint16), len(flows))
    return replace(
        flows,
        source=np.repeat(flows.source, num_queue_pairs),
        target=np.repeat(flows.target, num_queue_pairs),
        num_bytes=np.repeat(flows.num_bytes / num_queue_pairs, num_queue_pairs),
        start_seconds=np.repeat(flows.start_seconds, num_queue_pairs),
        entropy=np.repeat(flows.entropy, num_queue_pairs) * np.uint16(num_queue_pairs) + each,
    )


def ecmp(routes: Routes, flows: Flows, seed: int = 0) -> Paths:
    """By hash: the same seed gives the same paths."""
    return _walk(routes, flows, np.uint64(seed), _HASHED, np.zeros(len(flows)))


def adaptive(routes: Routes, flows: Flows, weights: Numbers | None = None) -> Paths:
    """Flow after flow, each over the links that have the least to carry at its turn; ``weights``: what each
    brings, off: all the same."""
    return _walk(routes, flows, np.uint64(0), _ADAPTIVE, np.ones(len(flows)) if weights is None else weights)


def spray(routes: Routes, flows: Flows, num_ways: int, seed: int = 0) -> tuple[Flows, Paths]:
    """Each flow as ``num_ways`` of equal size over ways that differ, as far as there are so many."""
    parts = into_queue_pairs(flows, num_ways)
    turn = np.tile(np.arange(num_ways, dtype=np.float64), len(flows))
    whole = replace(parts, entropy=np.repeat(flows.entropy, num_ways))
    return parts, _walk(routes, whole, np.uint64(seed), _IN_TURN, turn)


_HASHED, _IN_TURN, _ADAPTIVE = 0, 1, 2


def _walk(routes: Routes, flows: Flows, seed: np.uint64, rule: int, extra: Numbers) -> Paths:
    fabric = routes.fabric
    start, link = fabric.leaving
    hop = np.empty((len(flows), routes.most_links), dtype=np.int32)
    count = np.zeros(len(flows), dtype=np.int64)
    home = routes.home[flows.target]
    _follow(
        hop, count, flows.source, flows.target, flows.entropy, home, routes.distance, start, link,
        fabric.target, fabric.bytes_per_second, fabric.num_ports, seed, rule, extra,
    )  # fmt: skip
    first = np.concatenate([[0], np.cumsum(count)]).astype(np.int64)
    taken = np.arange(hop.shape[1]) < count[:, None]
    return Paths(first=first, link=hop[taken])


@numba.njit(cache=True)
def _follow(  # type: ignore[no-untyped-def]
    hop, count, source, target, entropy, home, distance, start, link, end, rate, num_ports, seed, rule, extra
):
    load = np.zeros(len(end))
    options = np.empty(max(1, np.max(start[1:] - start[:-1])), dtype=np.int32)
    for flow in range(len(source)):
        here, goal, near = source[flow], target[flow], distance[home[flow]]
        while here != goal:
            num = _options(options, here, goal, near, start, link, end, num_ports)
            taken = _choice(
                options[:num], rule, seed, here, source[flow], goal, entropy[flow], extra[flow], load
            )
            hop[flow, count[flow]] = taken
            count[flow] += 1
            if rule == 2:
                load[taken] += extra[flow] / rate[taken]
            here = end[taken]


@numba.njit(cache=True)
def _options(options, here, goal, near, start, link, end, num_ports):  # type: ignore[no-untyped-def]
    """Links from here that lie on a shortest way."""
    num = 0
    if here >= num_ports and near[here - num_ports] == 0:  # its own cables, the other way
        for index in range(start[goal], start[goal + 1]):
            if end[link[index]] == here:
                options[num] = link[index] ^ 1
                num += 1
        return num
    least = 32767
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
def _choice(options, rule, seed, here, source, goal, entropy, extra, load):  # type: ignore[no-untyped-def]
    if len(options) == 1:
        return options[0]
    own = _mixed(seed ^ _mixed(np.uint64(here) + np.uint64(1)))
    flow = (np.uint64(source) << np.uint64(40)) ^ (np.uint64(goal) << np.uint64(16)) ^ np.uint64(entropy)
    drawn = _mixed(own ^ _mixed(flow))
    if rule == 0:
        return options[drawn % np.uint64(len(options))]
    if rule == 1:
        return options[(drawn + np.uint64(extra)) % np.uint64(len(options))]
    best = options[0]
    for link in options:
        if load[link] < load[best]:
            best = link
    return best


@numba.njit(cache=True)
def _mixed(number):  # type: ignore[no-untyped-def]
    """The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): each bit depends on all."""
    number = np.uint64(number) + np.uint64(0x9E3779B97F4A7C15)
    number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return number ^ (number >> np.uint64(31))
