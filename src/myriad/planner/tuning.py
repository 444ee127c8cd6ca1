"""The environment for NCCL and gloo on a cluster: a line where a fact of it asks for one, with its reason.

    set         the cluster, or a model of its fabric, asks for another value than NCCL's own
    left alone  NCCL's own choice is right here, and why
    not known   a fact is missing in the cluster's file

Names, defaults and meanings: NVIDIA/nccl, docs/userguide/source/env.rst. What is shown of queue pairs comes
from `network.exposure`, of timers from `network.flaps`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Literal

from myriad.errors import BadInputError
from myriad.network.nics import Nics
from myriad.planner.cluster import Cluster

if TYPE_CHECKING:
    from myriad.network.flaps import Habits
    from myriad.network.routing import Routes
from myriad.units import format_number

__all__ = ["DEFAULT_TIMEOUT", "Line", "What", "is_sprayed", "most_queue_pairs", "slowest_ratio", "tune"]

What = Literal["set", "left alone", "not known"]

DEFAULT_TIMEOUT = 20
"""NCCL's own, since 2.23."""
_BUFFER_BYTES, _STEPS = 4 * 2**20, 8
"""NCCL_BUFFSIZE's default, and the messages it is cut in (src/include/device.h: NCCL_STEPS)."""
_CHANNEL_BYTES_PER_SECOND = 14e9
"""NCCL's own of a channel of sends (src/graph/paths.cc: P2P_PER_CHANNEL_NET_BW)."""
_LEAST_MESSAGE_BYTES = 64 * 2**10
"""Of a queue pair: sixteen packets of 4 KiB; below, requests rather than bytes set the rate (assumed)."""
_WORTH_RATIO = 1.05
_DRAWS, _RING_NODES = 3, 16
_FAST_SOCKET_BYTES_PER_SECOND = 12.5e9
"""Of which NCCL's documentation asks for several sockets: 100 Gbit/s."""


@dataclass(frozen=True)
class Line:
    """Of an environment variable."""

    what: What
    name: str
    value: str
    """Empty where it is not set."""
    reason: str

    @property
    def assignment(self) -> str:
        """``NAME=value``, or the name alone."""
        return f"{self.name}={self.value}" if self.value else self.name


def tune(cluster: Cluster, habits: "Habits") -> list[Line]:
    """``habits``: of its links. Raises `BadInputError` for a cluster without network, or that does not say
    which."""
    if cluster.nodes == 1 or cluster.links.network is None:
        raise BadInputError(
            f"{cluster.name}: nodes", cluster.nodes, "more than one node: there is no network to tune"
        )
    if cluster.nics is None:
        allowed = 'needed: "infiniband", "roce" or "tcp", in the file or by --what-if nics.transport=roce'
        raise BadInputError(f"{cluster.name}: nics.transport", None, allowed)
    nics = cluster.nics
    lines = [*_interfaces(cluster, nics)]
    if nics.transport == "tcp":
        return [*lines, *_sockets(cluster)]
    from myriad.network.routing import Routes
    from myriad.planner.cluster_fabric import fabric_of

    lines += _timers(nics, habits)
    lines += _queue_pairs(nics, Routes(fabric_of(cluster)))
    lines += _rails(cluster)
    lines += _classes(nics)
    return [*lines, *_sizes(cluster)]


def _interfaces(cluster: Cluster, nics: Nics) -> Iterator[Line]:
    if nics.transport == "tcp":
        yield Line(
            "set", "NCCL_IB_DISABLE", "1", "no RDMA here: a device that is found by chance is not used"
        )
    elif not nics.names:
        yield Line(
            "not known", "NCCL_IB_HCA", "", "nics.names: else NCCL also takes NICs of storage and management"
        )
    else:
        ports = cluster.ports_per_node
        if len(nics.names) != ports:
            allowed = f"{ports} of them, one for each of nics_per_node"
            raise BadInputError(f"{cluster.name}: nics.names", list(nics.names), allowed)
        why = f"the {ports} NICs of a node that are for training, and only those; = takes names as they are"
        yield Line("set", "NCCL_IB_HCA", "=" + ",".join(nics.names), why)
    if nics.interface is None:
        missing = "nics.interface: else each node takes its first one, which others may not reach"
        yield Line("not known", "NCCL_SOCKET_IFNAME", "", missing)
        yield Line(
            "not known",
            "GLOO_SOCKET_IFNAME",
            "",
            "nics.interface: Myriad takes the one that reaches the driver",
        )
        return
    why = "ranks meet by it: the one interface that all nodes reach each other by; = takes the name as it is"
    yield Line("set", "NCCL_SOCKET_IFNAME", f"={nics.interface}", why)
    yield Line(
        "set", "GLOO_SOCKET_IFNAME", nics.interface, "the same for gloo, which else looks up the host's name"
    )


