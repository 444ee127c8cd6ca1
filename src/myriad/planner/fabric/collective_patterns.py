"""Which ranks of a group send to which in a collective, and what share of its bytes.

A ring among n ranks with k of them in each node consists of k rings. Each ring enters and leaves a node at a
different rank, as NCCL builds them (one channel a NIC, each with a k-th of the bytes):

    node 0: 0 1   node 1: 4 5      ring a   0 -> 4 -> 5 .. -> 0     ring b   1 -> 5 -> 4 .. -> 1

So each rank sends and receives (n - 1)/n of the bytes, 1/k of that through its NIC. Hierarchical collectives
(`myriad.comm.hierarchy`) and those of gloo, which sends every slice directly to its owner, are counted slice
by slice as the runtime sends them.

A `CollectivePattern` lists the pairs of a group that communicate and their share of a collective's bytes: by
rings, by levels, or directly to the owner. An all-gather and a reduce-scatter use the same pairs in opposite
directions. A pattern describes either of them; an all-reduce is twice the pattern. In an all-to-all each rank
sends an equal part of its bytes to every rank; it ends with its slowest message, so all have one rate.

Arrays: T transfers of one group, G groups, n ranks of a group.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from myriad.network.rank_transfers import RankTransfers

__all__ = [
    "CollectivePattern",
    "all_to_all_pattern",
    "direct_pattern",
    "group_transfers",
    "level_pattern",
    "ring_pattern",
    "sparse_pattern",
]

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class CollectivePattern:
    """The transfers of a collective in one group, by the ranks' indices in the group."""

    source: _Ints
    """Index of the sender, shape (T)."""
    target: _Ints
    """Index of the receiver, shape (T)."""
    share: npt.NDArray[np.float64]
    """Share of the bytes that every rank has at the end, shape (T)."""
    rate_group: _Ints
    """Rate group of each transfer, shape (T); transfers of one group have one rate."""


def group_transfers(pattern: CollectivePattern, groups: _Ints, num_bytes: float) -> RankTransfers:
    """Return the transfers of all groups ``[G, n]`` at once."""
    num_rate_groups = int(pattern.rate_group.max(initial=-1)) + 1
    first = num_rate_groups * np.arange(len(groups))[:, None]
    return RankTransfers(
        source=groups[:, pattern.source].reshape(-1),
        target=groups[:, pattern.target].reshape(-1),
        num_bytes=np.tile(pattern.share * num_bytes, len(groups)),
        rate_group=(pattern.rate_group + first).reshape(-1),
    )


def ring_pattern(nodes: _Ints) -> CollectivePattern:
    """Return NCCL's pattern: one ring for each rank of a node where all nodes hold as many ranks, else a
    single ring. ``nodes``: the node of each rank of the group, in order."""
    size, num_nodes = len(nodes), len(np.unique(nodes))
    inside = size // num_nodes
    even = size == inside * num_nodes and bool(np.all(nodes[::inside] == nodes.reshape(num_nodes, -1).T))
    if size == 1:
        return _pattern([], [], [], [])
    if num_nodes == 1 or not even or inside == 1:
        place = np.arange(size)
        return _pattern([place], [(place + 1) % size], [np.full(size, 1 - 1 / size)], [np.zeros(size)])
    place = np.arange(size)
    node, rank = np.divmod(place, inside)
    across = (node + 1) % num_nodes * inside + rank
    within = node * inside + (rank + 1) % inside
    each = np.full(size, (1 - 1 / size) / inside)
    return _pattern([place, place], [across, within], [each, each * (inside - 1)], [rank, inside + node])


def direct_pattern(size: int) -> CollectivePattern:
    """Return the pattern in which every rank sends its slice to each other rank directly."""
    return level_pattern((size,), direct=True)


def all_to_all_pattern(size: int) -> CollectivePattern:
    """Return the pattern in which every rank sends a part of its bytes to each other one."""
    source, target = np.nonzero(~np.eye(size, dtype=bool))
    return _pattern([source], [target], [np.full(len(source), 1 / size)], [np.zeros(len(source))])


def sparse_pattern(num_bytes: npt.NDArray[np.float64]) -> CollectivePattern:
    """Return the pattern in which rank i sends ``num_bytes[i, j]`` to rank j. It ends with the slowest
    message."""
    source, target = np.nonzero(num_bytes)
    return _pattern([source], [target], [num_bytes[source, target]], [np.zeros(len(source))])


def level_pattern(radices: Sequence[int], *, direct: bool) -> CollectivePattern:
    """Return the pattern of `myriad.comm.hierarchy.make_levels` for all ranks at once. ``radices``: outermost
    first. ``direct``: within a level each rank sends to each other one directly; off: by a ring."""
    size, stride, paces = int(np.prod(radices)), 1, 0
    place = np.arange(size)
    sources, targets, numbers = list[_Ints](), list[_Ints](), list[_Ints]()
    shares = list[npt.NDArray[np.float64]]()
    for radix in reversed(radices):
        own, share = place // stride % radix, 1 / (stride * radix)
        for step in range(1, radix) if direct else [1][: radix - 1]:
            target = place + ((own + step) % radix - own) * stride
            rate_group = place if direct else place - own * stride
            carried = share if direct else share * (radix - 1)
            sources.append(place)
            targets.append(target)
            shares.append(np.full(size, carried))
            numbers.append(paces + rate_group)
            paces += size
        stride *= radix
    return _pattern(sources, targets, shares, numbers)


def _pattern(
    source: Sequence[_Ints],
    target: Sequence[_Ints],
    share: Sequence[npt.NDArray[np.float64]],
    rate_group: Sequence[npt.NDArray[np.float64] | _Ints],
) -> CollectivePattern:
    none = np.empty(0, dtype=np.int64)
    _, numbers = np.unique(np.concatenate([none, *rate_group]).astype(np.int64), return_inverse=True)
    return CollectivePattern(
        source=np.concatenate([none, *source]).astype(np.int64),
        target=np.concatenate([none, *target]).astype(np.int64),
        share=np.concatenate([np.empty(0), *share]),
        rate_group=np.asarray(numbers, dtype=np.int64).reshape(-1),
    )
