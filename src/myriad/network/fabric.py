"""NIC ports, switches and the cables between them, as arrays: what all models of the network read.

    vertex   0 .. num_ports - 1 are NIC ports, node by node (port = node x ports_per_node + rail); then
             switches, tier by tier
    link     one direction of a cable: cable c is link 2c and, the other way, 2c + 1

A queue stands before each link, at its source. Ports of one node are joined by the node, not by the fabric.

Arrays: V vertices, L links.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from myriad.errors import BadInputError

__all__ = ["Fabric", "Numbers", "Ordinals", "pieces"]

Numbers = npt.NDArray[np.float64]
Ordinals = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Fabric:
    """One network, of whatever shape."""

    name: str
    num_nodes: int
    ports_per_node: int
    tier: npt.NDArray[np.int8]
    """(V) 0: a NIC port; 1: a switch that ports hang on; 2, 3: the tiers above."""
    source: Ordinals
    """(L) Vertex at which a link begins."""
    target: Ordinals
    """(L) Vertex at which it ends."""
    bytes_per_second: Numbers
    """(L) What it carries."""
    latency_seconds: Numbers
    """(L) From the last bit sent to the last bit received, with the forwarding of the switch at its end."""

    @property
    def num_ports(self) -> int:
        """NIC ports of all nodes."""
        return self.num_nodes * self.ports_per_node

    @property
    def num_vertices(self) -> int:
        """NIC ports and switches."""
        return len(self.tier)

    @property
    def num_links(self) -> int:
        """Directions of cables."""
        return len(self.source)

    def port(self, node: int, rail: int) -> int:
        """The vertex of a node's port."""
        return node * self.ports_per_node + rail

    @cached_property
    def leaving(self) -> tuple[npt.NDArray[np.int64], Ordinals]:
        """Links by the vertex they begin at: those of v are ``links[first[v] : first[v + 1]]``."""
        order = np.argsort(self.source, kind="stable").astype(np.int32)
        count = np.bincount(self.source, minlength=self.num_vertices)
        return np.concatenate([[0], np.cumsum(count)]).astype(np.int64), order

    def check(self) -> "Fabric":
        """Every rate above zero, and a way from each port to each other. Raises `BadInputError`."""
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
                "fabric", self.name, f"connected: no way from node 0 to port {rail} of node {node}"
            )
        return self

    @cached_property
    def _piece(self) -> npt.NDArray[np.int64]:
        return pieces(self.num_vertices, self.source, self.target)


def pieces(num_vertices: int, source: Ordinals, target: Ordinals) -> npt.NDArray[np.int64]:
    """(V) The least vertex of the connected piece that each vertex lies in, where these links join them."""
    piece = np.arange(num_vertices)
    while True:
        before = piece.copy()
        np.minimum.at(piece, source, piece[target])
        np.minimum.at(piece, target, piece[source])
        piece = piece[piece]
        if np.array_equal(before, piece):
            return piece
