"""Ranks that send at the same time, and where they sit: from rank numbers to flows between ports.

    slot      the n-th node's worth of consecutive ranks; `Seats.node` says which node holds it
    rail      a rank's port: its place in the node, scaled to the node's ports (eight ranks on four ports: two
              neighbours share one)
    pace      transfers of one pace go at the rate of the slowest of them: the steps of a ring wait for each
              other, and so do the queue pairs that one message is spread over

Arrays: E transfers, F flows, L links, S slots.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from myriad.network.fabric import Fabric, Numbers, Ordinals
from myriad.network.flows import Flows, Paths
from myriad.network.max_min import coupled, max_min
from myriad.network.routing import into_queue_pairs

__all__ = ["Exchange", "Seats", "flows_of", "joined", "pace_rates", "port_rates"]

_FIRST_PORT = 0xC000
"""Least source port that RoCEv2 takes (Linux, include/rdma/ib_verbs.h, IB_ROCE_UDP_ENCAP_VALID_PORT_MIN)."""
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Exchange:
    """Transfers between ranks."""

    source: _Ints
    """(E) Rank that sends."""
    target: _Ints
    """(E) Rank that receives."""
    num_bytes: Numbers
    """(E)"""
    pace: _Ints
    """(E) From 0."""

    def __len__(self) -> int:
        """Transfers."""
        return len(self.source)

    @property
    def num_paces(self) -> int:
        """Rings, and transfers that are of none."""
        return int(self.pace.max(initial=-1)) + 1


def joined(exchanges: list[Exchange]) -> Exchange:
    """All at once; each keeps its own paces."""
    first = np.cumsum([0, *(one.num_paces for one in exchanges)])
    empty = np.empty(0, dtype=np.int64)
    return Exchange(
        source=np.concatenate([empty, *(one.source for one in exchanges)]),
        target=np.concatenate([empty, *(one.target for one in exchanges)]),
        num_bytes=np.concatenate([np.empty(0), *(one.num_bytes for one in exchanges)]),
        pace=np.concatenate([empty, *(one.pace + at for one, at in zip(exchanges, first, strict=False))]),
    )


@dataclass(frozen=True, eq=False)
class Seats:
    """Where a job's ranks are."""

    node: _Ints
    """(S) That holds each slot."""
    ranks_per_node: int
    ports_per_node: int

    def node_of(self, ranks: _Ints) -> _Ints:
        """The node of each rank."""
        return self.node[ranks // self.ranks_per_node]

    def port_of(self, ranks: _Ints) -> Ordinals:
        """The port of each rank."""
        rail = ranks % self.ranks_per_node * self.ports_per_node // self.ranks_per_node
        return (self.node_of(ranks) * self.ports_per_node + rail).astype(np.int32)


def flows_of(
    exchange: Exchange, seats: Seats, *, queue_pairs: int = 1, start_seconds: float = 0.0
) -> tuple[Flows, _Ints]:
    """What leaves nodes, and the transfer that each flow is (a part) of. The source port of a queue pair is
    drawn from its ranks: the same question has the same answer."""
    leaves = np.flatnonzero(seats.node_of(exchange.source) != seats.node_of(exchange.target))
    source, target = exchange.source[leaves], exchange.target[leaves]
    drawn = (source.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) ^ target.astype(np.uint64)
    drawn = (drawn ^ (drawn >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    flows = Flows(
        source=seats.port_of(source),
        target=seats.port_of(target),
        num_bytes=exchange.num_bytes[leaves],
        start_seconds=np.full(len(leaves), start_seconds),
        entropy=(_FIRST_PORT + (drawn >> np.uint64(50))).astype(np.uint16),
    )
    return into_queue_pairs(flows, queue_pairs), np.repeat(leaves, queue_pairs)


def pace_rates(bytes_per_second: Numbers, paths: Paths, pace: _Ints, queue_pairs: int = 1) -> Numbers:
    """(number of paces) Bytes a second of each transfer of a pace on links of (L) rates, all sharing fairly;
    without bound where nothing leaves a node. ``pace``: of each flow."""
    return max_min(bytes_per_second, coupled(paths, pace)) * queue_pairs


def port_rates(fabric: Fabric, flows: Flows, pace: _Ints, queue_pairs: int = 1) -> Numbers:
    """The same where nothing is narrow but the ports, and those are all as most are."""
    leaving = np.zeros(fabric.num_ports)
    own = fabric.source < fabric.num_ports
    np.add.at(leaving, fabric.source[own], fabric.bytes_per_second[own])
    rates = np.full(2 * fabric.num_ports, np.median(leaving))
    both = np.stack([flows.source, flows.target + fabric.num_ports], axis=1)
    first = 2 * np.arange(len(flows) + 1, dtype=np.int64)
    return pace_rates(rates, Paths(first, both.reshape(-1).astype(np.int32)), pace, queue_pairs)
