"""The rank grid is one array; every process group is a slice of it.

    layout dp=2 pp=2 tp=2          ranks[dp, pp, cp, tp]
    rank 5 = (dp 1, pp 0, tp 1)    peers("tp") = (4, 5)   peers("pp") = (5, 7)   peers("dp") = (1, 5)

Neighbours in rank number are tensor-parallel peers: they communicate most and should share a node.

The axis ``dp`` is cut in two: ``dp_shard`` numbers the replicas of a group that shards the state
(`Layout.num_shards` neighbours), ``dp_replicate`` the groups. ZeRO 0 shards nothing, so each replica is a
group of its own:

    dp=4 zero=3 shard_group=2      rank 1: peers("dp_shard") = (0, 1)    peers("dp_replicate") = (1, 3)

For experts it is cut in two another way: ``ep`` numbers neighbouring replicas that hold different experts,
``expert_dp`` the groups of these, so its peers hold the same experts:

    dp=4 ep=2                      rank 1: peers("ep") = (0, 1)          peers("expert_dp") = (1, 3)
"""

from dataclasses import dataclass

import numpy as np

from myriad.comm.layout import AXES, Layout

__all__ = ["RankGrid"]

_CUTS = (("dp_replicate", "dp_shard"), ("expert_dp", "ep"))
"""The ways to cut the axis ``dp`` in two, the slower part first."""


def _fine(*axes: str) -> tuple[str, ...]:
    """Return the axes of the grid; if one of ``axes`` is a part of ``dp``, that is cut in two."""
    cut = next((cut for cut in _CUTS if {*cut} & {*axes}), AXES[:1])
    return (*cut, *AXES[1:])


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
        parts = {
            "dp_replicate": layout.num_shard_groups,
            "dp_shard": layout.num_shards,
            "expert_dp": layout.num_expert_replicas,
        }
        return parts[axis] if axis in parts else int(getattr(layout, axis))

    def index(self, axis: str) -> int:
        """Return this rank's coordinate along ``axis``."""
        axes = _fine(axis)
        return int(np.unravel_index(self.rank, self._shape(axes))[axes.index(axis)])

    def _shape(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(self.size(axis) for axis in axes)

    def peers(self, *axes: str) -> tuple[int, ...]:
        """Return the ranks that differ from this one along ``axes`` only, itself included, ascending."""
        fine = _fine(*axes)
        where = tuple(slice(None) if axis in axes else self.index(axis) for axis in fine)
        return tuple(int(rank) for rank in self.ranks.reshape(self._shape(fine))[where].ravel())

    def rows(self, axis: str) -> list[list[int]]:
        """Return the peers along ``axis`` of every rank; each rank is in one row."""
        axes = _fine(axis)
        ranks = np.moveaxis(self.ranks.reshape(self._shape(axes)), axes.index(axis), -1)
        rows: list[list[int]] = ranks.reshape(-1, self.size(axis)).tolist()
        return rows
