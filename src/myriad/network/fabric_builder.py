"""Build a `Fabric` from its shape: tiers of switches (Clos), or a graph of named switches.

            core         one group for each aggregation switch of a pod; pods meet here
              |  V cables up from each, over the core switches of its group
        aggregation      A in each pod
              |  U cables up from each, over all A of its pod
        first tier       one for `nodes_per_switch` nodes, or with rails one for each of their ports
              |
           NIC ports     with planes: a link to each plane; each plane is a copy of all switches above

Two tiers are one pod, whose aggregation switches are called spines. A three-tier shape is built with two
tiers where those suffice. Where a tier has more cables than switches, cables run in parallel, the same
number to each switch. The number of uplinks is that of a switch with all its ports in use, rounded: a
half-empty switch has as many.

A graph lists cables between named ends (`FabricShape.cables`):

    ends = ["0-7", "leaf"]      every port of nodes 0 to 7 to the switch "leaf"
    ends = ["0-7.1", "rail-1"]  port 1 of each
    ends = ["leaf", "spine"]    two switches

An end that is not a number is a switch. Switches with ports are the first tier; the others follow upwards.
"""

import re
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from myriad.errors import BadInputError
from myriad.network.config import Cable, FabricShape
from myriad.network.fabric import Fabric, Numbers
from myriad.system.machine import check_memory

__all__ = ["CABLE_BYTES", "Cables", "ClosSizes", "Vertices", "build", "clos_sizes"]

Vertices = npt.NDArray[np.int64]

CABLE_BYTES = 256
"""Memory for each cable while a fabric is built, at most: two links of 24 bytes, and the arrays they come
from."""


@dataclass
class Cables:
    """The cables of a fabric under construction; cable c becomes links 2c and 2c + 1."""

    near: list[Vertices] = field(default_factory=list)
    far: list[Vertices] = field(default_factory=list)
    rates: list[Numbers] = field(default_factory=list)

    def add(self, near: Vertices, far: Vertices, bytes_per_second: float | Numbers) -> None:
        """Add cables between ``near[i]`` and ``far[i]``; ``far`` is the upper end."""
        self.near.append(near)
        self.far.append(far)
        self.rates.append(np.broadcast_to(np.asarray(bytes_per_second, dtype=np.float64), near.shape))

    def fabric(
        self,
        name: str,
        num_nodes: int,
        ports_per_node: int,
        tier: npt.NDArray[np.int8],
        latency_seconds: float,
    ) -> Fabric:
        """Return the checked fabric."""
        near, far, rates = (np.concatenate(column) for column in (self.near, self.far, self.rates))
        both = np.stack([near, far], axis=1)
        return Fabric(
            name=name,
            num_nodes=num_nodes,
            ports_per_node=ports_per_node,
            tier=tier,
            source=both.reshape(-1).astype(np.int32),
            target=both[:, ::-1].reshape(-1).astype(np.int32),
            bytes_per_second=np.repeat(rates, 2),
            latency_seconds=np.full(2 * len(rates), latency_seconds),
        ).check()


_SAME = 1 + 1e-9
"""Factor below which ratios count as equal: they differ by rounding."""


def build(
    shape: FabricShape,
    *,
    name: str,
    num_nodes: int,
    ports_per_node: int,
    nic_bytes_per_second: float | Numbers,
) -> Fabric:
    """Build the fabric of a cluster. ``nic_bytes_per_second`` is the rate of each port of a node, one for
    all nodes or one for each. Raises `BadInputError`."""
    rates = np.broadcast_to(np.asarray(nic_bytes_per_second, dtype=np.float64), (num_nodes,))
    if shape.kind == "graph":
        return graph(shape, name, ports_per_node, rates)
    sizes = clos_sizes(shape, num_nodes, ports_per_node, float(rates.max()))
    check_memory(f"{num_nodes * ports_per_node} NIC ports", sizes.num_cables * shape.num_planes * CABLE_BYTES)
    cables = Cables()
    for plane in range(shape.num_planes):
        _add_plane(cables, sizes, shape, rates, plane)
    return cables.fabric(
        name, num_nodes, ports_per_node, _tiers(sizes, shape.num_planes), shape.latency_seconds
    )


