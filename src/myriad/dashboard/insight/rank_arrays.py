"""The ranks of a run in the grid, as arrays: which do the same work, share a node or communicate.

The axes of the grid are ``dp pp cp tp ep``, the last one fastest. Peers are the ranks of one place of the
pipeline: they compute the same layers, whichever replica and tensor-parallel index they have.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from myriad.comm.layout import AXES, Layout
from myriad.telemetry.stragglers import PeerGroups

__all__ = ["Array", "Ranks"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Ranks:
    """The ranks of one attempt in the grid."""

    layout: Layout
    node_size: int
    """Number of ranks per node."""
    node_order: tuple[int, ...] = ()
    """Order of the nodes in the grid; empty means ascending."""

    @property
    def world(self) -> int:
        """Number of ranks in the layout."""
        return self.layout.world

    @cached_property
    def _places(self) -> Mapping[str, Array]:
        shape = tuple(int(getattr(self.layout, axis)) for axis in AXES)
        return dict(zip(AXES, np.unravel_index(np.arange(self.world), shape), strict=True))

    def along(self, axis: str) -> Array:
        """Each rank's coordinate on one axis of the grid."""
        return self._places[axis]

    @property
    def pipeline(self) -> Array:
        """Each rank's place in the pipeline."""
        return self._places["pp"]

    @property
    def replica(self) -> Array:
        """Each rank's data-parallel replica."""
        return self._places["dp"]

    @cached_property
    def node(self) -> Array:
        """(ranks) Number of the node on which each rank runs."""
        place = np.arange(self.world) // max(1, self.node_size)
        return np.asarray(self.node_order)[place] if self.node_order else place

    @cached_property
    def peers(self) -> PeerGroups:
        """Groups of ranks that do the same work."""
        return PeerGroups(self.pipeline, self.node)

    @cached_property
    def first_of_pipeline(self) -> Array:
        """First rank of each replica and pipeline place, ``[replica, place]``."""
        layout = self.layout
        size = layout.cp * layout.tp
        return np.arange(layout.dp * layout.pp).reshape(layout.dp, layout.pp) * size

    @property
    def sharers(self) -> int:
        """Number of ranks that share a pipeline place of a replica; their numbers are consecutive."""
        return self.layout.cp * self.layout.tp

    def group(self, rank: int, *axes: str) -> Array:
        """Return the ranks that differ from ``rank`` only along ``axes``, including it, ascending."""
        same = np.ones(self.world, dtype=bool)
        for axis, place in self._places.items():
            if axis not in axes:
                same &= place == place[rank]
        return np.flatnonzero(same)

    def replicas_of(self, replica: int, axis: str) -> Array:
        """Return the replicas that meet a replica along an axis: ``dp``, or a part of it
        (`myriad.comm.grid`)."""
        # ranks that share sequences are neighbours in a group that shards the state
        size, dp = max(1, self.layout.num_shards // self.layout.cp), self.layout.dp
        if axis == "dp":
            return np.arange(dp)
        if axis == "dp_shard":
            return replica // size * size + np.arange(size)
        return np.arange(replica % size, dp, size)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank on the axes with more than one rank."""
        return {axis: int(self._places[axis][rank]) for axis in AXES if getattr(self.layout, axis) > 1}

    def ranks_of_node(self, node: int) -> Array:
        """Return the ranks of a node, ascending."""
        return np.flatnonzero(self.node == node)
