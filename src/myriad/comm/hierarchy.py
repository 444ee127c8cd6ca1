"""Levels of hierarchical collectives: inside a node, between nodes, between switches.

Slice ``i`` of a buffer belongs to group rank ``i``. A rank's number is written in mixed radix, outermost
digit first. At each level, the ranks that differ in one digit exchange data. Two nodes of two ranks, radices
(2, 2):

    reduce   level inside:  0 sends 1 its slices 1 and 3, gets 1's slices 0 and 2, adds
             level between: 0 sends 2 its sum of slice 2, gets 2's sum of slice 0, adds: slice 0 is done
    gather   the same backwards: slice 2 from 2, then 0 sends 1 slices 0 and 2, gets 1 and 3

So the data that leaves a node shrinks by the number of its ranks. One radix is the flat exchange among all
ranks. This module does not import torch.
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
    "RankPlacement",
    "check_hierarchy",
    "choose_hierarchy",
    "count_levels",
    "count_shard_levels",
    "declared_rates",
    "make_levels",
]

Hierarchy = Literal["flat", "node", "switch"]
HIERARCHIES: tuple[Hierarchy, ...] = ("flat", "node", "switch")
"""The hierarchies, the one with the fewest levels first."""

_WORTH_IT = 0.9
"""A hierarchy must promise a time below this share of the flat exchange's, because measured rates are
noisy."""


_USUAL_NODE = 8
"""GPUs of a node, if neither the job nor the launcher gives a number."""


@dataclass(frozen=True)
class Level:
    """The ranks that exchange data at one level, this rank among them, in order."""

    members: tuple[int, ...]
    """Group ranks of the members."""
    slices: tuple[tuple[int, ...], ...]
    """Slices of each member: a reduction at this level leaves their sums there, and a gather starts from
    them."""
    own: int
    """This rank's index among the members."""

    @property
    def others(self) -> tuple[int, ...]:
        """Indices of the other members, starting after this one, so that not all send to the same member."""
        count = len(self.members)
        return tuple((self.own + step) % count for step in range(1, count))


def make_levels(rank: int, radices: Sequence[int]) -> tuple[Level, ...]:
    """Return a rank's levels, innermost first. ``radices`` are outermost first; their product is the
    group's size."""
    levels, size, stride = [], math.prod(radices), 1
    for radix in reversed(radices):
        own = rank // stride % radix
        members = tuple(rank + (place - own) * stride for place in range(radix))
        slices = tuple(_matching_slices(member, stride * radix, size) for member in members)
        if radix > 1:
            levels.append(Level(members, slices, own))
        stride *= radix
    return tuple(levels)


def _matching_slices(rank: int, modulus: int, size: int) -> tuple[int, ...]:
    """Return the slices that agree with a rank in every digit up to this level."""
    return tuple(range(rank % modulus, size, modulus))


