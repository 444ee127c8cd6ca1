"""Environment variables for NCCL and gloo on a cluster: one line for each fact that asks for a setting, with
its reason.

    set         the cluster, or a model of its fabric, asks for another value than NCCL's default
    left alone  NCCL's default is right here, and why
    not known   a fact is missing in the cluster's file

Names, defaults and meanings: NVIDIA/nccl, docs/userguide/source/env.rst. The evidence for queue pairs comes
from `myriad.network.hash_conflicts`, that for timers from `myriad.network.link_flaps`.

`TuningEvidence` holds the numbers behind the choice, for a figure: the rate of the slowest flow with 1, 2, 4
and more queue pairs, and the hours lost to flaps with each timeout.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Literal

from myriad.errors import BadInputError
from myriad.network.config import Nics
from myriad.planner.cluster_config import Cluster
from myriad.units import format_number

if TYPE_CHECKING:
    from myriad.network.link_flaps import FlapScenario
    from myriad.network.routing import Routes

__all__ = [
    "DEFAULT_TIMEOUT",
    "AdviceKind",
    "EnvAdvice",
    "TuningEvidence",
    "is_sprayed",
    "most_queue_pairs",
    "slowest_ratio",
    "tune",
    "tuning_evidence",
]

AdviceKind = Literal["set", "left alone", "not known"]

DEFAULT_TIMEOUT = 20
"""NCCL's default of NCCL_IB_TIMEOUT since 2.23."""
_BUFFER_BYTES, _STEPS = 4 * 2**20, 8
"""The default of NCCL_BUFFSIZE, and the number of messages it is cut into (src/include/device.h:
NCCL_STEPS)."""
_CHANNEL_BYTES_PER_SECOND = 14e9
"""NCCL's constant for the rate of a channel of sends (src/graph/paths.cc: P2P_PER_CHANNEL_NET_BW)."""
_LEAST_MESSAGE_BYTES = 64 * 2**10
"""Smallest useful message of a queue pair: sixteen packets of 4 KiB; below, requests rather than bytes set
the rate (assumed)."""
_WORTH_RATIO = 1.05
_DRAWS, _RING_NODES = 3, 16
_FAST_SOCKET_BYTES_PER_SECOND = 12.5e9
"""Rate above which NCCL's documentation asks for several sockets: 100 Gbit/s."""


@dataclass(frozen=True)
class EnvAdvice:
    """Advice about one environment variable."""

    what: AdviceKind
    name: str
    value: str
    """The value; empty where the variable is not set."""
    reason: str

    @property
    def assignment(self) -> str:
        """``NAME=value``, or the name alone."""
        return f"{self.name}={self.value}" if self.value else self.name


def tune(cluster: Cluster, habits: "FlapScenario") -> list[EnvAdvice]:
    """Return the advice for a cluster. ``habits``: how often its links flap. Raises `BadInputError` for a
    cluster without network, or with an unknown one."""
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
    from myriad.planner.fabric.cluster_fabric import fabric_of

    lines += _timers(nics, habits)
    lines += _queue_pairs(nics, Routes(fabric_of(cluster)))
    lines += _rails(cluster)
    lines += _classes(nics)
    return [*lines, *_sizes(cluster)]


def _interfaces(cluster: Cluster, nics: Nics) -> Iterator[EnvAdvice]:
    if nics.transport == "tcp":
        yield EnvAdvice(
            "set", "NCCL_IB_DISABLE", "1", "no RDMA here: a device that is found by chance is not used"
        )
    elif not nics.names:
        yield EnvAdvice(
            "not known", "NCCL_IB_HCA", "", "nics.names: else NCCL also takes NICs of storage and management"
        )
    else:
        ports = cluster.ports_per_node
        if len(nics.names) != ports:
            allowed = f"{ports} of them, one for each of nics_per_node"
            raise BadInputError(f"{cluster.name}: nics.names", list(nics.names), allowed)
        why = f"the {ports} NICs of a node that are for training, and only those; = takes names as they are"
        yield EnvAdvice("set", "NCCL_IB_HCA", "=" + ",".join(nics.names), why)
    if nics.interface is None:
        missing = "nics.interface: else each node takes its first one, which others may not reach"
        yield EnvAdvice("not known", "NCCL_SOCKET_IFNAME", "", missing)
        yield EnvAdvice(
            "not known",
            "GLOO_SOCKET_IFNAME",
            "",
            "nics.interface: Myriad takes the one that reaches the driver",
        )
        return
    why = "ranks meet by it: the one interface that all nodes reach each other by; = takes the name as it is"
    yield EnvAdvice("set", "NCCL_SOCKET_IFNAME", f"={nics.interface}", why)
    yield EnvAdvice(
        "set", "GLOO_SOCKET_IFNAME", nics.interface, "the same for gloo, which else looks up the host's name"
    )


