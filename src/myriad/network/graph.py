"""A fabric from cables between named ends (`FabricShape.cables`).

    ends = ["0-7", "leaf"]      every port of nodes 0 to 7 to the switch "leaf"
    ends = ["0-7.1", "rail-1"]  port 1 of each
    ends = ["leaf", "spine"]    two switches

What is no number is a switch: those that ports hang on are the first tier, and so on upwards.
"""

import re

import numpy as np
import numpy.typing as npt

from myriad.errors import BadInputError
from myriad.machine import check_memory
from myriad.network.cables import CABLE_BYTES, Cables, Vertices
from myriad.network.fabric import Fabric, Numbers
from myriad.network.shape import Cable, FabricShape

__all__ = ["graph"]

_NODES = re.compile(r"\s*(\d{1,9})(?:-(\d{1,9}))?(?:\.(\d{1,9}))?\s*", re.ASCII)


def graph(shape: FabricShape, name: str, ports_per_node: int, nic_bytes_per_second: Numbers) -> Fabric:
    """The fabric of the cables that a shape lists; ``nic_bytes_per_second`` by node. Raises
    `BadInputError`."""
    num_nodes = len(nic_bytes_per_second)
    if not shape.cables:
        raise BadInputError("fabric.cables", [], "needed: a graph is what its cables say")
    ends = [end for cable in shape.cables for end in cable.ends]
    names = list(dict.fromkeys(end for end in ends if not _NODES.fullmatch(end)))
    switch = {one: num_nodes * ports_per_node + number for number, one in enumerate(names)}
    cables = Cables()
    for cable in shape.cables:
        _add(cables, cable, num_nodes, ports_per_node, switch, nic_bytes_per_second)
    tier = _tiers(cables, num_nodes * ports_per_node, len(names))
    return cables.fabric(name, num_nodes, ports_per_node, tier, shape.latency_seconds)


def _add(
    cables: Cables, cable: Cable, num_nodes: int, ports: int, switch: dict[str, int], nic: Numbers
) -> None:
    near, far = (_vertices(end, num_nodes, ports, switch) for end in cable.ends)
    if near[0] < num_nodes * ports and far[0] < num_nodes * ports:
        raise BadInputError("fabric.cables.ends", list(cable.ends), "a switch at one end at least")
    count = len(near) * len(far) * cable.count
    check_memory(f"{count} cables", count * CABLE_BYTES)
    low, high = np.minimum(near[:, None], far), np.maximum(near[:, None], far)
    low, high = (np.repeat(one.reshape(-1), cable.count) for one in (low, high))
    own = nic[np.minimum(low // ports, num_nodes - 1)]
    cables.add(low, high, own if cable.bytes_per_second is None else cable.bytes_per_second)


def _vertices(end: str, num_nodes: int, ports_per_node: int, switch: dict[str, int]) -> Vertices:
    match = _NODES.fullmatch(end)
    if match is None:
        return np.array([switch[end]])
    first, last = int(match[1]), int(match[2] or match[1])
    if not first <= last < num_nodes:
        raise BadInputError("fabric.cables.ends", end, f"nodes 0 to {num_nodes - 1}")
    if match[3] is None:
        return np.arange(first * ports_per_node, (last + 1) * ports_per_node)
    if int(match[3]) >= ports_per_node:
        raise BadInputError("fabric.cables.ends", end, f"ports 0 to {ports_per_node - 1} of a node")
    return np.arange(first, last + 1) * ports_per_node + int(match[3])


def _tiers(cables: Cables, num_ports: int, num_switches: int) -> npt.NDArray[np.int8]:
    """One more than the lowest neighbour's; switches that no port reaches: 127."""
    near, far = np.concatenate(cables.near), np.concatenate(cables.far)
    tier = np.full(num_ports + num_switches, 127, dtype=np.int8)
    tier[:num_ports] = 0
    for _ in range(num_switches):
        above = np.full_like(tier, 127)
        np.minimum.at(above, far, np.minimum(tier[near], 126) + np.int8(1))
        np.minimum.at(above, near, np.minimum(tier[far], 126) + np.int8(1))
        above[:num_ports] = 0
        if np.array_equal(above, tier):
            break
        tier = np.minimum(tier, above)
    return tier
