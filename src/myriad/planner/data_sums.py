"""Seconds of gathers and sums among data-parallel replicas, as the runtime's courier sends them (`comm`).

    NCCL, flat    one ring, which enters and leaves a node once for all its ranks (`collectives`)
    gloo, flat    each rank sends every other one its slice: r ranks of a node share their NICs, and all of
                  them send their slices to everybody outside
    node, switch  level by level (`comm.hierarchy`): the way out shrinks by the ranks of a node

What a rank sends in a gather of S bytes among 2 nodes of 4 (a reduction is the same backwards, a sum both):

    flat     in the node 3 of 8 slices     to the other node 4 of 8 slices
    node     in the node 6 of 8 slices     to the other node 1 of 8 slices

Slices are counted on the runtime's own levels, by the links that they take, and ``auto`` chooses by its rule.
Levels follow each other. Those of gloo are one launch, as a message goes on when it arrives; those of NCCL a
collective each.
"""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from myriad.comm.config import CommConfig
from myriad.comm.hierarchy import (
    HIERARCHIES,
    Hierarchy,
    Sites,
    choose_hierarchy,
    declared_rates,
    make_levels,
)
from myriad.errors import BadInputError
from myriad.planner.cluster import Cluster, Level
from myriad.planner.collectives import group_along, half_sum_seconds, sum_seconds
from myriad.planner.operators import Number

__all__ = ["DataSums", "Sent"]

_LINKS: tuple[Level, ...] = ("node", "network", "spine")
"""By distance (`Sites.distance`)."""


@dataclass(frozen=True)
class Sent:
    """What the busiest rank sends in a gather."""

    num_levels: int
    slices: tuple[int, int, int]
    """Of as many as there are ranks, by distance."""
    peers: tuple[int, int, int]
    """That it sends them to."""


