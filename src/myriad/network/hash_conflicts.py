"""ECMP hash conflicts: flows that hash to the same uplink, exactly at one switch and sampled on a fabric.

One switch (`conflicts`): n flows of q queue pairs each over m uplinks that each carry s flows are n q balls
in m bins of s q places. The fullest bin decides: its flows have min(1, s q / load) of their rate, and a flow
is done when its last queue pair is.

    P(no bin above k) = n! [x^n] (1 + x + x^2/2! + ... + x^k/k!)^m / m^n

It is computed with Poisson variables conditioned on the sum n, so that no number gets large; the power is
taken by Fourier transform. The hash is assumed to be uniform, which agrees with what `network.routing` draws
from real port numbers.

    hash       as above; alike: as above, and on a fabric all switches use the same hash
    adaptive   each ball goes to the emptiest bin: no bin holds more than the mean, rounded up
    spray      packet by packet: all uplinks act as one

A fabric (`sample_conflicts`): each port of a node sends to the same port of the next node of its ring, as
data parallelism does when the other ranks of a node are its tensor-parallel group. All flows run at the same
time. Each draw gives every switch another seed. A flow that is split into queue pairs of equal size is as
fast as the slowest of them.

    packed    rings of neighbours: most flows stay under one switch
    spread    the next node is under another switch, as long as there is one
    random    as a scheduler places nodes that does not know the switches

Arrays: K draws, F flows, N nodes.
"""

from dataclasses import dataclass
from math import ceil, lgamma, log
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from myriad.errors import BadInputError
from myriad.network.fabric import Fabric, Flows, Numbers, Paths
from myriad.network.max_min import max_min
from myriad.network.routing import Routes, adaptive, ecmp, into_queue_pairs, spray
from myriad.system.machine import check_memory

__all__ = [
    "MOST_BALLS",
    "Conflicts",
    "Rule",
    "SampledConflicts",
    "conflicts",
    "fullest_bin_probabilities",
    "node_order",
    "port_limited_rates",
    "ring_flows",
    "sample_conflicts",
]

Rule = Literal["hash", "alike", "adaptive", "spray"]

MOST_BALLS = 2**16
"""Largest flows x queue pairs; above that the computation would take minutes."""
_NEVER = 1e-12


@dataclass(frozen=True)
class Conflicts:
    """Hash conflicts of flows that leave one switch at the same time."""

    slowest_ratio: float
    """Expected rate of the slowest flow, relative to its rate alone."""
    mean_ratio: float
    """Expected rate of any flow, likewise."""
    conflict_probability: float
    """Probability that some uplink is overloaded."""
    flow_probability: float
    """Probability that a given flow, or one of its queue pairs, is on an overloaded uplink."""


def conflicts(
    num_flows: int, num_uplinks: int, *, split: float = 1.0, queue_pairs: int = 1, rule: Rule = "hash"
) -> Conflicts:
    """Return the hash conflicts at one switch. ``split`` is the number of flows that an uplink carries at
    full rate. Raises `BadInputError`."""
    for key, value in (("flows", num_flows), ("uplinks", num_uplinks), ("queue_pairs", queue_pairs)):
        if value < 1:
            raise BadInputError(key, value, "at least 1")
    balls = num_flows * queue_pairs
    if balls > MOST_BALLS:
        raise BadInputError("flows x queue_pairs", balls, f"at most {MOST_BALLS}")
    places = split * queue_pairs
    if rule == "spray":
        return _certain(split * num_uplinks / num_flows)
    if rule == "adaptive":
        return _certain(places / ceil(balls / num_uplinks))
    chance = fullest_bin_probabilities(balls, num_uplinks)
    share = np.minimum(1.0, places / np.maximum(1, np.arange(len(chance))))
    own = _own_bin(balls, num_uplinks)
    tight = share < 1
    ratio = np.minimum(1.0, places / np.arange(1, len(own) + 1))
    worst = _worst_of(own, queue_pairs)
    return Conflicts(
        slowest_ratio=float(chance @ share),
        mean_ratio=float(worst @ ratio),
        conflict_probability=float(chance[tight].sum()),
        flow_probability=float(worst[ratio < 1].sum()),
    )


def _certain(ratio: float) -> Conflicts:
    full = min(1.0, ratio)
    over = float(full < 1)
    return Conflicts(full, full, over, over)


def fullest_bin_probabilities(num_balls: int, num_bins: int) -> Numbers:
    """Return at index k the probability that the fullest bin holds k balls."""
    at_most = [0.0]
    while len(at_most) <= num_balls and (at_most[-1] < 0.5 or at_most[-1] - at_most[-2] > _NEVER):
        at_most.append(_none_above(len(at_most), num_balls, num_bins))
    return np.diff(np.array(at_most) / at_most[-1], prepend=0.0).clip(0.0)


def _none_above(k: int, num_balls: int, num_bins: int) -> float:
    if k * num_bins < num_balls:
        return 0.0
    if k >= num_balls:
        return 1.0
    mean = num_balls / num_bins
    count = np.arange(k + 1)
    held = np.exp(count * log(mean) - mean - np.array([lgamma(one + 1) for one in count]))
    most = min(k * num_bins, 8 * num_balls + 64)  # larger sums are so rare that their aliases do not matter
    size = 2 ** ceil(np.log2(most + 1))
    total = np.fft.irfft(np.fft.rfft(held, size) ** num_bins, size)[num_balls]
    exactly = np.exp(num_balls * log(num_balls) - num_balls - lgamma(num_balls + 1))
    return float(min(1.0, total / exactly))


