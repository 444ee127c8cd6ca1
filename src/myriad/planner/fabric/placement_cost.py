"""The part of an iteration's seconds that depends on the node order, for many orders at once.

    pipeline   fill and drain: each part's compute and each message once; in between, for every other
               micro-batch, the slowest part: its compute or its messages, or both without overlap
    exchange   a part's compute has the time in which tokens travel to experts on other nodes: longer by the
               slowest node among the replicas that share experts
    columns    likewise what tensor-parallel ranks, or ranks that share sequences, send to other nodes
    ring       a part's bytes at the rate of the slowest node among those that hold its parameters
    T          the slowest pipeline + the slowest ring x its exposed share

A message runs at the rate of the slower of its two nodes. Messages whose ends are under different switches
cross the uplinks. A ring crosses each switch's uplinks once, however many of its ranks are below. Of an
exchange among n nodes, b of them under a switch, each of those sends (n - b)/(n - 1) through its uplinks. All
flows through a switch's uplinks share them evenly.

The slowest pipeline or ring of many stays the slowest while others improve, so a search on T alone stops on
plateaus. Therefore each order also has a *slope*: T plus a thousandth of the mean pipeline and ring.

Arrays: K orders, R replicas, P parts, W columns, M messages.

`SlotTraffic` is the traffic between the nodes of a layout in an iteration, which `placement_search` places.

The grid's axes are dp pp cp tp, the last one fastest, so consecutive ranks fill a node, and a *slot* (the
n-th node's worth of ranks) is

    slot = (replica x parts + part) x width + column

    part      a node's share of a pipeline: some of its ranks, or with cp x tp wider than a node one of them
    column    of the nodes that the cp x tp ranks of a stage fill; those of a tensor-parallel group are
              neighbours
    replica   that lies on nodes of its own: one of dp, or as many as fit in a node
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from myriad.comm.layout import Layout
from myriad.planner.cluster_config import Cluster
from myriad.planner.cost.expert_costs import expert_hops
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.cost.stage_layers import expert_blocks
from myriad.planner.simulation.expert_waits import replicas_that_share
from myriad.program.partition import cut_ranges
from myriad.program.schedules import stage_owners

__all__ = [
    "Numbers",
    "OrderScores",
    "Orders",
    "PlacementCost",
    "SlotTraffic",
    "fills_nodes",
    "shares_elsewhere",
    "traffic_of",
]


@dataclass(frozen=True)
class SlotMessage:
    """The messages between two parts of each replica, for one micro-batch."""

    source: int
    target: int
    num_bytes: float
    """Bytes of one accelerator, in both directions."""


@dataclass(frozen=True)
class SlotTraffic:
    """The traffic of a layout by part; it has ``replicas x parts x width`` slots."""

    replicas: int
    parts: int
    compute_seconds: tuple[float, ...]
    """Seconds of the part's slowest pipeline rank, for one micro-batch."""
    ring_bytes: tuple[float, ...]
    """Bytes of one accelerator's parameters and gradients that are exchanged among replicas, in an
    iteration."""
    messages: tuple[SlotMessage, ...]
    num_micro_batches: int
    exposed_ratio: float = 1.0
    """Exposed share of the rings' time."""
    hides_messages: bool = True
    """Whether messages overlap with compute between a pipeline's fill and drain."""
    width: int = 1
    holders: int = 1
    """Columns that hold the same parameters, because their ranks share sequences."""
    column_seconds: tuple[float, ...] = ()
    """Share of compute_seconds that waits for communication between the columns, on links of the usual rate;
    empty: it stays inside nodes."""
    sharers: int = 1
    """Neighbouring replicas whose nodes share experts."""
    exchange_seconds: tuple[float, ...] = ()
    """Share of compute_seconds in which tokens travel between nodes to their experts, likewise; empty: none
    do."""
    exchange_bytes: tuple[float, ...] = ()
    """Bytes of one accelerator that travel so, for one micro-batch."""

    @property
    def num_slots(self) -> int:
        """Number of nodes that the layout needs."""
        return self.replicas * self.parts * self.width


def fills_nodes(layout: Layout, per_node: int) -> bool:
    """Return whether tensor-parallel groups, ranks that share sequences, and pipelines each fill whole nodes,
    or nodes hold a whole number of them."""
    sizes = accumulate((layout.tp, layout.cp, layout.pp), mul)
    return all(per_node % size == 0 or size % per_node == 0 for size in sizes)


