"""The rank grid is one array; every process group is a slice of it.

    layout dp=2 pp=2 tp=2          ranks[dp, pp, cp, tp, ep]
    rank 5 = (dp 1, pp 0, tp 1)    peers("tp") = (4, 5)   peers("pp") = (5, 7)   peers("dp") = (1, 5)

Neighbours in rank number are tensor-parallel peers: they communicate most and should share a node.

The axis ``dp`` is cut in two: ``dp_shard`` numbers the replicas of a group that shards the state
(`Layout.num_shards` neighbours), ``dp_replicate`` the groups. ZeRO 0 shards nothing, so each replica is a
group of its own:

    dp=4 zero=3 shard_group=2      rank 1: peers("dp_shard") = (0, 1)    peers("dp_replicate") = (1, 3)
"""

from dataclasses import dataclass

import numpy as np

from myriad.comm.layout import AXES, Layout

__all__ = ["RankGrid"]

_PARTS = ("dp_replicate", "dp_shard")
"""The two parts of the axis ``dp``, the slower one first."""
_FINE = (*_PARTS, *AXES[1:])
"""Axes of the grid with ``dp`` cut in two."""


@dataclass(frozen=True)
class RankGrid:
    """The position of one rank in the grid."""

    layout: Layout
    rank: int

    @property
    def ranks(self) -> np.ndarray:
        """All ranks, one array dimension for each axis of `AXES`."""
        return np.arange(self.layout.world).reshape([self.size(axis) for axis in AXES])

    def size(self, axis: str) -> int:
        """Return the length of ``axis``."""
        layout = self.layout
        if axis in _PARTS:
            return layout.num_shard_groups if axis == "dp_replicate" else layout.num_shards
        return int(getattr(layout, axis))

    def index(self, axis: str) -> int:
        """Return this rank's coordinate along ``axis``."""
        axes = _FINE if axis in _PARTS else AXES
        return int(np.unravel_index(self.rank, self._shape(axes))[axes.index(axis)])

    def _shape(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(self.size(axis) for axis in axes)

    def peers(self, *axes: str) -> tuple[int, ...]:
        """Return the ranks that differ from this one along ``axes`` only, itself included, ascending."""
        wanted = {*axes, *(_PARTS if "dp" in axes else ())}
        where = tuple(slice(None) if axis in wanted else self.index(axis) for axis in _FINE)
        return tuple(int(rank) for rank in self.ranks.reshape(self._shape(_FINE))[where].ravel())

    def rows(self, axis: str) -> list[list[int]]:
        """Return the peers along ``axis`` of every rank; each rank is in one row."""
        axes = _FINE if axis in _PARTS else AXES
        ranks = np.moveaxis(self.ranks.reshape(self._shape(axes)), axes.index(axis), -1)
        rows: list[list[int]] = ranks.reshape(-1, self.size(axis)).tolist()
        return rows
