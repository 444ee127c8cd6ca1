"""Seconds of collectives among ranks of the grid, by size, level and algorithm.

A group along an axis has ``size`` ranks, ``stride`` apart in rank number; so ``inside`` of them share a node
and the ring crosses from node to node once for each node. All accelerators of a node that are in other groups
of the same kind talk at the same time, each with its share of the NICs: a group that has several in a node
has several shares.

    ring   (n - 1) steps, each rank sends (n - 1)/n of the bytes      gather, scatter; a sum is both
    tree   2 log2(n) steps, each rank sends all of it twice           small sums
"""

from dataclasses import dataclass, replace

import numpy as np

from myriad.planner.cluster import Cluster
from myriad.planner.operators import Number

__all__ = [
    "Group",
    "begin_seconds",
    "group_along",
    "half_sum_seconds",
    "message_seconds",
    "sum_seconds",
    "tensor_group",
]


@dataclass(frozen=True)
class Group:
    """Ranks that talk, and what each gets of the links between them."""

    size: Number
    bytes_per_second: Number
    """For each rank, reached by large messages."""
    latency_seconds: Number
    launch_seconds: Number
    busy_ratio: Number
    """Of the time of a transfer, what it takes from compute."""
    skew_seconds: Number = 0.0
    """That all wait for the last of them, once for each tensor."""


def group_along(cluster: Cluster, size: Number, stride: Number) -> Group:
    """Ranks ``stride`` apart, of a grid that fills nodes in order."""
    node, network, spine = (cluster.link(level) for level in ("node", "network", "spine"))
    per_node = cluster.accelerators_per_node
    inside = np.clip(np.floor(per_node / np.asarray(stride)), 1, size)
    crosses = np.asarray(size) * stride > per_node
    rate = node.bytes_per_second if cluster.inside is None else _local_rates(cluster, inside, stride)
    within = rate * cluster.ratio("node") * (1 - node.small_group_loss / np.asarray(size))
    across = inside * network.bytes_per_second * cluster.ratio("network")
    if cluster.links.spine is not None and cluster.nodes_per_switch is not None:
        beyond = np.asarray(size) * stride > per_node * cluster.nodes_per_switch
        up = inside * spine.bytes_per_second * cluster.ratio("spine")
        across = np.where(beyond, np.minimum(across, up), across)
    return Group(
        size=size,
        bytes_per_second=np.where(
            crosses & (inside > 1), np.minimum(across, within), np.where(crosses, across, within)
        ),
        latency_seconds=np.where(crosses, network.latency_seconds, node.latency_seconds),
        launch_seconds=np.where(crosses, network.launch_seconds, node.launch_seconds),
        busy_ratio=np.where(crosses, network.busy_ratio, node.busy_ratio),
    )


def _local_rates(cluster: Cluster, inside: Number, stride: Number) -> Number:
    """Return the rates of groups of ``inside`` local ranks, by the paths between accelerators."""
    sizes, strides = np.broadcast_arrays(np.asarray(inside, float), np.asarray(stride, float))
    pairs, places = np.unique(np.stack([sizes.ravel(), strides.ravel()]), axis=1, return_inverse=True)
    rates = [cluster.local_bytes_per_second(max(2, int(a)), max(1, int(b))) for a, b in pairs.T]
    return np.array(rates)[places.reshape(-1)].reshape(sizes.shape)


def tensor_group(cluster: Cluster, size: Number) -> Group:
    """Neighbours that cut matrices among them."""
    group, link = group_along(cluster, size, 1.0), cluster.links.tensor
    if link is None:
        return replace(group, skew_seconds=cluster.links.node.skew_seconds)
    # between nodes the copies come on top of the way
    crosses = np.asarray(size) > cluster.accelerators_per_node
    both = 1 / (1 / np.asarray(group.bytes_per_second) + 1 / link.bytes_per_second)
    return Group(
        size=size,
        bytes_per_second=np.where(crosses, both, link.bytes_per_second),
        latency_seconds=group.latency_seconds,
        launch_seconds=np.maximum(group.launch_seconds, link.launch_seconds),
        busy_ratio=np.where(crosses, group.busy_ratio, link.busy_ratio),
    )


def half_sum_seconds(group: Group, num_bytes: Number) -> Number:
    """Of an all-gather that ends with, or a reduce-scatter that begins with, ``num_bytes`` on each rank."""
    steps = np.asarray(group.size) - 1
    moved = num_bytes * steps / group.size / group.bytes_per_second
    begun = begin_seconds(group) + group.skew_seconds
    return np.where(steps > 0, begun + moved, 0.0)


def begin_seconds(group: Group) -> Number:
    """Of a gather or a reduce-scatter of nothing: what each part of a tensor that is cut takes anew."""
    return group.launch_seconds + (np.asarray(group.size) - 1) * group.latency_seconds


def sum_seconds(group: Group, num_bytes: Number) -> Number:
    """Of an all-reduce: by ring or by tree, whichever is quicker."""
    steps = np.asarray(group.size) - 1
    ring = 2 * steps * (group.latency_seconds + num_bytes / group.size / group.bytes_per_second)
    depth = 2 * np.log2(np.maximum(group.size, 2))
    tree = depth * group.latency_seconds + 2 * num_bytes / group.bytes_per_second
    begun = group.launch_seconds + group.skew_seconds
    return np.where(steps > 0, begun + np.minimum(ring, tree), 0.0)


def message_seconds(group: Group, num_bytes: Number) -> Number:
    """From one rank to the next."""
    return group.latency_seconds + num_bytes / group.bytes_per_second
