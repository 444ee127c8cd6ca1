"""A cluster's fabric: what its file says of it, and what is off from its nodes and links.

[fabric] off      one switch, or with `nodes_per_switch` two tiers, as narrow above it as `links.spine`
links.network     a NIC port: the share of an accelerator x accelerators / ports
unequal           nodes whose ports carry more or less than the others'
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from myriad.errors import BadInputError
from myriad.network.shape import FabricShape
from myriad.planner.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Callable

    from myriad.network.fabric import Fabric

__all__ = ["builder_of", "fabric_of", "shape_of"]


def fabric_of(cluster: Cluster) -> "Fabric":
    """Switches and cables. Raises `BadInputError`."""
    return builder_of(cluster)(shape_of(cluster))


def builder_of(cluster: Cluster) -> "Callable[[FabricShape], Fabric]":
    """Gives the cluster's nodes a fabric of any shape. Raises `BadInputError`."""
    from myriad.network.shapes import build

    if cluster.nodes == 1 or cluster.links.network is None:
        allowed = "more than one node, and links.network: inside a node there is no fabric"
        raise BadInputError(f"{cluster.name}: nodes", cluster.nodes, allowed)
    ports = cluster.ports_per_node
    share = cluster.accelerators_per_node / ports
    rates = np.full(cluster.nodes, cluster.links.network.bytes_per_second * share)
    for group in cluster.unequal:
        rates[list(group.nodes)] = group.bytes_per_second * share
    known: dict[str, Any] = {"name": cluster.name, "num_nodes": cluster.nodes, "ports_per_node": ports}
    return partial(build, **known, nic_bytes_per_second=rates)


def shape_of(cluster: Cluster) -> FabricShape:
    """What the file says, with what it leaves open filled in where the cluster knows."""
    links = cluster.links
    if cluster.fabric is not None:
        shape = cluster.fabric
        open_ = shape.nodes_per_switch is None and shape.ports_per_switch is None
        return shape.model_copy(update={"nodes_per_switch": cluster.nodes_per_switch}) if open_ else shape
    narrower = 1.0
    if links.spine is not None and links.network is not None:
        narrower = links.network.bytes_per_second / links.spine.bytes_per_second
    return FabricShape(nodes_per_switch=cluster.nodes_per_switch, oversubscription=narrower)