def _sockets(cluster: Cluster) -> Iterator[EnvAdvice]:
    rate = _port_rate(cluster)
    if rate < _FAST_SOCKET_BYTES_PER_SECOND:
        why = f"one socket carries the {format_number(8e-9 * rate)} Gbit/s of a NIC"
        yield EnvAdvice("left alone", "NCCL_SOCKET_NTHREADS", "", why)
        return
    why = (
        f"one thread does not fill {format_number(8e-9 * rate)} Gbit/s: "
        f"NCCL's documentation has 4 from 100 Gbit/s on"
    )
    yield EnvAdvice("set", "NCCL_SOCKET_NTHREADS", "4", why)
    yield EnvAdvice("set", "NCCL_NSOCKS_PERTHREAD", "4", f"{why} (4 x 4 sockets, at most 64)")


def _timers(nics: Nics, habits: "FlapScenario") -> Iterator[EnvAdvice]:
    from myriad.network.link_flaps import Timers, best_timers, flap_cost

    adaptive = nics.transport == "roce" and nics.adaptive_retransmission
    best = best_timers(Timers(DEFAULT_TIMEOUT, adaptive=adaptive), habits)
    own = flap_cost(Timers(DEFAULT_TIMEOUT, adaptive=adaptive), habits)
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
        yield EnvAdvice("left alone", "NCCL_IB_TIMEOUT", "", f"{DEFAULT_TIMEOUT} is as good as any: {lost}")
    else:
        yield EnvAdvice("set", "NCCL_IB_TIMEOUT", str(timeout), f"{lost} (myriad network flap)")
    why = "7 is the most there are, and NCCL's own: of the same patience, more and shorter intervals"
    yield EnvAdvice("left alone", "NCCL_IB_RETRY_CNT", "", why)


def _queue_pairs(nics: Nics, routes: "Routes") -> Iterator[EnvAdvice]:
    """Yield the number of queue pairs that the model of hashed flows justifies."""
    name, split = "NCCL_IB_QPS_PER_CONNECTION", "NCCL_IB_SPLIT_DATA_ON_QPS"
    alone, sprayed = slowest_ratio(routes, 1), is_sprayed(nics)
    if nics.transport == "roce" and nics.adaptive_routing:
        why = f"off by default on RoCE: hashed, the slowest flow of a ring has {alone:.2f} of its rate"
        yield EnvAdvice("set", "NCCL_IB_ADAPTIVE_ROUTING", "1", why)
    if sprayed or alone > 1 / _WORTH_RATIO:
        why = "switches choose for each packet: more queue pairs spread nothing further"
        if not sprayed:
            why = f"no flows share an uplink to their harm: the slowest has {alone:.2f} of its rate with one"
        yield EnvAdvice("left alone", name, "", why)
        return
    message = _BUFFER_BYTES // _STEPS
    count, ratio = 1, alone
    while 2 * count <= most_queue_pairs():
        doubled = slowest_ratio(routes, 2 * count)
        if doubled < ratio * _WORTH_RATIO:
            break
        count, ratio = 2 * count, doubled
    if count == 1:
        yield EnvAdvice(
            "left alone", name, "", f"two are no better: the slowest flow has {alone:.2f} of its rate"
        )
        return
    why = "hashes put several flows on one uplink: the slowest of rings between switches has "
    why += f"{alone:.2f} of its rate with one queue pair, {ratio:.2f} with {count} (myriad network ecmp)"
    yield EnvAdvice("set", name, str(count), why)
    why = f"each message of {message // 1024} KiB goes in {count} parts of {message // count // 1024} KiB: "
    yield EnvAdvice(
        "set", split, "1", why + "in turns, what is sent in few messages uses few of the queue pairs"
    )


def is_sprayed(nics: Nics) -> bool:
    """Return whether switches choose a path for each packet."""
    return nics.transport == "infiniband" or nics.adaptive_routing


def most_queue_pairs() -> int:
    """Return the largest number of queue pairs that leaves messages of a useful size."""
    return _BUFFER_BYTES // _STEPS // _LEAST_MESSAGE_BYTES


def slowest_ratio(routes: "Routes", queue_pairs: int) -> float:
    """Return the rate of the slowest flow of hashed rings between switches, relative to its full rate."""
    from myriad.network.hash_conflicts import node_order, ring_flows, sample_conflicts

    fabric = routes.fabric
    flows = ring_flows(fabric, node_order(routes, "spread"), min(_RING_NODES, fabric.num_nodes))
    return float(sample_conflicts(routes, flows, queue_pairs=queue_pairs, draws=_DRAWS).slowest_ratio.mean())


def _rails(cluster: Cluster) -> Iterator[EnvAdvice]:
    from myriad.planner.fabric.cluster_fabric import shape_of

    shape, name = shape_of(cluster), "NCCL_CROSS_NIC"
    if cluster.ports_per_node == 1:
        yield EnvAdvice("left alone", name, "", "a node has one NIC")
    elif shape.has_rails:
        why = "each rail has switches of its own: from one rail to another is a way through the tier above"
        yield EnvAdvice("set", name, "0", why)
    elif shape.kind != "graph":
        why = "all NICs of a node are on one switch: to keep to the same number avoids nothing"
        yield EnvAdvice("set", name, "1", why)
    else:
        yield EnvAdvice(
            "left alone", name, "", "NCCL's 2 tries both: cables of a graph are neither rails nor not"
        )


