"""Seconds of collectives among ranks of the grid, by size, level and algorithm.

A group along an axis has ``size`` ranks, ``stride`` apart in rank number, or in runs of neighbours that are
``stride`` apart (`RankRun`). ``inside`` of them share a node, and the ring crosses from node to node once for
each node. All groups of one kind communicate at the same time, each accelerator with its share of the NICs.
So a group with several ranks in a node has several shares.

    ring   (n - 1) steps, each rank sends (n - 1)/n of the bytes   all-gather, reduce-scatter
    tree   2 log2(n) steps, each rank sends all bytes twice        small all-reduces

An all-reduce by ring is a reduce-scatter and an all-gather.

`DpCollectives` gives the seconds of collectives among data-parallel replicas, as the runtime's communication
scheduler issues them (`comm`).

    NCCL, flat    one ring, which enters and leaves a node once for all its ranks
    gloo, flat    each rank sends every other one its slice: r ranks of a node share their NICs, and all of
                  them send their slices to every rank outside
    node, switch  level by level (`comm.hierarchy`): the traffic between nodes shrinks by the ranks of a node

The slices that a rank sends in an all-gather of S bytes among 2 nodes of 4 (a reduce-scatter is the reverse,
an all-reduce is both):

    flat     in the node 3 of 8 slices     to the other node 4 of 8 slices
    node     in the node 6 of 8 slices     to the other node 1 of 8 slices

Slices are counted on the runtime's own levels, by the links that they use, and ``auto`` chooses by the
runtime's rule. Levels run one after the other. All levels of gloo are one launch, because a message is
forwarded when it arrives; with NCCL each level is a collective of its own.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from myriad.comm.config import CommConfig
from myriad.comm.hierarchy import (
    HIERARCHIES,
    Hierarchy,
    RankPlacement,
    choose_hierarchy,
    declared_rates,
    make_levels,
)
from myriad.comm.layout import Layout
from myriad.errors import BadInputError
from myriad.model.config import ModelConfig
from myriad.planner.cluster_config import Cluster, Level
from myriad.planner.cost.operator_costs import Number

__all__ = [
    "AT_PORTS",
    "CommGroup",
    "DpCollectives",
    "ExchangeSlowdown",
    "RankRun",
    "all_gather_seconds",
    "all_reduce_seconds",
    "all_to_all_seconds",
    "copied_sum_seconds",
    "group_along",
    "message_seconds",
    "shard_group_comm",
    "startup_seconds",
    "tensor_group",
]


class ExchangeSlowdown(NamedTuple):
    """Factors by which bytes that travel between nodes inside forwards and backwards take longer than at the
    rates of ports."""

    tokens: float = 1.0
    """The factor for tokens that travel to experts."""
    context: float = 1.0
    """The factor for keys, values and positions that ranks exchange which share a sequence."""


AT_PORTS = ExchangeSlowdown()
"""Nothing takes longer than at the rates of ports."""


@dataclass(frozen=True)
class CommGroup:
    """A group of ranks that communicate, with each rank's share of the links between them."""

    size: Number
    bytes_per_second: Number
    """Rate of each rank for large messages."""
    latency_seconds: Number
    launch_seconds: Number
    busy_ratio: Number
    """Share of a transfer's time by which compute slows down."""
    skew_seconds: Number = 0.0
    """Seconds that the group waits for its last rank, once for each tensor."""
    check_seconds: Number = 0.0
    """Seconds of the host before each collective (`Link.check_seconds`)."""

    @property
    def begin_seconds(self) -> Number:
        """Seconds until a collective begins."""
        return self.launch_seconds + self.check_seconds


