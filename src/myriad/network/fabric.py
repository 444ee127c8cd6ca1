"""The fabric and its traffic as arrays: NIC ports, switches, links, flows and their paths.

    vertex   0 .. num_ports - 1 are NIC ports, node by node (port = node x ports_per_node + rail); then
             switches, tier by tier
    link     one direction of a cable: cable c is links 2c and, in the opposite direction, 2c + 1
    flow     a message from one port to another; its path is a list of links

Routing and all three levels of models (max-min rates, fluid, packets) read these classes. A queue stands
before each link, at the link's source. The ports of one node are joined by the node, not by the fabric.

Arrays: V vertices, L links, F flows, N links of all paths together.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from myriad.errors import BadInputError

__all__ = ["Fabric", "Flows", "Numbers", "Ordinals", "Paths", "pieces"]

Numbers = npt.NDArray[np.float64]
Ordinals = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Fabric:
    """The network between nodes: vertices and directed links."""

    name: str
    num_nodes: int
    ports_per_node: int
    tier: npt.NDArray[np.int8]
    """(V) 0: a NIC port; 1: a first-tier switch (with ports); 2, 3: the tiers above."""
    source: Ordinals
    """(L) Vertex at which the link begins."""
    target: Ordinals
    """(L) Vertex at which the link ends."""
    bytes_per_second: Numbers
    """(L) Capacity of the link."""
    latency_seconds: Numbers
    """(L) Time from the last bit sent to the last bit received, with the forwarding of the switch at the
    end."""

    @property
    def num_ports(self) -> int:
        """Number of NIC ports of all nodes."""
        return self.num_nodes * self.ports_per_node

    @property
    def num_vertices(self) -> int:
        """Number of NIC ports and switches."""
        return len(self.tier)

    @property
    def num_links(self) -> int:
        """Number of links: two for each cable."""
        return len(self.source)

    def port(self, node: int, rail: int) -> int:
        """Return the vertex of a node's port."""
        return node * self.ports_per_node + rail

    @cached_property
    def leaving(self) -> tuple[npt.NDArray[np.int64], Ordinals]:
        """Links by the vertex at which they begin: ``(first, links)``; vertex v has ``links[first[v] :
        first[v + 1]]``."""
        order = np.argsort(self.source, kind="stable").astype(np.int32)
        count = np.bincount(self.source, minlength=self.num_vertices)
        return np.concatenate([[0], np.cumsum(count)]).astype(np.int64), order

    def check(self) -> "Fabric":
        """Check that every rate is positive and that all ports are connected. Raises `BadInputError`."""
        if not np.all(self.bytes_per_second > 0):
            link = int(np.argmin(self.bytes_per_second))
            between = f"{int(self.source[link])} to {int(self.target[link])}"
            raise BadInputError(
                "fabric.bytes_per_second", float(self.bytes_per_second[link]), f"above 0 (link {between})"
            )
        alone = np.flatnonzero(self._piece[: self.num_ports] != self._piece[0])
        if len(alone):
            node, rail = divmod(int(alone[0]), self.ports_per_node)
            raise BadInputError(
                "fabric",
                self.name,
                f"must be connected: there is no path from node 0 to port {rail} of node {node}",
            )
        return self

    @cached_property
    def _piece(self) -> npt.NDArray[np.int64]:
        return pieces(self.num_vertices, self.source, self.target)


def pieces(num_vertices: int, source: Ordinals, target: Ordinals) -> npt.NDArray[np.int64]:
    """Return (V) the connected component of each vertex over these links, as its lowest vertex."""
    piece = np.arange(num_vertices)
    while True:
        before = piece.copy()
        np.minimum.at(piece, source, piece[target])
        np.minimum.at(piece, target, piece[source])
        piece = piece[piece]
        if np.array_equal(before, piece):
            return piece


@dataclass(frozen=True, eq=False)
class Flows:
    """Messages between ports of the fabric; each array has one entry per message."""

    source: Ordinals
    """(F) Port that sends."""
    target: Ordinals
    """(F) Port that receives."""
    num_bytes: Numbers
    start_seconds: Numbers
    entropy: npt.NDArray[np.uint16]
    """(F) UDP source port. It is the only one of the five hashed header fields that differs between queue
    pairs of the same two ports (RoCEv2's destination port and protocol are fixed)."""

    def __len__(self) -> int:
        """Return the number of flows."""
        return len(self.source)


@dataclass(frozen=True, eq=False)
class Paths:
    """The links of each flow, in order: flow f takes ``link[first[f] : first[f + 1]]``."""

    first: npt.NDArray[np.int64]
    link: Ordinals

    def __len__(self) -> int:
        """Return the number of flows."""
        return len(self.first) - 1

    def of(self, flow: int) -> Ordinals:
        """Return the links of one flow."""
        return self.link[self.first[flow] : self.first[flow + 1]]
