"""Fabrics from their shape: tiers of switches (`FabricShape`), or a graph of named ones (`graph`).

            core         one group for each aggregation switch of a pod; pods meet here
              |  V cables up from each, over the core switches of its group
        aggregation      A in each pod
              |  U cables up from each, over all A of its pod
        first tier       one for `nodes_per_switch` nodes, or with rails one for each of their ports
              |
           NIC ports     with planes: a link to each, and all above once more

Two tiers are one pod, whose aggregation switches are called spines; three tiers become two where those would
do. Where a tier has more cables than switches, they go in parallel, the same number to each. Cables up are as
many as the ratio asks for of a switch with all its places taken, rounded: a half-empty one has them too.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from myriad.errors import BadInputError
from myriad.machine import check_memory
from myriad.network.cables import CABLE_BYTES, Cables
from myriad.network.fabric import Fabric, Numbers
from myriad.network.graph import graph
from myriad.network.shape import FabricShape

__all__ = ["Sizes", "build", "clos_sizes"]

_SAME = 1 + 1e-9
"""Ratios that differ by rounding."""


def build(
    shape: FabricShape,
    *,
    name: str,
    num_nodes: int,
    ports_per_node: int,
    nic_bytes_per_second: float | Numbers,
) -> Fabric:
    """The fabric of so many nodes; ``nic_bytes_per_second`` of each of a node's ports, for all or by node.
    Raises `BadInputError`."""
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
class Sizes:
    """Of one plane."""

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
    """In a pod."""
    pod_up: int
    """Cables up from an aggregation switch."""
    cores: int
    """For each aggregation switch of a pod."""
    up_bytes_per_second: float

    @property
    def num_first(self) -> int:
        """First-tier switches."""
        return -(-self.num_nodes // self.nodes_per_switch) * self.rails

    @property
    def num_cables(self) -> int:
        """From NIC ports and between switches."""
        above = self.num_first * self.up + self.pods * self.aggregations * self.pod_up
        return self.num_nodes * self.ports_per_node + above

    @property
    def per_plane(self) -> int:
        """Switches."""
        return self.num_first + self.pods * self.aggregations + self.aggregations * self.cores


def clos_sizes(shape: FabricShape, num_nodes: int, ports_per_node: int, nic: float) -> Sizes:
    """How many of everything, and at which rates. Raises `BadInputError`."""
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
        return Sizes(num_nodes, ports_per_node, 1, per_switch, 1, 1, 0, 0, 0, 0, port)
    sets_per_pod = _sets_per_pod(shape, per_switch, rails, sets)
    pods = -(-sets // sets_per_pod)
    above = 1 / shape.pod_oversubscription if pods > 1 else 0.0
    below = sets_per_pod * rails * up
    aggregations = _fewest(shape, up, below * (1 + above), f"{sets_per_pod * rails} first-tier switches")
    pod_up = max(1, round(below / aggregations * above)) if pods > 1 else 0
    cores = _fewest(shape, pod_up, pods * pod_up, f"{pods} pods") if pods > 1 else 0
    return Sizes(
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
            "fabric.nodes_per_pod", None, "needed, or ports_per_switch: three tiers have pods"
        )
    if sets * rails <= shape.ports_per_switch:
        return sets
    down = int(shape.ports_per_switch * shape.pod_oversubscription / (1 + shape.pod_oversubscription))
    return max(1, min(sets, down // rails))


def _fewest(shape: FabricShape, cables: int, ends: float, below: str) -> int:
    """Switches that ``ends`` cables end at, so many that each has ports for them, and that the ``cables`` of
    each switch below go to all alike."""
    if shape.ports_per_switch is None:
        return cables
    for count in range(1, cables + 1):
        if cables % count == 0 and ends / count <= shape.ports_per_switch * _SAME:
            return count
    allowed = f"at least {round(ends / cables)}: switches above {below} have no ports for all of them"
    raise BadInputError("fabric.ports_per_switch", shape.ports_per_switch, allowed)


def _tiers(sizes: Sizes, planes: int) -> npt.NDArray[np.int8]:
    counts = [sizes.num_first, sizes.pods * sizes.aggregations, sizes.aggregations * sizes.cores]
    switches = np.tile(np.repeat(np.array([1, 2, 3], dtype=np.int8), counts), planes)
    ports = np.zeros(sizes.num_nodes * sizes.ports_per_node, dtype=np.int8)
    return np.concatenate([ports, switches])


def _add_plane(cables: Cables, sizes: Sizes, shape: FabricShape, nic: Numbers, plane: int) -> None:
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


def _add_uplinks(cables: Cables, sizes: Sizes, first: int) -> None:
    every = np.arange(sizes.num_first * sizes.up)
    leaf, cable = every // sizes.up, every % sizes.up
    pod = leaf // (sizes.sets_per_pod * sizes.rails)
    above = pod * sizes.aggregations + cable // (sizes.up // sizes.aggregations)
    cables.add(first + leaf, first + sizes.num_first + above, sizes.up_bytes_per_second)


def _add_core(cables: Cables, sizes: Sizes, first: int) -> None:
    every = np.arange(sizes.pods * sizes.aggregations * sizes.pod_up)
    aggregation, cable = every // sizes.pod_up, every % sizes.pod_up
    which = aggregation % sizes.aggregations
    core = which * sizes.cores + cable // (sizes.pod_up // sizes.cores)
    start = first + sizes.num_first
    above = start + sizes.pods * sizes.aggregations + core
    cables.add(start + aggregation, above, sizes.up_bytes_per_second)
