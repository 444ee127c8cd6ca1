"""The rank grid is one array; every process group is a slice of it.

    layout dp=2 pp=2 tp=2          ranks[dp, pp, cp, tp, ep]
    rank 5 = (dp 1, pp 0, tp 1)    peers("tp") = (4, 5)   peers("pp") = (5, 7)   peers("dp") = (1, 5)

Neighbours in rank number are tensor-parallel peers: they communicate most and should share a node.
"""

from dataclasses import dataclass

import numpy as np

from myriad.comm.layout import AXES, Layout

__all__ = ["RankGrid"]


@dataclass(frozen=True)
class RankGrid:
    """The position of one rank in the grid."""

    layout: Layout
    rank: int

    @property
    def ranks(self) -> np.ndarray:
        """All ranks, one array dimension for each axis of `AXES`."""
        shape = [getattr(self.layout, axis) for axis in AXES]
        return np.arange(self.layout.world).reshape(shape)

    def index(self, axis: str) -> int:
        """Return this rank's coordinate along ``axis``."""
        shape = tuple(getattr(self.layout, name) for name in AXES)
        return int(np.unravel_index(self.rank, shape)[AXES.index(axis)])

    def peers(self, *axes: str) -> tuple[int, ...]:
        """Return the ranks that differ from this one along ``axes`` only, itself included, ascending."""
        where = tuple(slice(None) if axis in axes else self.index(axis) for axis in AXES)
        return tuple(int(rank) for rank in self.ranks[where].ravel())

    def rows(self, axis: str) -> list[list[int]]:
        """Return the peers along ``axis`` of every rank; each rank is in one row."""
        size = getattr(self.layout, axis)
        return np.moveaxis(self.ranks, AXES.index(axis), -1).reshape(-1, size).tolist()
