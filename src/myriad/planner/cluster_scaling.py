"""The usual server of an accelerator, and as many nodes of a cluster as a number of accelerators needs."""

from myriad.comm.layout import MOST_RANKS
from myriad.errors import BadInputError
from myriad.planner.cluster_config import Accelerator, Cluster, Link, Links, SlowNodes

__all__ = ["scale_cluster", "usual_server"]

_SLOW = SlowNodes(ratio=0.005, slower_ratio=0.10)
"""As in the recipes of large clusters (arXiv 2402.15627, sections 5.1 and 6.3)."""
_NODE_LATENCY, _NETWORK_LATENCY = 2.8e-6, 10e-6


def usual_server(name: str, accelerator: Accelerator, size: int | None = None) -> Cluster:
    """Return the usual server of an accelerator, or one with ``size`` of them, with its links to others."""
    server = accelerator.server
    node, network = server.node_bytes_per_second, server.network_bytes_per_second
    return Cluster(
        name=name,
        nodes=1,
        accelerators_per_node=size or server.accelerators,
        accelerator=accelerator,
        links=Links(
            node=Link(bytes_per_second=node, latency_seconds=_NODE_LATENCY),
            network=Link(bytes_per_second=network, latency_seconds=_NETWORK_LATENCY),
        ),
        slow_nodes=_SLOW,
    )


def scale_cluster(cluster: Cluster, accelerators: int, key: str = "--gpus") -> Cluster:
    """Return as many nodes of the same kind as make ``accelerators``, or a part of one node. ``key``: what
    errors call the number. Raises `BadInputError`."""
    per_node = cluster.accelerators_per_node
    if accelerators < 1:
        raise BadInputError(key, accelerators, "at least 1")
    if accelerators > MOST_RANKS:
        raise BadInputError(key, accelerators, f"at most {MOST_RANKS:,}")
    if accelerators <= per_node:
        whole = accelerators == per_node
        update = {"nodes": 1, "accelerators_per_node": accelerators, "unequal": ()}
        return cluster.model_copy(update=update if whole else update | {"inside": None})
    nodes, rest = divmod(accelerators, per_node)
    if rest:
        raise BadInputError(key, accelerators, f"a multiple of the {per_node} of a node, or fewer")
    if cluster.links.network is None:
        allowed = f"at most {per_node}: {cluster.name} is one node and has no links.network"
        raise BadInputError(key, accelerators, allowed)
    unequal = tuple(
        group.model_copy(update={"nodes": kept})
        for group in cluster.unequal
        if (kept := tuple(node for node in group.nodes if node < nodes))
    )
    return cluster.model_copy(update={"nodes": nodes, "unequal": unequal})