def _classes(nics: Nics) -> Iterator[EnvAdvice]:
    if nics.transport != "roce":
        return
    if nics.traffic_class is None:
        missing = (
            "nics.traffic_class: else RoCE goes in class 0, which switches drop from when queues are full"
        )
        yield EnvAdvice("not known", "NCCL_IB_TC", "", missing)
    else:
        why = "the class with PFC and ECN on the switches; NCCL's own is 0, best effort"
        yield EnvAdvice("set", "NCCL_IB_TC", str(nics.traffic_class), why)
    if nics.gid_index is not None:
        yield EnvAdvice("set", "NCCL_IB_GID_INDEX", str(nics.gid_index), "the cluster's file says so")
    else:
        why = "since 2.21 NCCL takes the one of RoCE v2 and IPv4 by itself"
        yield EnvAdvice("left alone", "NCCL_IB_GID_INDEX", "", why)


def _sizes(cluster: Cluster) -> Iterator[EnvAdvice]:
    rate, network = _port_rate(cluster), cluster.link("network")
    flight = rate * 2 * network.latency_seconds
    if flight > _BUFFER_BYTES / 2:
        size = 2 ** ceil(flight * 2).bit_length()
        why = (
            f"{format_number(flight / 2**20)} MiB are under way at the rate of a NIC: "
            f"more than half of NCCL's 4 MiB"
        )
        yield EnvAdvice("set", "NCCL_BUFFSIZE", str(size), why)
    else:
        why = f"{format_number(flight / 2**20, 2)} MiB are under way at the rate of a NIC, a buffer has 4 MiB"
        yield EnvAdvice("left alone", "NCCL_BUFFSIZE", "", why)
    count = max(1, ceil(rate / _CHANNEL_BYTES_PER_SECOND))
    why = f"NCCL's own: one for each 14 GB/s of a NIC, {count} here"
    yield EnvAdvice("left alone", "NCCL_NCHANNELS_PER_NET_PEER", "", why)
    why = "each takes a multiprocessor from compute that communication hides behind; NCCL estimates how many"
    yield EnvAdvice("left alone", "NCCL_MIN_CTAS", "", f"{why} (before 2.17: NCCL_MIN_NCHANNELS)")
    why = "NCCL chooses by size: a ring for large sums, trees for small ones; one for all loses the other"
    yield EnvAdvice("left alone", "NCCL_ALGO", "", why)


def _port_rate(cluster: Cluster) -> float:
    """Return the bytes per second of a NIC."""
    return cluster.link("network").bytes_per_second * cluster.accelerators_per_node / cluster.ports_per_node


_READ = ("NCCL_IB_QPS_PER_CONNECTION", "NCCL_IB_TIMEOUT")
_TIMEOUTS = range(14, 25)
"""Values of NCCL_IB_TIMEOUT among which `myriad.network.link_flaps.best_timers` chooses."""


@dataclass(frozen=True)
class TuningEvidence:
    """The numbers behind the advice for one cluster."""

    slowest: tuple[tuple[int, float], ...]
    """Pairs of the number of queue pairs and the relative rate of the slowest flow of hashed rings between
    switches; empty where switches choose a path for each packet."""
    num_queue_pairs: int
    """Number of queue pairs that the advice sets."""
    hours: tuple[tuple[int, float], ...]
    """Pairs of NCCL_IB_TIMEOUT and the hours lost to flaps in a month."""
    timeout: int
    """Value of NCCL_IB_TIMEOUT that the advice sets."""


def tuning_evidence(
    cluster: Cluster, habits: "FlapScenario", lines: Sequence[EnvAdvice]
) -> TuningEvidence | None:
    """Return the evidence. ``lines``: the advice of `tune`. ``None``: the cluster has no RDMA, which these
    settings concern."""
    from myriad.network.link_flaps import Timers, flap_cost
    from myriad.network.routing import Routes
    from myriad.planner.fabric.cluster_fabric import fabric_of

    nics = cluster.nics
    if nics is None or nics.transport == "tcp":
        return None
    asked = {line.name: int(line.value) for line in lines if line.name in _READ and line.value}
    adaptive = nics.transport == "roce" and nics.adaptive_retransmission
    fates = [flap_cost(Timers(timeout, adaptive=adaptive), habits) for timeout in _TIMEOUTS]
    slowest: list[tuple[int, float]] = []
    if not is_sprayed(nics):
        routes = Routes(fabric_of(cluster))
        counts = [2**power for power in range(most_queue_pairs().bit_length())]
        slowest = [(count, slowest_ratio(routes, count)) for count in counts]
    return TuningEvidence(
        slowest=tuple(slowest),
        num_queue_pairs=asked.get(_READ[0], 1),
        hours=tuple((one.timers.timeout, one.hours_per_month) for one in fates),
        timeout=asked.get(_READ[1], DEFAULT_TIMEOUT),
    )
