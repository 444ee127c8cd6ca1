"""The rank grid is one array; every process group is a slice of it.

    layout dp=2 pp=2 tp=2          ranks[dp, pp, cp, tp]
    rank 5 = (dp 1, pp 0, tp 1)    peers("tp") = (4, 5)   peers("pp") = (5, 7)   peers("dp") = (1, 5)

Neighbours in rank number are tensor-parallel peers: they communicate most and should share a node.

Ranks of ``dp`` and ``cp`` hold the same parameters. The axis ``dp_cp`` numbers all of them, with ``cp`` the
faster one, and is cut in two: ``dp_shard`` numbers the ranks of a group that shards the state
(`Layout.num_shards` neighbours), ``dp_replicate`` the groups. ZeRO 0 shards nothing, so each rank is a group
of its own:

    dp=4 zero=3 shard_group=2      rank 1: peers("dp_shard") = (0, 1)    peers("dp_replicate") = (1, 3)

The axis ``cp`` is cut in two as well: ``ulysses`` numbers neighbours that exchange positions for heads,
``ring`` the others (`myriad.model.context_share`).

Experts see the ranks of a stage, in their order, as a second grid (parallel folding, arXiv 2504.14960):
``etp`` numbers neighbours that share the width of each expert, ``ep`` those that hold different experts, and
``expert_dp`` those that hold the same slices of the same ones. The axis ``tp`` is thereby cut in two:
``etp_group`` numbers the groups of ``etp`` ranks, each of which has a part of a sequence:

    dp=4 ep=2                      rank 1: peers("ep") = (0, 1)          peers("expert_dp") = (1, 3)
    dp=2 tp=2 ep=2 etp=1           rank 1: peers("ep") = (0, 1)          peers("expert_dp") = (1, 3)
    dp=2 tp=4 ep=2 etp=2           rank 1: peers("ep") = (1, 3)          peers("expert_dp") = (1, 5)
                                           peers("etp") = (0, 1)         peers("etp_group") = (1, 3)

With ``shard_group`` the axis ``expert_shard`` numbers the ranks of ``expert_dp`` in one group. Those that
hold the same slice of experts are the ranks of ``dp_replicate``, as for other parameters:

    dp=8 zero=3 shard_group=4 ep=2     rank 1: peers("expert_shard") = (1, 3)   peers("dp_replicate") = (1, 5)
"""

from dataclasses import dataclass

import numpy as np

from myriad.comm.layout import AXES, Layout

__all__ = ["RankGrid"]

_VIEWS = (
    AXES,
    ("dp", "pp", "ring", "ulysses", "tp"),
    ("pp", "dp_cp", "tp"),
    ("pp", "dp_replicate", "dp_shard", "tp"),
    ("pp", "dp_cp", "etp_group", "etp"),
    ("pp", "expert_dp", "ep", "etp"),
    ("pp", "dp_replicate", "expert_shard", "ep", "etp"),
)
"""The ways to see all ranks, each with its slowest axis first."""


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
            "expert_shard": layout.num_expert_shards,
            "dp_cp": layout.num_holders,
            "etp": layout.expert_tp,
            "etp_group": layout.num_etp_groups,
        }
        return parts[axis] if axis in parts else int(getattr(layout, axis))

    def index(self, axis: str) -> int:
        """Return this rank's coordinate along ``axis``."""
        names = self._names(axis)
        return self._place(names)[names.index(axis)]

    def peers(self, *axes: str) -> tuple[int, ...]:
        """Return the ranks that differ from this one along ``axes`` only, itself included, ascending."""
        names = self._names(*axes)
        own = zip(names, self._place(names), strict=True)
        where = tuple(slice(None) if axis in axes else index for axis, index in own)
        return tuple(int(rank) for rank in self._ranks_along(names)[where].ravel())

    def rows(self, axis: str) -> list[list[int]]:
        """Return the peers along ``axis`` of every rank; each rank is in one row."""
        names = self._names(axis)
        ranks = np.moveaxis(self._ranks_along(names), names.index(axis), -1)
        rows: list[list[int]] = ranks.reshape(-1, self.size(axis)).tolist()
        return rows

    def _names(self, *axes: str) -> tuple[str, ...]:
        """Return the axes of the first view that has all of ``axes``, slowest first."""
        return next(view for view in _VIEWS if {*axes} <= {*view})

    def _ranks_along(self, names: tuple[str, ...]) -> np.ndarray:
        """Return all ranks, one array dimension for each of ``names``."""
        ranks = np.moveaxis(self.ranks, AXES.index("pp"), 0) if names[0] == "pp" else self.ranks
        return ranks.reshape([self.size(axis) for axis in names])

    def _place(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """Return this rank's coordinates along ``names``."""
        sizes, number = [self.size(axis) for axis in names], self.rank
        if names[0] == "pp":
            layout = self.layout
            dp, pp, cp, tp = self._place(AXES)
            number = ((pp * layout.dp + dp) * layout.cp + cp) * layout.tp + tp
        return tuple(int(one) for one in np.unravel_index(number, sizes))
