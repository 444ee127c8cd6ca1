"""The ranks that save and load together, the nodes that they are on, and the addresses of the nodes.

Two ranks are on one node if they share a snapshot server. A launcher may put several nodes of a run on one
machine; a node then starts at each local rank 0.
"""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, TypeVar

import torch.distributed as dist

from myriad.comm.typed_collectives import broadcast_value, gather_values

__all__ = ["CheckpointWorld", "machine_id", "rank_addresses", "ranks_of_nodes", "shares_machine"]

T = TypeVar("T")


@dataclass(frozen=True)
class CheckpointWorld:
    """The ranks that load together, and their nodes."""

    rank: int = 0
    ranks_of_node: tuple[tuple[int, ...], ...] = ((0,),)
    group: dist.ProcessGroup | None = None
    """Host process group of all ranks; ``None`` with one rank."""

    @property
    def node(self) -> int:
        """Node of this rank."""
        return next(node for node, ranks in enumerate(self.ranks_of_node) if self.rank in ranks)

    @property
    def size(self) -> int:
        """Number of ranks that load."""
        return sum(map(len, self.ranks_of_node))

    def gather(self, value: T, kind: Any) -> list[T]:
        """Return the value of every rank, on every rank. ``kind`` is its type, as for `gather_values`."""
        return gather_values(value, kind, self.group)

    def from_first(self, value: T, kind: Any) -> T:
        """Return the value of rank 0 on every rank. ``kind`` is its type, as for `broadcast_value`."""
        return broadcast_value(value, kind, self.group)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.gather(None, None)


def machine_id() -> str:
    """Return an id of the host and network namespace. Processes with equal ids share abstract sockets."""
    return f"{socket.gethostname()}:{os.stat('/proc/self/ns/net').st_ino}"


def ranks_of_nodes(machines: Sequence[tuple[str, int]]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each node. A node starts at each local rank 0."""
    nodes: list[list[int]] = []
    for rank, (_, local_rank) in enumerate(machines):
        if local_rank == 0 or not nodes:
            nodes.append([])
        nodes[-1].append(rank)
    return tuple(map(tuple, nodes))


def shares_machine(machines: Sequence[tuple[str, int]], world: CheckpointWorld) -> bool:
    """Whether this machine hosts another node of the run."""
    machine_of_node = [machines[ranks[0]][0] for ranks in world.ranks_of_node]
    return machine_of_node.count(machine_of_node[world.node]) > 1


def rank_addresses(world: CheckpointWorld) -> list[str]:
    """Return the address at which other nodes reach each rank.

    On some machines rank 0's host name resolves to a loopback address (Debian: 127.0.1.1). Such a machine
    uses its route to a rank with a non-loopback address instead."""
    addresses = world.gather(_own_address(os.environ.get("MASTER_ADDR", "127.0.0.1")), str)
    far = [address for address in addresses if not _is_loopback(address)]
    if 0 < len(far) < len(addresses):
        own = addresses[world.rank]
        addresses = world.gather(_own_address(far[0]) if _is_loopback(own) else own, str)
    return addresses


def _own_address(other: str) -> str:
    """Return the address of this host on the route to ``other``."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 1))
        address: str = probe.getsockname()[0]
        return address


def _is_loopback(address: str) -> bool:
    return ip_address(address).is_loopback
