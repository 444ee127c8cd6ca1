"""Which ranks are drawn when there are more of them than lines on the screen: of each group the worst."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Lane", "choose_lanes"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Lane:
    """One line of the timeline."""

    rank: int
    worst_of: int
    """Ranks that it stands for, itself included."""

    def as_json(self) -> dict[str, int]:
        """Plain values."""
        return {"rank": self.rank, "worst_of": self.worst_of}


def choose_lanes(ranks: Array, badness: Array, most: int) -> list[Lane]:
    """At most ``most`` lanes for these ranks, in their order. ``badness``: of every rank of the run; where it
    is NaN the rank is taken last."""
    if not len(ranks):
        return []
    size = -(-len(ranks) // max(most, 1))
    groups = -(-len(ranks) // size)
    known = np.full(groups * size, -np.inf)
    known[: len(ranks)] = np.where(np.isnan(badness[ranks]), -np.inf, badness[ranks])
    worst = known.reshape(groups, size).argmax(axis=1) + np.arange(groups) * size
    sizes = np.full(groups, size)
    sizes[-1] = len(ranks) - (groups - 1) * size
    return [Lane(rank, count) for rank, count in zip(ranks[worst].tolist(), sizes.tolist(), strict=True)]
