"""Transfers between ranks that run at the same time, and their flows between the ports of a fabric.

    slot         a node's worth of consecutive ranks; `RankMapping.node` says which node holds the slot
    rail         a rank's port: its local rank, scaled to the ports of the node (eight ranks on four ports:
                 two neighbours share one)
    rate group   transfers that run at the rate of the slowest of them: the steps of a ring wait for each
                 other, and so do the queue pairs that carry one message

Arrays: E transfers, F flows, L links, S slots.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from myriad.network.fabric import Fabric, Flows, Numbers, Ordinals, Paths
from myriad.network.max_min import coupled, max_min
from myriad.network.routing import into_queue_pairs

__all__ = [
    "RankMapping",
    "RankTransfers",
    "group_rates",
    "inter_node_flows",
    "merge_transfers",
    "port_limited_group_rates",
]

_FIRST_PORT = 0xC000
"""Lowest source port of RoCEv2 (Linux, include/rdma/ib_verbs.h, IB_ROCE_UDP_ENCAP_VALID_PORT_MIN)."""
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RankTransfers:
    """Transfers between ranks that run at the same time."""

    source: _Ints
    """(E) Rank that sends."""
    target: _Ints
    """(E) Rank that receives."""
    num_bytes: Numbers
    rate_group: _Ints
    """(E) Rate group of each transfer, numbered from 0."""

    def __len__(self) -> int:
        """Return the number of transfers."""
        return len(self.source)

    @property
    def num_rate_groups(self) -> int:
        """Number of rate groups: rings, and transfers outside of rings."""
        return int(self.rate_group.max(initial=-1)) + 1


def merge_transfers(exchanges: list[RankTransfers]) -> RankTransfers:
    """Return all transfers as one object; each keeps its rate groups."""
    first = np.cumsum([0, *(one.num_rate_groups for one in exchanges)])
    empty = np.empty(0, dtype=np.int64)
    return RankTransfers(
        source=np.concatenate([empty, *(one.source for one in exchanges)]),
        target=np.concatenate([empty, *(one.target for one in exchanges)]),
        num_bytes=np.concatenate([np.empty(0), *(one.num_bytes for one in exchanges)]),
        rate_group=np.concatenate(
            [empty, *(one.rate_group + at for one, at in zip(exchanges, first, strict=False))]
        ),
    )


@dataclass(frozen=True, eq=False)
class RankMapping:
    """The nodes and ports of a job's ranks."""

    node: _Ints
    """(S) Node that holds each slot."""
    ranks_per_node: int
    ports_per_node: int

    def node_of(self, ranks: _Ints) -> _Ints:
        """Return the node of each rank."""
        return self.node[ranks // self.ranks_per_node]

    def port_of(self, ranks: _Ints) -> Ordinals:
        """Return the port of each rank."""
        rail = ranks % self.ranks_per_node * self.ports_per_node // self.ranks_per_node
        return (self.node_of(ranks) * self.ports_per_node + rail).astype(np.int32)


def inter_node_flows(
    exchange: RankTransfers, mapping: RankMapping, *, queue_pairs: int = 1, start_seconds: float = 0.0
) -> tuple[Flows, _Ints]:
    """Return the flows of the transfers that leave a node, and the transfer that each flow belongs to. The
    source port of a queue pair is a hash of its ranks: the same input gives the same result."""
    leaves = np.flatnonzero(mapping.node_of(exchange.source) != mapping.node_of(exchange.target))
    source, target = exchange.source[leaves], exchange.target[leaves]
    drawn = (source.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) ^ target.astype(np.uint64)
    drawn = (drawn ^ (drawn >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    flows = Flows(
        source=mapping.port_of(source),
        target=mapping.port_of(target),
        num_bytes=exchange.num_bytes[leaves],
        start_seconds=np.full(len(leaves), start_seconds),
        entropy=(_FIRST_PORT + (drawn >> np.uint64(50))).astype(np.uint16),
    )
    return into_queue_pairs(flows, queue_pairs), np.repeat(leaves, queue_pairs)


def group_rates(bytes_per_second: Numbers, paths: Paths, rate_group: _Ints, queue_pairs: int = 1) -> Numbers:
    """Return (number of groups) the max-min rate of each transfer of a group, in bytes per second, on links
    of (L) rates; infinite for a group that stays inside nodes. ``rate_group`` is by flow."""
    return max_min(bytes_per_second, coupled(paths, rate_group)) * queue_pairs


def port_limited_group_rates(
    fabric: Fabric, flows: Flows, rate_group: _Ints, queue_pairs: int = 1
) -> Numbers:
    """Return the rates that groups would have if only NIC ports limited them, each port at the median
    rate."""
    leaving = np.zeros(fabric.num_ports)
    own = fabric.source < fabric.num_ports
    np.add.at(leaving, fabric.source[own], fabric.bytes_per_second[own])
    rates = np.full(2 * fabric.num_ports, np.median(leaving))
    both = np.stack([flows.source, flows.target + fabric.num_ports], axis=1)
    first = 2 * np.arange(len(flows) + 1, dtype=np.int64)
    return group_rates(rates, Paths(first, both.reshape(-1).astype(np.int32)), rate_group, queue_pairs)
