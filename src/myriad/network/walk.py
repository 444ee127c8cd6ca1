"""The way of each flow, link by link: the inner loops of `routing`, compiled.

At a switch, the *options* for a flow are the links to switches one nearer to its target's; at the NIC, those
to the nearest switches; at the last switch, the target's own cables.
"""

import numba
import numpy as np
import numpy.typing as npt

from myriad.network.fabric import Numbers, Ordinals

__all__ = ["ADAPTIVE", "ALIKE", "FAR", "HASHED", "IN_TURN", "follow", "measure"]

HASHED, IN_TURN, ADAPTIVE, ALIKE = 0, 1, 2, 3
FAR = 2**14
"""No way leads there."""

_Int64s = npt.NDArray[np.int64]
_Int16s = npt.NDArray[np.int16]


@numba.njit(cache=True)
def measure(
    out: _Int16s,
    first: _Int64s,
    switch: Ordinals,
    start: _Int64s,
    link: Ordinals,
    target: Ordinals,
    num_ports: int,
) -> None:
    """Fills ``out`` (H, S): links from each switch to the nearest of home h's, ``switch[first[h] :
    first[h + 1]]``, by searching in breadth; ``start``, ``link`` as `Fabric.leaving`."""
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
def follow(
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
    """Fills ``hop[f, : count[f]]`` with links.

    HASHED    by the switch's hash; ALIKE: by one that all have
    IN_TURN   after the last one that the switch took for this home; the hash says where it begins
    ADAPTIVE  the link with the least load, to which the flow adds ``extra[f]``
    """
    load = np.zeros(len(end))
    turn = np.zeros((distance.shape[0], len(start)) if rule == IN_TURN else (1, 1), dtype=np.int32)
    options = np.empty(max(1, np.max(start[1:] - start[:-1])), dtype=np.int32)
    for flow in range(len(source)):
        here, goal, near = source[flow], target[flow], distance[home[flow]]
        while here != goal:
            num = _options(options, here, goal, near, start, link, end, num_ports)
            if rule == ADAPTIVE:
                taken = _least_loaded(options[:num], load)
                load[taken] += extra[flow] / rate[taken]
            elif rule == IN_TURN:
                drawn = _drawn(seed, here, 0, home[flow], 0) + np.uint64(turn[home[flow], here])
                taken = options[drawn % np.uint64(num)]
                turn[home[flow], here] += 1
            else:
                own = 0 if rule == ALIKE else here
                taken = options[_drawn(seed, own, source[flow], goal, entropy[flow]) % np.uint64(num)]
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
    """How many there are, after writing them down."""
    num = 0
    if here >= num_ports and near[here - num_ports] == 0:  # a cable's other direction is its neighbour
        for index in range(start[goal], start[goal + 1]):
            if end[link[index]] == here:
                options[num] = link[index] ^ 1
                num += 1
        return num
    least = FAR
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
def _drawn(seed: int, here: int, source: int, goal: int, entropy: int) -> np.uint64:
    """What a switch's hash makes of a flow; each switch mixes in a seed of its own."""
    own = _mixed(np.uint64(seed) ^ _mixed(np.uint64(here) + np.uint64(1)))
    flow = (np.uint64(source) << np.uint64(40)) ^ (np.uint64(goal) << np.uint64(16)) ^ np.uint64(entropy)
    return _mixed(own ^ _mixed(flow))


@numba.njit(cache=True)
def _mixed(number: np.uint64) -> np.uint64:
    """SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): each bit of the result depends on all."""
    number = number + np.uint64(0x9E3779B97F4A7C15)
    number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return number ^ (number >> np.uint64(31))