@dataclass(frozen=True)
class RankPlacement:
    """The placement of ranks: consecutive ranks share a node, consecutive nodes a switch."""

    node_size: int
    """Ranks of a node."""
    switch_size: int | None = None
    """Nodes of a switch; ``None`` if all nodes share one switch."""
    island_size: int | None = None
    """Ranks of a node with faster links among them; ``None`` if there are no such islands."""

    def node(self, rank: int) -> int:
        """Return the number of the rank's node."""
        return rank // self.node_size

    def switch(self, rank: int) -> int:
        """Return the number of the rank's switch."""
        return self.node(rank) // self.switch_size if self.switch_size else 0

    def distance(self, a: int, b: int) -> int:
        """Return 0 for ranks of one node, 1 for ranks under one switch, 2 otherwise."""
        return 0 if self.node(a) == self.node(b) else 1 if self.switch(a) == self.switch(b) else 2

    def radices(self, ranks: Sequence[int], hierarchy: Hierarchy) -> tuple[int, ...] | None:
        """Return the group's size in the hierarchy's digits, outermost first.

        ``None`` if nodes or switches hold unequal numbers of its ranks.
        """
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
        """Return the digits inside a node of ``count`` of the ranks: islands, then ranks of an island, if
        islands hold equally many."""
        if self.island_size is None or self.node_size % self.island_size:
            return (count,)
        by_island = Counter(rank // self.island_size for rank in ranks)
        each = next(iter(by_island.values()))
        if len({*by_island.values()}) > 1 or each in (1, count):
            return (count,)
        return count // each, each


def check_hierarchy(layout: Layout, comm: CommConfig) -> None:
    """Check that the data-parallel groups fit the configured nodes. Raises `BadInputError`."""
    if comm.hierarchy not in ("node", "switch") or comm.node_size is None:
        return
    placement = RankPlacement(comm.node_size, comm.switch_size, comm.island_size)
    axes = ("dp_shard", "dp_replicate") if layout.reduces_across else ("dp_cp",)
    grids = [RankGrid(layout, rank) for rank in range(layout.world)]
    for ranks in sorted({grid.peers(axis) for grid in grids for axis in axes}):
        if placement.radices(ranks, comm.hierarchy) is None:
            listed = ", ".join(map(str, ranks))
            allowed = (
                f"data-parallel ranks {listed} stand unevenly on nodes of {placement.node_size}; flat or auto"
            )
            raise BadInputError("comm.hierarchy", comm.hierarchy, allowed)


def declared_rates(comm: CommConfig, placement: RankPlacement) -> dict[int, float]:
    """Return the bits per second of one rank while all ranks send, by distance, as far as declared."""
    rates = {}
    if comm.node_bandwidth is not None:
        rates[0] = comm.node_bandwidth
    if comm.network_bandwidth is not None:
        rates[1] = comm.network_bandwidth / placement.node_size
        if comm.switch_bandwidth is not None:
            ranks_of_switch = placement.node_size * (placement.switch_size or 1)
            rates[2] = min(rates[1], comm.switch_bandwidth / ranks_of_switch)
    return rates


def choose_hierarchy(placement: RankPlacement, ranks: Sequence[int], rates: Mapping[int, float]) -> Hierarchy:
    """Return the hierarchy with the least send time, among those that the placement allows. ``rates`` are
    by distance."""
    seconds: dict[Hierarchy, float] = {}
    for kind in HIERARCHIES:
        radices = placement.radices(ranks, kind)
        if radices is not None:
            seconds[kind] = _seconds(placement, ranks, radices, rates) / (
                1.0 if kind == "flat" else _WORTH_IT
            )
    return min(seconds, key=lambda kind: seconds[kind])


def count_levels(comm: CommConfig, size: int, stride: int, node_size: int | None = None) -> int:
    """Return the number of levels of the data-parallel groups that have their own NCCL communicator.

    It is 0 for flat reductions, whose only level is the group itself. The calculation uses the group of rank
    0, with ``size`` ranks ``stride`` apart. ``node_size`` is the number of ranks of a node if
    ``comm.node_size`` is off; ``None``: 8. On NCCL "auto" is flat unless bandwidths are declared.
    """
    if comm.hierarchy == "flat" or size == 1 or comm.sync_every > 1:
        return 0
    own = RankPlacement(node_size or _USUAL_NODE, None, comm.island_size)
    placement = (
        own if comm.node_size is None else RankPlacement(comm.node_size, comm.switch_size, comm.island_size)
    )
    ranks = range(0, size * stride, stride)
    if comm.hierarchy == "auto":
        rates = declared_rates(comm, placement)
        if not rates or not {placement.distance(0, rank) for rank in ranks[1:]} <= set(rates):
            return 0
        hierarchy = choose_hierarchy(placement, ranks, rates)
    else:
        hierarchy = comm.hierarchy
    found = sum(radix > 1 for radix in placement.radices(ranks, hierarchy) or ())
    return found if found > 1 else 0


def count_shard_levels(comm: CommConfig, layout: Layout, node_size: int | None = None) -> int:
    """Return the number of levels with their own NCCL communicator: of `count_levels`, or of both kinds of
    groups where gradients are also summed across groups."""
    stride = layout.tp * layout.pp
    if not layout.reduces_across:
        return count_levels(comm, layout.num_holders, stride, node_size)
    if comm.hierarchy == "auto":
        return 0
    size = layout.num_shards
    across = count_levels(comm, layout.num_shard_groups, stride * size, node_size)
    return count_levels(comm, size, stride, node_size) + across


def _seconds(
    placement: RankPlacement, ranks: Sequence[int], radices: Sequence[int], rates: Mapping[int, float]
) -> float:
    """Return the seconds that the first rank needs to send slices of one bit."""
    return sum(
        len(level.slices[level.own]) / rates[placement.distance(ranks[0], ranks[level.members[place]])]
        for level in make_levels(0, radices)
        for place in level.others
    )