def traffic_of(costs: Costs) -> SlotTraffic:
    """Return the slot traffic of a layout that fills nodes."""
    workload, layout, per_node = costs.workload, costs.workload.layout, costs.cluster.accelerators_per_node
    stage_ranks = layout.cp * layout.tp
    width, tensor_nodes = max(1, stage_ranks // per_node), max(1, layout.tp // per_node)
    parts = max(1, stage_ranks * layout.pp // (per_node * width))
    part_of = [rank * parts // layout.pp for rank in range(layout.pp)]
    owners = stage_owners(layout.schedule_name, layout.pp, layout.virtual_stages)
    compute, held, columns, exchanged = ([0.0] * layout.pp for _ in range(4))
    layers = cut_ranges(costs.layers_of_stage, costs.num_chunks)
    for index, stage in enumerate(costs.stages):
        rank = owners[index // costs.num_chunks]
        others, experts = costs.held_parameters(layers[index])
        compute[rank] += stage.forward + stage.backward
        held[rank] += others + (experts if layout.num_expert_replicas > 1 else 0.0)
        columns[rank] += float(stage.parts.tensor) if tensor_nodes > 1 else 0.0
        columns[rank] += float(stage.parts.context) if width > tensor_nodes else 0.0
        exchanged[rank] += float(stage.parts.experts)
    moved = workload.value_bytes + workload.profile.gradient_bytes if layout.num_holders > 1 else 0
    if layout.reduces_across:
        inside = layout.num_shards * layout.tp * layout.pp <= per_node
        moved = 2 * workload.profile.gradient_bytes + (0 if inside else moved)

    def slowest(values: list[float]) -> tuple[float, ...]:
        return tuple(max(v for v, at in zip(values, part_of, strict=True) if at == p) for p in range(parts))

    sharers = max(1, replicas_that_share(layout) // max(1, per_node // (stage_ranks * layout.pp)))
    travels = sharers > 1
    return SlotTraffic(
        replicas=max(1, layout.world // (per_node * width * parts)),
        parts=parts,
        compute_seconds=slowest(compute),
        ring_bytes=tuple(moved * value for value in slowest(held)),
        messages=_messages(costs, [part_of[owner] for owner in owners]),
        num_micro_batches=workload.num_micro_batches,
        exposed_ratio=1 / (layout.virtual_stages * costs.num_chunks) if workload.overlap.data else 1.0,
        hides_messages=workload.overlap.pipeline,
        width=width,
        holders=width // tensor_nodes,
        column_seconds=slowest(columns) if width > 1 else (),
        sharers=sharers,
        exchange_seconds=slowest(exchanged) if travels else (),
        exchange_bytes=slowest(_exchanged_bytes(costs, owners)) if travels else (),
    )


def _exchanged_bytes(costs: Costs, owners: Sequence[int]) -> list[float]:
    """Return the bytes that a rank sends to experts on other nodes for one micro-batch, by pipeline rank.
    ``owners``: the pipeline rank of each stage."""
    workload, per_node = costs.workload, costs.cluster.accelerators_per_node
    tokens = workload.layout.micro_batch * workload.rank_model.sequence
    block = 0.0
    for (size, stride, run), *sizes in expert_hops(workload.rank_model, costs.slice, tokens):
        elsewhere = 1 - float(run.within(per_node, size, stride)) / size
        block += 2 * elsewhere * sum(map(float, sizes))
    found = [0.0] * workload.layout.pp
    for index, layers in enumerate(cut_ranges(costs.layers_of_stage, costs.num_chunks)):
        blocks = sum(expert_blocks(workload.model, layer) for layer in layers)
        found[owners[index // costs.num_chunks]] += block * blocks
    return found


def _messages(costs: Costs, parts: list[int]) -> tuple[SlotMessage, ...]:
    """Return the messages between stages on different nodes. ``parts``: the part of each stage, in order."""
    workload, layout = costs.workload, costs.workload.layout
    tokens = layout.micro_batch * workload.rank_model.sequence
    num_bytes = 2.0 * tokens * workload.model.hidden * workload.value_bytes / layout.tp
    pairs = Counter((min(pair), max(pair)) for pair in pairwise(parts) if pair[0] != pair[1])
    return tuple(SlotMessage(a, b, count * num_bytes) for (a, b), count in sorted(pairs.items()))


Orders = npt.NDArray[np.intp]
Numbers = npt.NDArray[np.float64]

_AT_ONCE = 2**15
"""Slots of all orders that are scored at once: more would not fit in a core's cache."""
_GENTLY = 1e-3


class OrderScores(NamedTuple):
    """The scores of each order."""

    seconds: Numbers
    slope: Numbers


class PlacementCost:
    """Scores node orders for one layout's traffic on a cluster."""

    def __init__(
        self,
        cluster: Cluster,
        traffic: SlotTraffic,
        slower: Mapping[int, float],
        nodes: Sequence[int] | None = None,
    ) -> None:
        """Prepare the scores. ``slower``: factor on the compute of single nodes. ``nodes``: the job's nodes,
        and orders hold indices into this list; off: the cluster's nodes."""
        self.traffic = traffic
        self.per_switch = cluster.nodes_per_switch or cluster.nodes
        self.switch = np.arange(cluster.nodes) // self.per_switch
        usual = cluster.link("network").bytes_per_second * cluster.ratio("network")
        rates = np.full(cluster.nodes, usual)
        for group in cluster.unequal:
            rates[list(group.nodes)] = group.bytes_per_second * cluster.ratio("network")
        self.usual, self.inverse = 1 / usual, 1 / rates
        self.slower = np.ones(cluster.nodes)
        self.slower[list(slower)] = list(slower.values())
        if nodes is not None:
            own = np.array(nodes, dtype=np.intp)
            self.switch, self.inverse, self.slower = self.switch[own], self.inverse[own], self.slower[own]
        spine = cluster.link("spine").bytes_per_second * cluster.ratio("spine")
        self.uplink = 1 / (spine * self.per_switch) if cluster.links.spine is not None else 0.0
        """Seconds per byte of a single flow; 0: the uplinks are as wide as the nodes' links."""
        self._source = np.array([message.source for message in traffic.messages], dtype=np.intp)
        self._target = np.array([message.target for message in traffic.messages], dtype=np.intp)
        self._sent = np.array([message.num_bytes for message in traffic.messages])

    @property
    def kinds(self) -> npt.NDArray[np.intp]:
        """Number of each node's kind; exchanging two nodes of one kind changes nothing."""
        switch = self.switch if self.uplink else np.zeros_like(self.switch)
        _, kinds = np.unique(np.stack([self.inverse, self.slower, switch]), axis=1, return_inverse=True)
        return np.asarray(kinds, dtype=np.intp).reshape(-1)

    def score(self, orders: Orders) -> OrderScores:
        """Return the scores of orders; ``orders[k, slot]`` is the node in a slot."""
        step = max(1, _AT_ONCE // self.traffic.num_slots)
        found = [self._judge(orders[first : first + step]) for first in range(0, len(orders), step)]
        return OrderScores(*(np.concatenate(column) for column in zip(*found, strict=True)))

    def _judge(self, orders: Orders) -> OrderScores:
        pipelines, rings = self._times(orders)
        seconds = pipelines.max(1) + rings.max(1)
        return OrderScores(seconds, seconds + _GENTLY * (pipelines.mean(1) + rings.mean(1)))

    def critical(self, order: Orders) -> npt.NDArray[np.bool_]:
        """Return a mask of the slots in the slowest pipeline or ring."""
        traffic = self.traffic
        pipelines, rings = self._times(order[None])
        found = np.zeros((traffic.replicas, traffic.parts * traffic.width), dtype=bool)
        found[pipelines[0] >= pipelines.max() * (1 - 1e-9)] = True
        columns = np.tile(rings[0].reshape(traffic.parts, -1), traffic.holders).reshape(-1)
        found[:, columns >= rings.max() * (1 - 1e-9)] = True
        return found.reshape(-1)

    def _times(self, orders: Orders) -> tuple[Numbers, Numbers]:
        """Return the seconds of each pipeline, shape (K, R), and of each ring, shape (K, P W / holders)."""
        traffic = self.traffic
        nodes = orders.reshape(len(orders), traffic.replicas, traffic.parts, traffic.width)
        ways = _Ways(self.inverse[nodes], *self._congestion(nodes))
        return self._pipelines(nodes, ways), self._rings(ways)

    def _pipelines(self, nodes: Orders, ways: "_Ways") -> Numbers:
        traffic = self.traffic
        parts = np.array(traffic.compute_seconds) * self.slower[nodes].max(3)  # Shape: K R P.
        if traffic.column_seconds:
            parts = parts + np.array(traffic.column_seconds) * (ways.slowest_along(3) / self.usual - 1)
        if traffic.exchange_seconds:
            slower = ways.slowest_of_sharers(traffic.sharers).max(3) / self.usual - 1
            parts = parts + np.array(traffic.exchange_seconds) * slower
        if not traffic.messages:
            alone: Numbers = parts.sum(2) + (traffic.num_micro_batches - 1) * parts.max(2)
            return alone
        sent = ways.between(self._source, self._target).max(3) * self._sent  # Shape: K R M.
        steady = self._steady(parts, sent)
        result: Numbers = parts.sum(2) + sent.sum(2) + (traffic.num_micro_batches - 1) * steady
        return result

    def _steady(self, parts: Numbers, sent: Numbers) -> Numbers:
        """Return the seconds of one micro-batch in the steady part, shape (K, R)."""
        if self.traffic.hides_messages:
            hidden: Numbers = np.maximum(parts.max(2), sent.max(2))
            return hidden
        ends = np.zeros((len(self._sent), self.traffic.parts))
        ends[np.arange(len(ends)), self._source] = 1.0
        ends[np.arange(len(ends)), self._target] = 1.0
        coupled: Numbers = (parts + sent @ ends).max(2)
        return coupled

    def _rings(self, ways: "_Ways") -> Numbers:
        traffic = self.traffic
        size = traffic.replicas * traffic.holders
        moved = np.array(traffic.ring_bytes) * (size - 1) / size
        rings = _Ways(*(_by_ring(one, traffic.holders) for one in ways))
        times: Numbers = rings.slowest_along(1) * moved[:, None] * traffic.exposed_ratio
        return times.reshape(len(times), -1)

    def _congestion(self, nodes: Orders) -> tuple[Orders, Numbers]:
        """Return the switch of each slot, and the seconds that a byte of a flow takes through its uplinks."""
        if not self.uplink:
            return np.zeros_like(nodes), np.zeros(nodes.shape)
        switch, num_orders = self.switch[nodes], len(nodes)
        num_switches = int(self.switch.max()) + 1
        first = np.arange(num_orders)[:, None] * num_switches
        flows = np.zeros(num_orders * num_switches)
        source, target = switch[:, :, self._source], switch[:, :, self._target]
        rings = _once_each(_by_ring(switch, self.traffic.holders), 1)
        crossing = [(source, source != target), (target, source != target), rings]
        if self.traffic.column_seconds:
            crossing.append(_once_each(switch, 3))
        for which, where in crossing:
            flat = (which.reshape(num_orders, -1) + first)[where.reshape(num_orders, -1)]
            flows += np.bincount(flat, minlength=len(flows))
        if self.traffic.exchange_seconds:
            flat = (switch.reshape(num_orders, -1) + first).reshape(-1)
            away = shares_elsewhere(switch, self.traffic.sharers).reshape(-1)
            flows += np.bincount(flat, weights=away, minlength=len(flows))
        above = switch.reshape(num_orders, -1) + first
        return switch, flows[above].reshape(switch.shape) * self.uplink


class _Ways(NamedTuple):
    """Seconds per byte by slot, shape (K, R, P, W)."""

    inverse: Numbers
    """Seconds per byte of a node's own links."""
    switch: Orders
    up: Numbers
    """Seconds per byte of a flow through the uplinks of its switch."""

    def between(self, source: Orders, target: Orders) -> Numbers:
        """Return the seconds per byte between two parts."""
        own = np.maximum(self.inverse[:, :, source], self.inverse[:, :, target])
        shared = np.maximum(self.up[:, :, source], self.up[:, :, target])
        apart = self.switch[:, :, source] != self.switch[:, :, target]
        return np.where(apart, np.maximum(own, shared), own)

    def slowest_along(self, axis: int) -> Numbers:
        """Return the seconds per byte of the slowest node of each ring."""
        own = self.inverse.max(axis)
        apart = self.switch.max(axis) != self.switch.min(axis)
        result: Numbers = np.where(apart, np.maximum(own, self.up.max(axis)), own)
        return result

    def slowest_of_sharers(self, sharers: int) -> Numbers:
        """Return for each slot the seconds per byte of the slowest node among the replicas that share experts
        with it."""
        num_orders, replicas, *rest = self.inverse.shape
        shape = (num_orders, replicas // sharers, sharers, *rest)
        groups = _Ways(*(one.reshape(shape) for one in self))
        return np.repeat(groups.slowest_along(2), sharers, axis=1)


def shares_elsewhere(switch: Orders, sharers: int) -> Numbers:
    """Return for each slot, shape (K, R, P, W), the share of the replicas that share experts with it whose
    nodes are under another switch."""
    num_orders, replicas, *rest = switch.shape
    groups = switch.reshape(num_orders, replicas // sharers, sharers, *rest)
    apart = np.zeros(groups.shape)
    for number in range(1, sharers):
        apart += groups != np.roll(groups, number, axis=2)
    found: Numbers = (apart / (sharers - 1)).reshape(switch.shape)
    return found


def _by_ring(slots: npt.NDArray[Any], holders: int) -> npt.NDArray[Any]:
    """Return values by slot (K, R, P, W) as (K, R x holders, P, W / holders), with rings along axis 1."""
    orders, replicas, parts, width = slots.shape
    columns = slots.reshape(orders, replicas, parts, holders, width // holders)
    return columns.transpose(0, 1, 3, 2, 4).reshape(orders, replicas * holders, parts, width // holders)


def _once_each(switch: Orders, axis: int) -> tuple[Orders, npt.NDArray[np.bool_]]:
    """Return the sorted switches of the rings along an axis, and a mask with the first slot of each switch in
    rings that cross switches."""
    below = np.moveaxis(np.sort(switch, axis=axis), axis, 0)
    first = np.ones(below.shape, dtype=bool)
    first[1:] = below[1:] != below[:-1]
    first &= below[0] != below[-1]
    return np.moveaxis(below, 0, axis), np.moveaxis(first, 0, axis)
