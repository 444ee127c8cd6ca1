"""Who exchanges what with whom, level by level: inside a node, between nodes, between switches.

Slice ``i`` of a buffer belongs to group rank ``i``. A rank's number is written in mixed radix, outermost
digit first; at each level the ranks that differ in one digit meet. Two nodes of two ranks, radices (2, 2):

    reduce   level inside:  0 sends 1 its slices 1 and 3, gets 1's slices 0 and 2, adds
             level between: 0 sends 2 its sum of slice 2, gets 2's sum of slice 0, adds: slice 0 is done
    gather   the same backwards: slice 2 from 2, then 0 sends 1 slices 0 and 2, gets 1 and 3

So what leaves a node shrinks by the number of ranks in it. One radix is the flat exchange among all. No torch
here.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from myriad.comm.config import CommConfig
from myriad.comm.grid import RankGrid
from myriad.comm.layout import Layout
from myriad.errors import BadInputError

__all__ = [
    "HIERARCHIES",
    "Hierarchy",
    "Level",
    "Sites",
    "check_hierarchy",
    "choose_hierarchy",
    "declared_rates",
    "make_levels",
]

Hierarchy = Literal["flat", "node", "switch"]
HIERARCHIES: tuple[Hierarchy, ...] = ("flat", "node", "switch")
"""The fewest levels first."""

_WORTH_IT = 0.9
"""A hierarchy must promise a time below this share of the flat exchange's: measured rates are noisy."""


@dataclass(frozen=True)
class Level:
    """The ranks that meet at one level, this one among them, in order."""

    members: tuple[int, ...]
    """Group ranks."""
    slices: tuple[tuple[int, ...], ...]
    """By member: the slices whose sums it has after a reduction at this level, and which it has before a
    gather."""
    own: int
    """This rank's place among the members."""

    @property
    def others(self) -> tuple[int, ...]:
        """Places of the other members, the next one first: so that not all send to the same one."""
        count = len(self.members)
        return tuple((self.own + step) % count for step in range(1, count))


def make_levels(rank: int, radices: Sequence[int]) -> tuple[Level, ...]:
    """A rank's levels, innermost first. ``radices``: outermost first; their product is the group's size."""
    levels, size, stride = [], math.prod(radices), 1
    for radix in reversed(radices):
        own = rank // stride % radix
        members = tuple(rank + (place - own) * stride for place in range(radix))
        slices = tuple(_alike(member, stride * radix, size) for member in members)
        if radix > 1:
            levels.append(Level(members, slices, own))
        stride *= radix
    return tuple(levels)


def _alike(rank: int, modulus: int, size: int) -> tuple[int, ...]:
    """Slices that agree with a rank in every digit up to this level."""
    return tuple(range(rank % modulus, size, modulus))


@dataclass(frozen=True)
class Sites:
    """Where ranks stand: consecutive ranks share a node, consecutive nodes a switch."""

    node_size: int
    """Ranks."""
    switch_size: int | None = None
    """Nodes; ``None``: all are under one."""
    island_size: int | None = None
    """Ranks of a node that reach each other better than the rest of it; ``None``: no such parts."""

    def node(self, rank: int) -> int:
        """The number of its node."""
        return rank // self.node_size

    def switch(self, rank: int) -> int:
        """The number of its switch."""
        return self.node(rank) // self.switch_size if self.switch_size else 0

    def distance(self, a: int, b: int) -> int:
        """0 in one node, 1 under one switch, 2 otherwise."""
        return 0 if self.node(a) == self.node(b) else 1 if self.switch(a) == self.switch(b) else 2

    def radices(self, ranks: Sequence[int], hierarchy: Hierarchy) -> tuple[int, ...] | None:
        """The group's size in the hierarchy's digits, outermost first; ``None`` where nodes or switches hold
        unequal numbers of its ranks."""
        by_node = Counter(map(self.node, ranks))
        by_switch = Counter(map(self.switch, ranks))
        if hierarchy == "flat":
            return (len(ranks),)
        counts = {*by_node.values()}, {*by_switch.values()}
        if len(counts[0]) > 1 or (hierarchy == "switch" and len(counts[1]) > 1):
            return None
        inside = self._inside(ranks, len(ranks) // len(by_node))
        if hierarchy == "node":
            return len(by_node), *inside
        return len(by_switch), len(by_node) // len(by_switch), *inside

    def _inside(self, ranks: Sequence[int], count: int) -> tuple[int, ...]:
        """Digits inside a node of ``count`` of the ranks: islands, then ranks of one, where islands hold
        equally many."""
        if self.island_size is None or self.node_size % self.island_size:
            return (count,)
        by_island = Counter(rank // self.island_size for rank in ranks)
        each = next(iter(by_island.values()))
        if len({*by_island.values()}) > 1 or each in (1, count):
            return (count,)
        return count // each, each


def check_hierarchy(layout: Layout, comm: CommConfig) -> None:
    """Whether the data-parallel groups fit the nodes that are asked for. Raises `BadInputError`."""
    if comm.hierarchy not in ("node", "switch") or comm.node_size is None:
        return
    sites = Sites(comm.node_size, comm.switch_size, comm.island_size)
    for ranks in sorted({RankGrid(layout, rank).peers("dp") for rank in range(layout.world)}):
        if sites.radices(ranks, comm.hierarchy) is None:
            listed = ", ".join(map(str, ranks))
            allowed = (
                f"data-parallel ranks {listed} stand unevenly on nodes of {sites.node_size}; flat or auto"
            )
            raise BadInputError("comm.hierarchy", comm.hierarchy, allowed)


def declared_rates(comm: CommConfig, sites: Sites) -> dict[int, float]:
    """Bits a second that one rank gets when all ranks send so far, by distance, as far as declared."""
    rates = {}
    if comm.node_bandwidth is not None:
        rates[0] = comm.node_bandwidth
    if comm.network_bandwidth is not None:
        rates[1] = comm.network_bandwidth / sites.node_size
        if comm.switch_bandwidth is not None:
            ranks_of_switch = sites.node_size * (sites.switch_size or 1)
            rates[2] = min(rates[1], comm.switch_bandwidth / ranks_of_switch)
    return rates


def choose_hierarchy(sites: Sites, ranks: Sequence[int], rates: Mapping[int, float]) -> Hierarchy:
    """What takes a rank the least time to send, of what the group's places allow. ``rates`` by distance."""
    seconds: dict[Hierarchy, float] = {}
    for kind in HIERARCHIES:
        radices = sites.radices(ranks, kind)
        if radices is not None:
            seconds[kind] = _seconds(sites, ranks, radices, rates) / (1.0 if kind == "flat" else _WORTH_IT)
    return min(seconds, key=lambda kind: seconds[kind])


def _seconds(sites: Sites, ranks: Sequence[int], radices: Sequence[int], rates: Mapping[int, float]) -> float:
    """Of the first rank, to send slices of one bit."""
    return sum(
        len(level.slices[level.own]) / rates[sites.distance(ranks[0], ranks[level.members[place]])]
        for level in make_levels(0, radices)
        for place in level.others
    )