def _sockets(cluster: Cluster) -> Iterator[Line]:
    rate = _port_rate(cluster)
    if rate < _FAST_SOCKET_BYTES_PER_SECOND:
        why = f"one socket carries the {format_number(8e-9 * rate)} Gbit/s of a NIC"
        yield Line("left alone", "NCCL_SOCKET_NTHREADS", "", why)
        return
    why = (
        f"one thread does not fill {format_number(8e-9 * rate)} Gbit/s: "
        f"NCCL's documentation has 4 from 100 Gbit/s on"
    )
    yield Line("set", "NCCL_SOCKET_NTHREADS", "4", why)
    yield Line("set", "NCCL_NSOCKS_PERTHREAD", "4", f"{why} (4 x 4 sockets, at most 64)")


def _timers(nics: Nics, habits: "Habits") -> Iterator[Line]:
    from myriad.network.flaps import advise, fate
    from myriad.network.retransmission import Timers

    adaptive = nics.transport == "roce" and nics.adaptive_retransmission
    best = advise(Timers(DEFAULT_TIMEOUT, adaptive=adaptive), habits)
    own = fate(Timers(DEFAULT_TIMEOUT, adaptive=adaptive), habits)
    lost = (
        f"{format_number(best.hours_per_month, 2)} hours a month are lost to flaps, "
        f"with NCCL's {DEFAULT_TIMEOUT} "
    )
    lost += (
        f"{format_number(own.hours_per_month, 2)}; "
        f"all wait {format_number(best.wait_seconds, 2)} s "
        f"instead of {format_number(own.wait_seconds, 2)} s"
    )
    timeout = best.timers.timeout
    if timeout == DEFAULT_TIMEOUT or best.hours_per_month * _WORTH_RATIO > own.hours_per_month:
        yield Line("left alone", "NCCL_IB_TIMEOUT", "", f"{DEFAULT_TIMEOUT} is as good as any: {lost}")
    else:
        yield Line("set", "NCCL_IB_TIMEOUT", str(timeout), f"{lost} (myriad network flap)")
    why = "7 is the most there are, and NCCL's own: of the same patience, more and shorter intervals"
    yield Line("left alone", "NCCL_IB_RETRY_CNT", "", why)


def _queue_pairs(nics: Nics, routes: "Routes") -> Iterator[Line]:
    """As many as the model of hashed flows says are worth it."""
    name, split = "NCCL_IB_QPS_PER_CONNECTION", "NCCL_IB_SPLIT_DATA_ON_QPS"
    alone, sprayed = slowest_ratio(routes, 1), is_sprayed(nics)
    if nics.transport == "roce" and nics.adaptive_routing:
        why = f"off by default on RoCE: hashed, the slowest flow of a ring has {alone:.2f} of its rate"
        yield Line("set", "NCCL_IB_ADAPTIVE_ROUTING", "1", why)
    if sprayed or alone > 1 / _WORTH_RATIO:
        why = "switches choose for each packet: more queue pairs spread nothing further"
        if not sprayed:
            why = f"no flows share an uplink to their harm: the slowest has {alone:.2f} of its rate with one"
        yield Line("left alone", name, "", why)
        return
    message = _BUFFER_BYTES // _STEPS
    count, ratio = 1, alone
    while 2 * count <= most_queue_pairs():
        doubled = slowest_ratio(routes, 2 * count)
        if doubled < ratio * _WORTH_RATIO:
            break
        count, ratio = 2 * count, doubled
    if count == 1:
        yield Line("left alone", name, "", f"two are no better: the slowest flow has {alone:.2f} of its rate")
        return
    why = "hashes put several flows on one uplink: the slowest of rings between switches has "
    why += f"{alone:.2f} of its rate with one queue pair, {ratio:.2f} with {count} (myriad network ecmp)"
    yield Line("set", name, str(count), why)
    why = f"each message of {message // 1024} KiB goes in {count} parts of {message // count // 1024} KiB: "
    yield Line("set", split, "1", why + "in turns, what is sent in few messages uses few of the queue pairs")


