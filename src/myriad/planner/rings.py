"""Who of a group sends whom which share of a collective's bytes: rings, levels, straight to the owner.

A gather and a reduce-scatter go over the same pairs, each the other way about; what is said here is of
either, and of a sum for everybody twice.

Arrays: T transfers of one group, G groups, n ranks of a group.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from myriad.network.exchange import Exchange

__all__ = ["Pattern", "direct_pattern", "level_pattern", "ring_pattern", "transfers"]

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Pattern:
    """Among the ranks of one group, by their places in it."""

    source: _Ints
    """(T)"""
    target: _Ints
    """(T)"""
    share: npt.NDArray[np.float64]
    """(T) Of the bytes that every rank has in the end."""
    pace: _Ints
    """(T) Transfers with one number go at one pace."""


def transfers(pattern: Pattern, groups: _Ints, num_bytes: float) -> Exchange:
    """Of all groups ``[G, n]`` at once."""
    num_paces = int(pattern.pace.max(initial=-1)) + 1
    first = num_paces * np.arange(len(groups))[:, None]
    return Exchange(
        source=groups[:, pattern.source].reshape(-1),
        target=groups[:, pattern.target].reshape(-1),
        num_bytes=np.tile(pattern.share * num_bytes, len(groups)),
        pace=(pattern.pace + first).reshape(-1),
    )


def ring_pattern(nodes: _Ints) -> Pattern:
    """NCCL's: as many rings as ranks stand in each node, where all nodes hold as many; else one. ``nodes``:
    of each rank of the group, in order."""
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


def direct_pattern(size: int) -> Pattern:
    """Every rank sends each other one its slice."""
    return level_pattern((size,), direct=True)


def level_pattern(radices: Sequence[int], *, direct: bool) -> Pattern:
    """`myriad.comm.hierarchy.make_levels` for all ranks at once, ``radices`` outermost first; ``direct``: at
    a level each sends straight to each other, else round a ring."""
    size, stride, paces = int(np.prod(radices)), 1, 0
    place = np.arange(size)
    sources, targets, numbers = list[_Ints](), list[_Ints](), list[_Ints]()
    shares = list[npt.NDArray[np.float64]]()
    for radix in reversed(radices):
        own, share = place // stride % radix, 1 / (stride * radix)
        for step in range(1, radix) if direct else [1][: radix - 1]:
            target = place + ((own + step) % radix - own) * stride
            pace = place if direct else place - own * stride
            carried = share if direct else share * (radix - 1)
            sources.append(place)
            targets.append(target)
            shares.append(np.full(size, carried))
            numbers.append(paces + pace)
            paces += size
        stride *= radix
    return _pattern(sources, targets, shares, numbers)


def _pattern(
    source: Sequence[_Ints],
    target: Sequence[_Ints],
    share: Sequence[npt.NDArray[np.float64]],
    pace: Sequence[npt.NDArray[np.float64] | _Ints],
) -> Pattern:
    none = np.empty(0, dtype=np.int64)
    _, numbers = np.unique(np.concatenate([none, *pace]).astype(np.int64), return_inverse=True)
    return Pattern(
        source=np.concatenate([none, *source]).astype(np.int64),
        target=np.concatenate([none, *target]).astype(np.int64),
        share=np.concatenate([np.empty(0), *share]),
        pace=np.asarray(numbers, dtype=np.int64).reshape(-1),
    )
