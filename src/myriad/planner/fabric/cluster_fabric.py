"""A cluster's fabric: the values of its file, with defaults from its nodes and links.

[fabric] off      one switch, or with `nodes_per_switch` two tiers, oversubscribed as `links.spine` says
links.network     a NIC port: the share of an accelerator x accelerators / ports
unequal           nodes whose ports have other rates than the rest
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from myriad.errors import BadInputError
from myriad.network.config import FabricShape
from myriad.planner.cluster_config import Cluster

if TYPE_CHECKING:
    from collections.abc import Callable

    from myriad.network.fabric import Fabric

__all__ = ["builder_of", "fabric_of", "shape_of"]


def fabric_of(cluster: Cluster) -> "Fabric":
    """Return the cluster's switches and cables. Raises `BadInputError`."""
    return builder_of(cluster)(shape_of(cluster))


def builder_of(cluster: Cluster) -> "Callable[[FabricShape], Fabric]":
    """Return a function that connects the cluster's nodes by a fabric of any shape. Raises
    `BadInputError`."""
    from myriad.network.fabric_builder import build

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
    """Return the shape in the cluster's file, with missing values derived from the cluster."""
    links = cluster.links
    if cluster.fabric is not None:
        shape = cluster.fabric
        open_ = shape.nodes_per_switch is None and shape.ports_per_switch is None
        return shape.model_copy(update={"nodes_per_switch": cluster.nodes_per_switch}) if open_ else shape
    narrower = 1.0
    if links.spine is not None and links.network is not None:
        narrower = links.network.bytes_per_second / links.spine.bytes_per_second
    return FabricShape(nodes_per_switch=cluster.nodes_per_switch, oversubscription=narrower)