@dataclass(frozen=True)
class ClosSizes:
    """Numbers of switches and cables in one plane of a Clos fabric."""

    num_nodes: int
    ports_per_node: int
    rails: int
    """First-tier switches of a set."""
    nodes_per_switch: int
    sets_per_pod: int
    pods: int
    up: int
    """Cables up from a first-tier switch."""
    aggregations: int
    """Aggregation switches of a pod."""
    pod_up: int
    """Cables up from an aggregation switch."""
    cores: int
    """Core switches for each aggregation switch of a pod."""
    up_bytes_per_second: float

    @property
    def num_first(self) -> int:
        """Number of first-tier switches."""
        return -(-self.num_nodes // self.nodes_per_switch) * self.rails

    @property
    def num_cables(self) -> int:
        """Number of cables, from NIC ports and between switches."""
        above = self.num_first * self.up + self.pods * self.aggregations * self.pod_up
        return self.num_nodes * self.ports_per_node + above

    @property
    def per_plane(self) -> int:
        """Number of switches in one plane of the fabric."""
        return self.num_first + self.pods * self.aggregations + self.aggregations * self.cores


def clos_sizes(shape: FabricShape, num_nodes: int, ports_per_node: int, nic: float) -> ClosSizes:
    """Return the numbers of switches and cables, and their rates. Raises `BadInputError`."""
    planes, rails = shape.num_planes, ports_per_node if shape.has_rails else 1
    port = nic / planes * shape.split if shape.port_bytes_per_second is None else shape.port_bytes_per_second
    down = min(nic / planes, port / shape.split)
    if not down > 0:
        key = "links.network.bytes_per_second" if nic <= 0 else "fabric.port_bytes_per_second"
        raise BadInputError(key, down, "above 0")
    per_node = ports_per_node // rails
    per_switch = min(_nodes_per_switch(shape, per_node), num_nodes)
    designed = _nodes_per_switch(shape, per_node) if shape.nodes_per_switch else per_switch
    up = max(1, round(designed * per_node * down / (port * shape.oversubscription)))
    _check_ports(shape, designed * per_node, up)
    sets = -(-num_nodes // per_switch)
    if sets * rails == 1:
        return ClosSizes(num_nodes, ports_per_node, 1, per_switch, 1, 1, 0, 0, 0, 0, port)
    sets_per_pod = _sets_per_pod(shape, per_switch, rails, sets)
    pods = -(-sets // sets_per_pod)
    above = 1 / shape.pod_oversubscription if pods > 1 else 0.0
    below = sets_per_pod * rails * up
    aggregations = _num_switches_above(
        shape, up, below * (1 + above), f"{sets_per_pod * rails} first-tier switches"
    )
    pod_up = max(1, round(below / aggregations * above)) if pods > 1 else 0
    cores = _num_switches_above(shape, pod_up, pods * pod_up, f"{pods} pods") if pods > 1 else 0
    return ClosSizes(
        num_nodes,
        ports_per_node,
        rails,
        per_switch,
        sets_per_pod,
        pods,
        up,
        aggregations,
        pod_up,
        cores,
        port,
    )


def _nodes_per_switch(shape: FabricShape, per_node: int) -> int:
    if shape.nodes_per_switch is not None:
        return shape.nodes_per_switch
    if shape.ports_per_switch is None:
        return 2**31
    share = shape.oversubscription / (1 + shape.oversubscription)
    return max(1, int(shape.ports_per_switch * share) * shape.split // per_node)


def _check_ports(shape: FabricShape, down: int, up: int) -> None:
    needed = -(-down // shape.split) + up
    if shape.ports_per_switch is not None and needed > shape.ports_per_switch:
        allowed = f"at least {needed}: {down} NIC ports ({shape.split} of them a port) and {up} up"
        raise BadInputError("fabric.ports_per_switch", shape.ports_per_switch, allowed)


def _sets_per_pod(shape: FabricShape, per_switch: int, rails: int, sets: int) -> int:
    if shape.kind != "clos3":
        return sets
    if shape.nodes_per_pod is not None:
        if shape.nodes_per_pod % per_switch:
            raise BadInputError("fabric.nodes_per_pod", shape.nodes_per_pod, f"a multiple of {per_switch}")
        return min(sets, shape.nodes_per_pod // per_switch)
    if shape.ports_per_switch is None:
        raise BadInputError(
            "fabric.nodes_per_pod", None, "required, or ports_per_switch: three tiers have pods"
        )
    if sets * rails <= shape.ports_per_switch:
        return sets
    down = int(shape.ports_per_switch * shape.pod_oversubscription / (1 + shape.pod_oversubscription))
    return max(1, min(sets, down // rails))


def _num_switches_above(shape: FabricShape, cables: int, ends: float, below: str) -> int:
    """Return the least number of switches that have ports for ``ends`` cables, such that the ``cables`` of
    each switch below spread evenly over them."""
    if shape.ports_per_switch is None:
        return cables
    for count in range(1, cables + 1):
        if cables % count == 0 and ends / count <= shape.ports_per_switch * _SAME:
            return count
    allowed = f"at least {round(ends / cables)}: switches above {below} have no ports for all of them"
    raise BadInputError("fabric.ports_per_switch", shape.ports_per_switch, allowed)


def _tiers(sizes: ClosSizes, planes: int) -> npt.NDArray[np.int8]:
    counts = [sizes.num_first, sizes.pods * sizes.aggregations, sizes.aggregations * sizes.cores]
    switches = np.tile(np.repeat(np.array([1, 2, 3], dtype=np.int8), counts), planes)
    ports = np.zeros(sizes.num_nodes * sizes.ports_per_node, dtype=np.int8)
    return np.concatenate([ports, switches])


def _add_plane(cables: Cables, sizes: ClosSizes, shape: FabricShape, nic: Numbers, plane: int) -> None:
    num_ports = sizes.num_nodes * sizes.ports_per_node
    first = num_ports + plane * sizes.per_plane
    port = np.arange(num_ports)
    node, rail = port // sizes.ports_per_node, port % sizes.ports_per_node
    leaf = node // sizes.nodes_per_switch * sizes.rails + (rail if sizes.rails > 1 else 0)
    rates = np.minimum(nic[node] / shape.num_planes, sizes.up_bytes_per_second / shape.split)
    cables.add(port, first + leaf, rates)
    if sizes.aggregations:
        _add_uplinks(cables, sizes, first)
    if sizes.cores:
        _add_core(cables, sizes, first)


def _add_uplinks(cables: Cables, sizes: ClosSizes, first: int) -> None:
    every = np.arange(sizes.num_first * sizes.up)
    leaf, cable = every // sizes.up, every % sizes.up
    pod = leaf // (sizes.sets_per_pod * sizes.rails)
    above = pod * sizes.aggregations + cable // (sizes.up // sizes.aggregations)
    cables.add(first + leaf, first + sizes.num_first + above, sizes.up_bytes_per_second)


def _add_core(cables: Cables, sizes: ClosSizes, first: int) -> None:
    every = np.arange(sizes.pods * sizes.aggregations * sizes.pod_up)
    aggregation, cable = every // sizes.pod_up, every % sizes.pod_up
    which = aggregation % sizes.aggregations
    core = which * sizes.cores + cable // (sizes.pod_up // sizes.cores)
    start = first + sizes.num_first
    above = start + sizes.pods * sizes.aggregations + core
    cables.add(start + aggregation, above, sizes.up_bytes_per_second)


_NODES = re.compile(r"\s*(\d{1,9})(?:-(\d{1,9}))?(?:\.(\d{1,9}))?\s*", re.ASCII)


def graph(shape: FabricShape, name: str, ports_per_node: int, nic_bytes_per_second: Numbers) -> Fabric:
    """Return the fabric of the cables that a shape lists; ``nic_bytes_per_second`` is by node. Raises
    `BadInputError`."""
    num_nodes = len(nic_bytes_per_second)
    if not shape.cables:
        raise BadInputError("fabric.cables", [], "required for a graph")
    ends = [end for cable in shape.cables for end in cable.ends]
    names = list(dict.fromkeys(end for end in ends if not _NODES.fullmatch(end)))
    switch = {one: num_nodes * ports_per_node + number for number, one in enumerate(names)}
    cables = Cables()
    for cable in shape.cables:
        _add_cable(cables, cable, num_nodes, ports_per_node, switch, nic_bytes_per_second)
    tier = _graph_tiers(cables, num_nodes * ports_per_node, len(names))
    return cables.fabric(name, num_nodes, ports_per_node, tier, shape.latency_seconds)


def _add_cable(
    cables: Cables, cable: Cable, num_nodes: int, ports: int, switch: dict[str, int], nic: Numbers
) -> None:
    near, far = (_vertices(end, num_nodes, ports, switch) for end in cable.ends)
    if near[0] < num_nodes * ports and far[0] < num_nodes * ports:
        raise BadInputError("fabric.cables.ends", list(cable.ends), "a switch at one end or both")
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


def _graph_tiers(cables: Cables, num_ports: int, num_switches: int) -> npt.NDArray[np.int8]:
    """Return the tier of each vertex: one more than its lowest neighbour's; 127 for switches that no port
    reaches."""
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