def is_sprayed(nics: Nics) -> bool:
    """Whether switches choose for each packet."""
    return nics.transport == "infiniband" or nics.adaptive_routing


def most_queue_pairs() -> int:
    """That leave a message's parts large enough."""
    return _BUFFER_BYTES // _STEPS // _LEAST_MESSAGE_BYTES


def slowest_ratio(routes: "Routes", queue_pairs: int) -> float:
    """What the slowest flow of hashed rings between switches has of its rate."""
    from myriad.network.exposure import expose, node_order, ring_flows

    fabric = routes.fabric
    flows = ring_flows(fabric, node_order(routes, "spread"), min(_RING_NODES, fabric.num_nodes))
    return float(expose(routes, flows, queue_pairs=queue_pairs, draws=_DRAWS).slowest_ratio.mean())


def _rails(cluster: Cluster) -> Iterator[Line]:
    from myriad.planner.cluster_fabric import shape_of

    shape, name = shape_of(cluster), "NCCL_CROSS_NIC"
    if cluster.ports_per_node == 1:
        yield Line("left alone", name, "", "a node has one NIC")
    elif shape.has_rails:
        why = "each rail has switches of its own: from one rail to another is a way through the tier above"
        yield Line("set", name, "0", why)
    elif shape.kind != "graph":
        why = "all NICs of a node are on one switch: to keep to the same number avoids nothing"
        yield Line("set", name, "1", why)
    else:
        yield Line("left alone", name, "", "NCCL's 2 tries both: cables of a graph are neither rails nor not")


def _classes(nics: Nics) -> Iterator[Line]:
    if nics.transport != "roce":
        return
    if nics.traffic_class is None:
        missing = (
            "nics.traffic_class: else RoCE goes in class 0, which switches drop from when queues are full"
        )
        yield Line("not known", "NCCL_IB_TC", "", missing)
    else:
        why = "the class with PFC and ECN on the switches; NCCL's own is 0, best effort"
        yield Line("set", "NCCL_IB_TC", str(nics.traffic_class), why)
    if nics.gid_index is not None:
        yield Line("set", "NCCL_IB_GID_INDEX", str(nics.gid_index), "the cluster's file says so")
    else:
        why = "since 2.21 NCCL takes the one of RoCE v2 and IPv4 by itself"
        yield Line("left alone", "NCCL_IB_GID_INDEX", "", why)


def _sizes(cluster: Cluster) -> Iterator[Line]:
    rate, network = _port_rate(cluster), cluster.link("network")
    flight = rate * 2 * network.latency_seconds
    if flight > _BUFFER_BYTES / 2:
        size = 2 ** ceil(flight * 2).bit_length()
        why = (
            f"{format_number(flight / 2**20)} MiB are under way at the rate of a NIC: "
            f"more than half of NCCL's 4 MiB"
        )
        yield Line("set", "NCCL_BUFFSIZE", str(size), why)
    else:
        why = f"{format_number(flight / 2**20, 2)} MiB are under way at the rate of a NIC, a buffer has 4 MiB"
        yield Line("left alone", "NCCL_BUFFSIZE", "", why)
    count = max(1, ceil(rate / _CHANNEL_BYTES_PER_SECOND))
    why = f"NCCL's own: one for each 14 GB/s of a NIC, {count} here"
    yield Line("left alone", "NCCL_NCHANNELS_PER_NET_PEER", "", why)
    why = "each takes a multiprocessor from compute that communication hides behind; NCCL estimates how many"
    yield Line("left alone", "NCCL_MIN_CTAS", "", f"{why} (before 2.17: NCCL_MIN_NCHANNELS)")
    why = "NCCL chooses by size: a ring for large sums, trees for small ones; one for all loses the other"
    yield Line("left alone", "NCCL_ALGO", "", why)


def _port_rate(cluster: Cluster) -> float:
    """Bytes a second of a NIC."""
    return cluster.link("network").bytes_per_second * cluster.accelerators_per_node / cluster.ports_per_node
