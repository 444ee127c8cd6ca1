"""What an order of nodes decides of an iteration, for many orders at once.

    pipeline   fill and drain: each part's compute and each message once; in between, for every other
               micro-batch, the slowest part: its compute, or its messages, or with nothing hidden both
    ring       a part's bytes at the rate of the slowest node among its replicas
    T          the slowest pipeline + the slowest ring x its exposed share

A message goes at the rate of the slower of its two nodes. Between switches go the messages whose ends lie on
both sides, and each ring once, however many of its members lie below, as rings are made: all that goes
through a switch's uplinks shares them alike.

The slowest of many stays the slowest while others get better: a search on T alone stands still on plains. So
beside T stands a *slope*: T and a thousandth of the mean pipeline and ring.

Arrays: K orders, R replicas, P parts, W columns, M messages.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from myriad.planner.cluster import Cluster
from myriad.planner.traffic import Traffic

__all__ = ["Fabric", "Numbers", "Orders", "Verdict"]

Orders = npt.NDArray[np.intp]
Numbers = npt.NDArray[np.float64]

_AT_ONCE = 2**15
"""Slots of all orders that are judged at once: more would not stay in a core's cache."""
_GENTLY = 1e-3


class Verdict(NamedTuple):
    """Of each order."""

    seconds: Numbers
    slope: Numbers


class Fabric:
    """A cluster as one layout's traffic sees it."""

    def __init__(
        self,
        cluster: Cluster,
        traffic: Traffic,
        slower: Mapping[int, float],
        nodes: Sequence[int] | None = None,
    ) -> None:
        """``slower``: factor on the compute of single nodes. ``nodes``: those that the job has; orders
        are of places in this list; off: the cluster's."""
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
        """Seconds for each byte of one flow alone; 0: the way up is as wide as the nodes' own."""
        self._source = np.array([message.source for message in traffic.messages], dtype=np.intp)
        self._target = np.array([message.target for message in traffic.messages], dtype=np.intp)
        self._sent = np.array([message.num_bytes for message in traffic.messages])

    @property
    def kinds(self) -> npt.NDArray[np.intp]:
        """Nodes with the same number may be exchanged: nothing changes."""
        switch = self.switch if self.uplink else np.zeros_like(self.switch)
        _, kinds = np.unique(np.stack([self.inverse, self.slower, switch]), axis=1, return_inverse=True)
        return np.asarray(kinds, dtype=np.intp).reshape(-1)

    def judge(self, orders: Orders) -> Verdict:
        """``orders[k, slot]``: the node that holds a slot."""
        step = max(1, _AT_ONCE // self.traffic.num_slots)
        found = [self._judge(orders[first : first + step]) for first in range(0, len(orders), step)]
        return Verdict(*(np.concatenate(column) for column in zip(*found, strict=True)))

    def _judge(self, orders: Orders) -> Verdict:
        pipelines, rings = self._times(orders)
        seconds = pipelines.max(1) + rings.max(1)
        return Verdict(seconds, seconds + _GENTLY * (pipelines.mean(1) + rings.mean(1)))

    def critical(self, order: Orders) -> npt.NDArray[np.bool_]:
        """Which slots lie in the slowest pipeline or ring."""
        traffic = self.traffic
        pipelines, rings = self._times(order[None])
        found = np.zeros((traffic.replicas, traffic.parts * traffic.width), dtype=bool)
        found[pipelines[0] >= pipelines.max() * (1 - 1e-9)] = True
        found[:, rings[0] >= rings.max() * (1 - 1e-9)] = True
        return found.reshape(-1)

    def _times(self, orders: Orders) -> tuple[Numbers, Numbers]:
        """Of each pipeline (K, R) and each ring (K, P W)."""
        traffic = self.traffic
        nodes = orders.reshape(len(orders), traffic.replicas, traffic.parts, traffic.width)
        ways = _Ways(self.inverse[nodes], *self._congestion(nodes))
        return self._pipelines(nodes, ways), self._rings(ways)

    def _pipelines(self, nodes: Orders, ways: "_Ways") -> Numbers:
        traffic = self.traffic
        parts = np.array(traffic.compute_seconds) * self.slower[nodes].max(3)  # K R P
        if traffic.tensor_seconds:
            parts = parts + np.array(traffic.tensor_seconds) * (ways.slowest_along(3) / self.usual - 1)
        if not traffic.messages:
            alone: Numbers = parts.sum(2) + (traffic.num_micro_batches - 1) * parts.max(2)
            return alone
        sent = ways.between(self._source, self._target).max(3) * self._sent  # K R M
        steady = self._steady(parts, sent)
        result: Numbers = parts.sum(2) + sent.sum(2) + (traffic.num_micro_batches - 1) * steady
        return result

    def _steady(self, parts: Numbers, sent: Numbers) -> Numbers:
        """Of one micro-batch, K R."""
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
        moved = np.array(traffic.ring_bytes) * (traffic.replicas - 1) / traffic.replicas
        times: Numbers = ways.slowest_along(1) * moved[:, None] * traffic.exposed_ratio
        return times.reshape(len(times), -1)

    def _congestion(self, nodes: Orders) -> tuple[Orders, Numbers]:
        """The switch above each slot, and the seconds that a byte of a flow takes through its uplinks."""
        if not self.uplink:
            return np.zeros_like(nodes), np.zeros(nodes.shape)
        switch, num_orders = self.switch[nodes], len(nodes)
        num_switches = int(self.switch.max()) + 1
        first = np.arange(num_orders)[:, None] * num_switches
        flows = np.zeros(num_orders * num_switches, dtype=np.intp)
        source, target = switch[:, :, self._source], switch[:, :, self._target]
        crossing = [(source, source != target), (target, source != target), _once_each(switch, 1)]
        if self.traffic.tensor_seconds:
            crossing.append(_once_each(switch, 3))
        for which, where in crossing:
            flat = (which.reshape(num_orders, -1) + first)[where.reshape(num_orders, -1)]
            flows += np.bincount(flat, minlength=len(flows))
        above = switch.reshape(num_orders, -1) + first
        return switch, flows[above].reshape(switch.shape) * self.uplink


class _Ways(NamedTuple):
    """Seconds for each byte, by slot: K R P W."""

    inverse: Numbers
    """Of a node's own links."""
    switch: Orders
    up: Numbers
    """Of a flow through the uplinks of its switch."""

    def between(self, source: Orders, target: Orders) -> Numbers:
        """Two parts."""
        own = np.maximum(self.inverse[:, :, source], self.inverse[:, :, target])
        shared = np.maximum(self.up[:, :, source], self.up[:, :, target])
        apart = self.switch[:, :, source] != self.switch[:, :, target]
        return np.where(apart, np.maximum(own, shared), own)

    def slowest_along(self, axis: int) -> Numbers:
        """A ring."""
        own = self.inverse.max(axis)
        apart = self.switch.max(axis) != self.switch.min(axis)
        result: Numbers = np.where(apart, np.maximum(own, self.up.max(axis)), own)
        return result


def _once_each(switch: Orders, axis: int) -> tuple[Orders, npt.NDArray[np.bool_]]:
    """Switches below the rings along an axis, sorted, and where each of a ring that leaves one stands
    first."""
    below = np.moveaxis(np.sort(switch, axis=axis), axis, 0)
    first = np.ones(below.shape, dtype=bool)
    first[1:] = below[1:] != below[:-1]
    first &= below[0] != below[-1]
    return np.moveaxis(below, 0, axis), np.moveaxis(first, 0, axis)