class DataSums:
    """Of the data-parallel groups of a layout: ``size`` ranks, ``stride`` apart."""

    def __init__(self, cluster: Cluster, comm: CommConfig, size: int, stride: int) -> None:
        """Raises `BadInputError` where replicas do not fit the hierarchy that ``comm`` asks for."""
        self.cluster, self.size = cluster, size
        self.ring = group_along(cluster, float(size), float(stride))
        """All as one."""
        self.sites = self._sites(comm)
        """As the runtime sees them."""
        self._groups = _groups(size, stride, _physical(cluster))
        self.hierarchy: Hierarchy = self._settle(comm)
        self.sent = self._sent(comm)

    def half_seconds(self, num_bytes: Number) -> Number:
        """Of a gather that ends with, or a reduction that begins with, ``num_bytes`` on each rank."""
        if self.sent is None:
            return half_sum_seconds(self.ring, num_bytes)
        return self._launch_seconds(self.sent) + self._travel_seconds(self.sent, num_bytes)

    def whole_seconds(self, num_bytes: Number) -> Number:
        """Of a sum for everybody."""
        if self.sent is None:
            return sum_seconds(self.ring, num_bytes)
        num_launches = 1 if self.cluster.on_cpu else 2
        launches = num_launches * self._launch_seconds(self.sent)
        return launches + 2 * self._travel_seconds(self.sent, num_bytes)

    def _launch_seconds(self, sent: Sent) -> float:
        if self.cluster.on_cpu:
            return float(self.ring.launch_seconds)
        links = (self.cluster.link(_LINKS[d]) for d, count in enumerate(sent.peers) if count)
        return sum(link.launch_seconds for link in links)

    def _travel_seconds(self, sent: Sent, num_bytes: Number) -> Number:
        slice_bytes, seconds = num_bytes / self.size, 0.0 * num_bytes
        for distance, (slices, peers) in enumerate(zip(sent.slices, sent.peers, strict=True)):
            if peers:
                latency = self.cluster.link("node" if distance == 0 else "network").latency_seconds
                seconds = seconds + peers * latency + slices * slice_bytes / self._rate(distance, peers)
        return seconds

    def _rate(self, distance: int, peers: int) -> float:
        """Bytes a second of one rank while all send so far."""
        if distance == 0:
            return float(group_along(self.cluster, 1.0 + peers, 1.0).bytes_per_second)
        rates = (self.cluster.link(level).bytes_per_second * self.cluster.ratio(level) for level in _LINKS)
        return min(list(rates)[1 : distance + 1])

    # which hierarchy

    def _settle(self, comm: CommConfig) -> Hierarchy:
        """What the job says; for ``auto`` what the runtime finds quickest when it starts."""
        if comm.hierarchy == "flat" or self.size == 1:
            return "flat"
        sites = self._sites(comm)
        if comm.hierarchy == "auto":
            return self._quickest(sites, comm)
        for ranks in self._groups:
            if _radices(sites, ranks, comm.hierarchy) is None:
                allowed = f"{self.size} replicas stand unevenly on nodes of {sites.node_size}; flat or auto"
                raise BadInputError("comm.hierarchy", comm.hierarchy, allowed)
        return comm.hierarchy

    def _sites(self, comm: CommConfig) -> Sites:
        """Nodes as the job says, else as the launcher will."""
        if comm.node_size is None:
            return Sites(self.cluster.accelerators_per_node, None, comm.island_size)
        return Sites(comm.node_size, comm.switch_size, comm.island_size)

    def _quickest(self, sites: Sites, comm: CommConfig) -> Hierarchy:
        """Of what the groups would choose the one with the fewest levels."""
        rates, on_cpu = declared_rates(comm, sites), self.cluster.on_cpu
        if not (rates or on_cpu):
            return "flat"  # NCCL finds its own way through nodes, unless the links are declared
        chosen = []
        for ranks in self._groups:
            distances = {sites.distance(ranks[0], rank) for rank in ranks[1:]}
            if len(distances) < 2 or not (distances <= set(rates) or on_cpu):
                return "flat"
            known = rates if distances <= set(rates) else self._measured(sites, ranks)
            chosen.append(_choose(sites, ranks, tuple(known.items())))
        return min(chosen, key=HIERARCHIES.index)

    def _measured(self, sites: Sites, ranks: range) -> dict[int, float]:
        """Rates to the first rank at each distance, as the runtime measures them."""
        found: dict[int, float] = {}
        real = _physical(self.cluster)
        for rank in ranks[1:]:
            distance = sites.distance(ranks[0], rank)
            if distance not in found:
                found[distance] = self._rate(real.distance(ranks[0], rank), 1)
        return found

    def _sent(self, comm: CommConfig) -> Sent | None:
        """By the rank that has most to send over the narrowest link; ``None``: one ring of NCCL's does it."""
        if self.size == 1 or (self.hierarchy == "flat" and not self.cluster.on_cpu):
            return None
        sites, real = self._sites(comm), _physical(self.cluster)
        every = [
            _count(ranks, _radices(sites, ranks, self.hierarchy) or (self.size,), real)
            for ranks in self._groups
        ]
        worst = max(every, key=lambda sent: sent.slices[::-1])
        return None if worst.num_levels == 1 and not self.cluster.on_cpu else worst


def _physical(cluster: Cluster) -> Sites:
    return Sites(cluster.accelerators_per_node, cluster.nodes_per_switch)


@lru_cache(maxsize=4096)
def _groups(size: int, stride: int, sites: Sites) -> tuple[range, ...]:
    """Data-parallel groups that stand differently: one, where groups and nodes divide each other."""
    units = (sites.node_size, sites.node_size * (sites.switch_size or 1))
    alike = all(unit % stride == 0 or stride % unit == 0 for unit in units)
    return tuple(range(first, first + size * stride, stride) for first in range(1 if alike else stride))


@lru_cache(maxsize=4096)
def _radices(sites: Sites, ranks: range, hierarchy: Hierarchy) -> tuple[int, ...] | None:
    return sites.radices(ranks, hierarchy)


@lru_cache(maxsize=4096)
def _choose(sites: Sites, ranks: range, rates: tuple[tuple[int, float], ...]) -> Hierarchy:
    return choose_hierarchy(sites, ranks, dict(rates))


@lru_cache(maxsize=4096)
def _count(ranks: range, radices: tuple[int, ...], real: Sites) -> Sent:
    """Of the rank with the fewest others in its node, by the links that its slices take."""
    in_node = Counter(map(real.node, ranks))
    here = min(range(len(ranks)), key=lambda place: in_node[real.node(ranks[place])])
    slices, peers = [0, 0, 0], [0, 0, 0]
    levels = make_levels(here, radices)
    for level in levels:
        for place in level.others:
            distance = real.distance(ranks[here], ranks[level.members[place]])
            slices[distance] += len(level.slices[level.own])
            peers[distance] += 1
    return Sent(len(levels), (slices[0], slices[1], slices[2]), (peers[0], peers[1], peers[2]))
