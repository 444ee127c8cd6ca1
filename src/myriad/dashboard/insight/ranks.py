"""Which ranks do the same, share a node or wait for each other: arrays over all ranks of a run.

Ranks are those of the grid: ``dp pp cp tp ep``, the last axis fastest. Peers are the ranks of one place of
the pipeline: they compute the same layers, whichever replica they belong to and however they share matrices.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from myriad.comm.layout import AXES, Layout

__all__ = ["Array", "Ranks"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Ranks:
    """Of one attempt."""

    layout: Layout
    node_size: int
    """Ranks of a node."""
    node_order: tuple[int, ...] = ()
    """Which node comes when in the grid; empty: as they are numbered."""

    @property
    def world(self) -> int:
        """Number of ranks."""
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
        """Each rank's node."""
        place = np.arange(self.world) // max(1, self.node_size)
        return np.asarray(self.node_order)[place] if self.node_order else place

    @cached_property
    def first_of_pipeline(self) -> Array:
        """``[replica, pipeline place]``: the first of the ranks that share matrices there."""
        layout = self.layout
        size = layout.cp * layout.tp * layout.ep
        return np.arange(layout.dp * layout.pp).reshape(layout.dp, layout.pp) * size

    @property
    def sharers(self) -> int:
        """Ranks that share one pipeline place of one replica: they are neighbours in number."""
        return self.layout.cp * self.layout.tp * self.layout.ep

    def group(self, rank: int, *axes: str) -> Array:
        """Ranks that differ from one along these axes only, itself included, ascending."""
        same = np.ones(self.world, dtype=bool)
        for axis, place in self._places.items():
            if axis not in axes:
                same &= place == place[rank]
        return np.flatnonzero(same)

    def coordinates(self, rank: int) -> dict[str, int]:
        """On the axes that have more than one rank."""
        return {axis: int(self._places[axis][rank]) for axis in AXES if getattr(self.layout, axis) > 1}

    def ranks_of_node(self, node: int) -> Array:
        """Ascending."""
        return np.flatnonzero(self.node == node)