class RankRun(NamedTuple):
    """Ranks of a group that are nearer to each other than to the others."""

    length: int = 1
    stride: int = 1

    def within(self, place: float, size: Number, stride: Number) -> Number:
        """Return how many of ``size`` ranks, in runs that are ``stride`` apart, are among ``place``
        consecutive ranks from the first of them on."""
        runs = np.clip(np.floor(place / np.asarray(stride)), 1, np.asarray(size) / self.length)
        return runs * min(max(place // self.stride, 1), self.length)

    def reaches_beyond(self, place: float, size: Number, stride: Number) -> npt.NDArray[np.bool_]:
        """Return whether such a group needs more than ``place`` consecutive ranks."""
        sizes = np.asarray(size, dtype=float)
        alone = (sizes <= self.length) & (self.length > 1)
        needed = np.where(alone, self.length * self.stride, sizes / self.length * stride)
        return np.asarray(needed > place)


_APART = RankRun()
"""Each rank is as far from its neighbours as any other."""


def group_along(cluster: Cluster, size: Number, stride: Number, run: RankRun = _APART) -> CommGroup:
    """Return the group of ``size`` ranks that are ``stride`` apart in a grid that fills nodes in order, in
    runs or one by one."""
    node, network, spine = (cluster.link(level) for level in ("node", "network", "spine"))
    per_node = cluster.accelerators_per_node
    inside = run.within(per_node, size, stride)
    crosses = run.reaches_beyond(per_node, size, stride)
    nearest = stride if run.length == 1 else run.stride
    rate = node.bytes_per_second if cluster.inside is None else _local_rates(cluster, inside, nearest)
    within = rate * cluster.ratio("node") * (1 - node.small_group_loss / np.asarray(size))
    across = inside * network.bytes_per_second * cluster.ratio("network")
    if cluster.links.spine is not None and cluster.nodes_per_switch is not None:
        beyond = run.reaches_beyond(per_node * cluster.nodes_per_switch, size, stride)
        up = inside * spine.bytes_per_second * cluster.ratio("spine")
        across = np.where(beyond, np.minimum(across, up), across)
    return CommGroup(
        size=size,
        bytes_per_second=np.where(
            crosses & (inside > 1), np.minimum(across, within), np.where(crosses, across, within)
        ),
        latency_seconds=np.where(crosses, network.latency_seconds, node.latency_seconds),
        launch_seconds=np.where(crosses, network.launch_seconds, node.launch_seconds),
        busy_ratio=np.where(crosses, network.busy_ratio, node.busy_ratio),
        check_seconds=inside * node.check_seconds + (np.asarray(size) - inside) * network.check_seconds,
    )


def _local_rates(cluster: Cluster, inside: Number, stride: Number) -> Number:
    """Return the rates of groups of ``inside`` local ranks, by the paths between accelerators."""
    if np.ndim(inside) == np.ndim(stride) == 0:
        return cluster.local_bytes_per_second(max(2, int(inside)), max(1, int(stride)))
    sizes, strides = np.broadcast_arrays(np.asarray(inside, float), np.asarray(stride, float))
    pairs, places = np.unique(np.stack([sizes.ravel(), strides.ravel()]), axis=1, return_inverse=True)
    rates = [cluster.local_bytes_per_second(max(2, int(a)), max(1, int(b))) for a, b in pairs.T]
    return np.array(rates)[places.reshape(-1)].reshape(sizes.shape)


def tensor_group(cluster: Cluster, size: Number, stride: float = 1.0) -> CommGroup:
    """Return the group of neighbouring ranks that shard matrices among them, or of one of ``stride``. The
    host's checks of its collectives are part of what the host takes for a layer."""
    group, link = replace(group_along(cluster, size, stride), check_seconds=0.0), cluster.links.tensor
    crosses = np.asarray(size) * stride > cluster.accelerators_per_node
    if link is None:
        return replace(group, skew_seconds=cluster.links.node.skew_seconds)
    # Between nodes, the copies before and after add to the transfer.
    both = 1 / (1 / np.asarray(group.bytes_per_second) + 1 / link.bytes_per_second)
    return CommGroup(
        size=size,
        bytes_per_second=np.where(crosses, both, link.bytes_per_second),
        latency_seconds=group.latency_seconds,
        launch_seconds=np.maximum(group.launch_seconds, link.launch_seconds),
        busy_ratio=np.where(crosses, group.busy_ratio, link.busy_ratio),
    )


def all_gather_seconds(group: CommGroup, num_bytes: Number) -> Number:
    """Return the seconds of an all-gather that ends with ``num_bytes`` on each rank, or of a reduce-scatter
    that begins with them."""
    steps = np.asarray(group.size) - 1
    moved = num_bytes * steps / group.size / group.bytes_per_second
    begun = startup_seconds(group) + group.skew_seconds
    return np.where(steps > 0, begun + moved, 0.0)


def all_to_all_seconds(
    cluster: Cluster,
    size: Number,
    stride: Number,
    num_bytes: Number,
    run: RankRun = _APART,
    slowdown: float = 1.0,
) -> Number:
    """Return the seconds in which each of ``size`` ranks, ``stride`` apart, in runs or one by one, sends
    ``num_bytes`` in equal parts to all of them, itself included. What stays in the node, what leaves it and
    what leaves its switch travel at the same time, each rank on its own share of the links. ``slowdown``:
    factor on the seconds of what leaves the node."""
    node, network, spine = (cluster.link(level) for level in ("node", "network", "spine"))
    group, per_node = group_along(cluster, size, stride, run), cluster.accelerators_per_node
    inside = run.within(per_node, size, stride)
    nearest = stride if run.length == 1 else run.stride
    rate = node.bytes_per_second if cluster.inside is None else _local_rates(cluster, inside, nearest)
    near = (inside - 1) / (rate * cluster.ratio("node"))
    far = (np.asarray(size) - inside) / (network.bytes_per_second * cluster.ratio("network"))
    if cluster.links.spine is not None and cluster.nodes_per_switch is not None:
        under = run.within(per_node * cluster.nodes_per_switch, size, stride)
        beyond = (np.asarray(size) - under) / (spine.bytes_per_second * cluster.ratio("spine"))
        far = np.maximum(far, beyond)
    moved = num_bytes / size * np.maximum(near, far * slowdown)
    begun = group.begin_seconds + group.latency_seconds
    return np.where(np.asarray(size) > 1, begun + moved, 0.0)


def startup_seconds(group: CommGroup) -> Number:
    """Return the seconds of an empty all-gather or reduce-scatter. Each part of a tensor pays them again."""
    return group.begin_seconds + (np.asarray(group.size) - 1) * group.latency_seconds


def all_reduce_seconds(group: CommGroup, num_bytes: Number) -> Number:
    """Return the seconds of an all-reduce, by the faster of ring and tree."""
    steps = np.asarray(group.size) - 1
    ring = 2 * steps * (group.latency_seconds + num_bytes / group.size / group.bytes_per_second)
    depth = 2 * np.log2(np.maximum(group.size, 2))
    tree = depth * group.latency_seconds + 2 * num_bytes / group.bytes_per_second
    begun = group.begin_seconds + group.skew_seconds
    return np.where(steps > 0, begun + np.minimum(ring, tree), 0.0)


def copied_sum_seconds(model: ModelConfig, cluster: Cluster, tp: int, pp: int, parts: int) -> float:
    """Return the seconds in which the ranks that hold a key/value head sum its gradients: one all-reduce for
    each block of a pipeline rank. ``parts``: data-parallel ranks that share the gradients."""
    copies = model.kv_copies(tp)
    if copies == 1:
        return 0.0
    num_bytes = 4 * model.kv_parameters / model.num_kv_heads / parts
    return float(-(-model.layers // pp) * all_reduce_seconds(tensor_group(cluster, float(copies)), num_bytes))


def message_seconds(group: CommGroup, num_bytes: Number) -> Number:
    """Return the seconds of a message from one rank to the next."""
    return group.latency_seconds + num_bytes / group.bytes_per_second


_LINKS: tuple[Level, ...] = ("node", "network", "spine")
"""Link level by distance (`RankPlacement.distance`)."""


@dataclass(frozen=True)
class SliceCounts:
    """The slices that the busiest rank sends in an all-gather."""

    num_levels: int
    slices: tuple[int, int, int]
    """Number of slices sent, by distance; there are as many slices as ranks."""
    peers: tuple[int, int, int]
    """Number of ranks that receive them, by distance."""


class DpCollectives:
    """Costs of the data-parallel groups of a layout: ``size`` ranks, ``stride`` apart, in runs or one by
    one."""

    def __init__(
        self, cluster: Cluster, comm: CommConfig, size: int, stride: int, run: RankRun = _APART
    ) -> None:
        """Prepare the costs. Raises `BadInputError` where replicas do not fit the hierarchy that ``comm``
        asks for."""
        self.cluster, self.size = cluster, size
        self.ring = group_along(cluster, float(size), float(stride), run)
        """The group as one flat ring."""
        self.sites = self._sites(comm)
        """Nodes and switches as the runtime sees them."""
        self._groups = _groups(size, stride, run, _physical(cluster))
        self.hierarchy: Hierarchy = self._settle(comm)
        self.sent = self._sent(comm)

    def all_gather_seconds(self, num_bytes: Number) -> Number:
        """Return the seconds of an all-gather that ends with ``num_bytes`` on each rank, or of a
        reduce-scatter that begins with them."""
        if self.sent is None:
            return all_gather_seconds(self.ring, num_bytes)
        return self._launch_seconds(self.sent) + self._travel_seconds(self.sent, num_bytes)

    def all_reduce_seconds(self, num_bytes: Number) -> Number:
        """Return the seconds of an all-reduce."""
        if self.sent is None:
            return all_reduce_seconds(self.ring, num_bytes)
        num_launches = 1 if self.cluster.on_cpu else 2
        launches = num_launches * self._launch_seconds(self.sent)
        return launches + 2 * self._travel_seconds(self.sent, num_bytes)

    def _launch_seconds(self, sent: SliceCounts) -> float:
        if self.cluster.on_cpu:
            return float(self.ring.launch_seconds)
        links = (self.cluster.link(_LINKS[d]) for d, count in enumerate(sent.peers) if count)
        return sum(link.launch_seconds for link in links)

    def _travel_seconds(self, sent: SliceCounts, num_bytes: Number) -> Number:
        slice_bytes, seconds = num_bytes / self.size, 0.0 * num_bytes
        for distance, (slices, peers) in enumerate(zip(sent.slices, sent.peers, strict=True)):
            if peers:
                latency = self.cluster.link("node" if distance == 0 else "network").latency_seconds
                seconds = seconds + peers * latency + slices * slice_bytes / self._rate(distance, peers)
        return seconds

    def _rate(self, distance: int, peers: int) -> float:
        """Return the bytes per second of one rank while all ranks send over this distance."""
        if distance == 0:
            return float(group_along(self.cluster, 1.0 + peers, 1.0).bytes_per_second)
        rates = (self.cluster.link(level).bytes_per_second * self.cluster.ratio(level) for level in _LINKS)
        return min(list(rates)[1 : distance + 1])

    # Choice of the hierarchy.

    def _settle(self, comm: CommConfig) -> Hierarchy:
        """Return the hierarchy of the job; for ``auto``, the one that the runtime measures as the fastest at
        start."""
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

    def _sites(self, comm: CommConfig) -> RankPlacement:
        """Return the nodes that the job declares, or else those of the launcher."""
        if comm.node_size is None:
            return RankPlacement(self.cluster.accelerators_per_node, None, comm.island_size)
        return RankPlacement(comm.node_size, comm.switch_size, comm.island_size)

    def _quickest(self, sites: RankPlacement, comm: CommConfig) -> Hierarchy:
        """Return the hierarchy with the fewest levels among those that the groups would choose."""
        rates, on_cpu = declared_rates(comm, sites), self.cluster.on_cpu
        if not (rates or on_cpu):
            return "flat"  # Unless the links are declared, NCCL chooses its own path through nodes.
        chosen = []
        for ranks in self._groups:
            distances = {sites.distance(ranks[0], rank) for rank in ranks[1:]}
            if len(distances) < 2 or not (distances <= set(rates) or on_cpu):
                return "flat"
            known = rates if distances <= set(rates) else self._measured(sites, ranks)
            chosen.append(_choose(sites, ranks, tuple(known.items())))
        return min(chosen, key=HIERARCHIES.index)

    def _measured(self, sites: RankPlacement, ranks: Sequence[int]) -> dict[int, float]:
        """Return the rates to the first rank at each distance, as the runtime would measure them."""
        found: dict[int, float] = {}
        real = _physical(self.cluster)
        for rank in ranks[1:]:
            distance = sites.distance(ranks[0], rank)
            if distance not in found:
                found[distance] = self._rate(real.distance(ranks[0], rank), 1)
        return found

    def _sent(self, comm: CommConfig) -> SliceCounts | None:
        """Return the slices of the rank that sends most over the narrowest link; ``None``: a single NCCL ring
        runs the collective."""
        if self.size == 1 or (self.hierarchy == "flat" and not self.cluster.on_cpu):
            return None
        sites, real = self._sites(comm), _physical(self.cluster)
        every = [
            _count(ranks, _radices(sites, ranks, self.hierarchy) or (self.size,), real)
            for ranks in self._groups
        ]
        worst = max(every, key=lambda sent: sent.slices[::-1])
        return None if worst.num_levels == 1 and not self.cluster.on_cpu else worst


def shard_group_comm(comm: CommConfig, layout: Layout) -> CommConfig:
    """Return the settings of a layout's data-parallel groups: with ``layout.shard_group``, auto is flat."""
    if layout.reduces_across and comm.hierarchy == "auto":
        return comm.model_copy(update={"hierarchy": "flat"})
    return comm


def _physical(cluster: Cluster) -> RankPlacement:
    return RankPlacement(cluster.accelerators_per_node, cluster.nodes_per_switch)


@lru_cache(maxsize=4096)
def _groups(size: int, stride: int, run: RankRun, sites: RankPlacement) -> tuple[Sequence[int], ...]:
    """Return the data-parallel groups with different positions on nodes: one, where groups and nodes divide
    each other, or where groups have runs."""
    if run.length > 1:
        return (
            tuple(
                first * stride + one * run.stride
                for first in range(size // run.length)
                for one in range(run.length)
            ),
        )
    units = (sites.node_size, sites.node_size * (sites.switch_size or 1))
    alike = all(unit % stride == 0 or stride % unit == 0 for unit in units)
    return tuple(range(first, first + size * stride, stride) for first in range(1 if alike else stride))


@lru_cache(maxsize=4096)
def _radices(sites: RankPlacement, ranks: Sequence[int], hierarchy: Hierarchy) -> tuple[int, ...] | None:
    return sites.radices(ranks, hierarchy)


@lru_cache(maxsize=4096)
def _choose(sites: RankPlacement, ranks: Sequence[int], rates: tuple[tuple[int, float], ...]) -> Hierarchy:
    return choose_hierarchy(sites, ranks, dict(rates))


@lru_cache(maxsize=4096)
def _count(ranks: Sequence[int], radices: tuple[int, ...], real: RankPlacement) -> SliceCounts:
    """Count the slices that the rank with the fewest peers in its node sends, by the links that they use."""
    in_node = Counter(map(real.node, ranks))
    here = min(range(len(ranks)), key=lambda place: in_node[real.node(ranks[place])])
    slices, peers = [0, 0, 0], [0, 0, 0]
    levels = make_levels(here, radices)
    for level in levels:
        for place in level.others:
            distance = real.distance(ranks[here], ranks[level.members[place]])
            slices[distance] += len(level.slices[level.own])
            peers[distance] += 1
    return SliceCounts(len(levels), (slices[0], slices[1], slices[2]), (peers[0], peers[1], peers[2]))