def _own_bin(num_balls: int, num_bins: int) -> Numbers:
    """Return at index k - 1 the probability that a given ball is in a bin of k: the others are binomial."""
    others, chance = num_balls - 1, 1 / num_bins
    if num_bins == 1:
        return np.eye(num_balls)[-1]
    count = np.arange(min(num_balls, ceil(others * chance) * 4 + 64))
    ways = lgamma(others + 1) - np.array([lgamma(k + 1) + lgamma(others - k + 1) for k in count])
    return np.exp(ways + count * log(chance) + (others - count) * log(1 - chance))


def _worst_of(own: Numbers, queue_pairs: int) -> Numbers:
    """Return the distribution of the fullest bin of a flow's queue pairs, taken as independent: at most 3 %
    off the mean."""
    return np.diff(np.cumsum(own).clip(0.0, 1.0) ** queue_pairs, prepend=0.0)


Placement = Literal["packed", "spread", "random"]

_WAYS = 64
"""Parts of a sprayed flow: twice the uplinks of a switch with 64 ports, so that loads are nearly equal."""
_ENTRY_BYTES = 64
"""Memory for each link of each queue pair's path, with what is computed from it."""
_FULL = 1 - 1e-9


@dataclass(frozen=True, eq=False)
class SampledConflicts:
    """Hash conflicts by draw (K), as ratios of the rates that flows have if only NIC ports limit them."""

    slowest_ratio: Numbers
    """Ratio of the slowest flow, which sets the speed of its ring."""
    mean_ratio: Numbers
    """Mean over all flows."""
    held_up_ratio: Numbers
    """Share of the flows below their full rate."""


def node_order(routes: Routes, placement: str, seed: int = 0) -> npt.NDArray[np.int64]:
    """Return (N) the node at each place of a placement. Raises `BadInputError`."""
    fabric = routes.fabric
    if placement not in get_args(Placement):
        raise BadInputError("--placement", placement, f"one of {', '.join(get_args(Placement))}")
    if placement == "random":
        return np.random.default_rng(seed).permutation(fabric.num_nodes)
    above = routes.home[:: fabric.ports_per_node]
    packed = np.argsort(above, kind="stable")
    if placement == "packed":
        return packed
    count = np.bincount(above)
    place = np.arange(fabric.num_nodes) - np.repeat(np.cumsum(count) - count, count)
    return packed[np.argsort(place, kind="stable")]


def ring_flows(fabric: Fabric, order: npt.NDArray[np.int64], ring_nodes: int) -> Flows:
    """Return the flows of rings of ``ring_nodes`` consecutive nodes, a ring for each port; the nodes left
    over form a shorter ring."""
    place = np.arange(len(order))
    first = place // ring_nodes * ring_nodes
    size = np.minimum(ring_nodes, len(order) - first)
    following = order[first + (place - first + 1) % size]
    rail = np.arange(fabric.ports_per_node)
    source = (order[:, None] * fabric.ports_per_node + rail).reshape(-1)
    target = (following[:, None] * fabric.ports_per_node + rail).reshape(-1)
    moves = source != target
    return Flows(
        source=source[moves].astype(np.int32),
        target=target[moves].astype(np.int32),
        num_bytes=np.ones(int(moves.sum())),
        start_seconds=np.zeros(int(moves.sum())),
        entropy=np.zeros(int(moves.sum()), dtype=np.uint16),
    )


def sample_conflicts(
    routes: Routes, flows: Flows, *, rule: Rule = "hash", queue_pairs: int = 1, draws: int = 1, seed: int = 0
) -> SampledConflicts:
    """Sample the hash conflicts of flows that run at the same time. Raises `BadInputError` if memory does
    not suffice."""
    if queue_pairs < 1 or draws < 1:
        key = "--queue-pairs" if queue_pairs < 1 else "--draws"
        raise BadInputError(key, min(queue_pairs, draws), "at least 1")
    parts = _WAYS if rule == "spray" else queue_pairs
    check_memory(f"{len(flows)} flows x {parts}", len(flows) * parts * routes.most_links * _ENTRY_BYTES)
    most = port_limited_rates(routes.fabric, flows)
    columns = []
    for draw in range(draws if rule != "adaptive" else 1):  # adaptive routing is deterministic
        paths = _routed(routes, flows, rule, queue_pairs, seed + draw)
        rates = max_min(routes.fabric.bytes_per_second, paths).reshape(-1, parts)
        ratio = np.minimum(1.0, parts * rates.min(1) / most)
        columns.append((ratio.min(initial=1.0), _mean(ratio), _mean(ratio < _FULL)))
    slowest, mean, held_up = np.array(columns).T
    return SampledConflicts(slowest, mean, held_up)


def _mean(values: npt.NDArray[np.float64] | npt.NDArray[np.bool_]) -> float:
    return float(values.mean()) if len(values) else 0.0


def _routed(routes: Routes, flows: Flows, rule: Rule, queue_pairs: int, seed: int) -> Paths:
    if rule == "spray":
        return spray(routes, flows, _WAYS, seed)[1]
    parts = into_queue_pairs(flows, queue_pairs)
    return adaptive(routes, parts) if rule == "adaptive" else ecmp(routes, parts, seed, alike=rule == "alike")


def port_limited_rates(fabric: Fabric, flows: Flows) -> Numbers:
    """Return (F) the rates of flows that only NIC ports limit; a port carries the sum of its links."""
    rates = np.bincount(fabric.source, weights=fabric.bytes_per_second, minlength=fabric.num_vertices)
    alone = rates[: fabric.num_ports].astype(np.float64)
    both = np.stack([flows.source, flows.target + fabric.num_ports], axis=1)
    first = 2 * np.arange(len(flows) + 1, dtype=np.int64)
    return max_min(np.concatenate([alone, alone]), Paths(first, both.reshape(-1).astype(np.int32)))
