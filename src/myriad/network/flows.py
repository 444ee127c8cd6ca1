"""What is to be carried, and over which links: the words that routing and all three levels of models share.

Arrays: F flows, N links of all paths together.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from myriad.network.fabric import Numbers, Ordinals

__all__ = ["Flows", "Paths"]


@dataclass(frozen=True, eq=False)
class Flows:
    """Messages between ports."""

    source: Ordinals
    """(F) Port it leaves."""
    target: Ordinals
    """(F) Port it goes to."""
    num_bytes: Numbers
    """(F)"""
    start_seconds: Numbers
    """(F)"""
    entropy: npt.NDArray[np.uint16]
    """(F) UDP source port: of the five numbers that switches hash, the one that tells the queue pairs of two
    ports apart (RoCEv2's destination port and protocol are fixed)."""

    def __len__(self) -> int:
        """How many."""
        return len(self.source)


@dataclass(frozen=True, eq=False)
class Paths:
    """The links of flow f, in the order they are gone through: ``link[first[f] : first[f + 1]]``."""

    first: npt.NDArray[np.int64]
    """(F + 1)"""
    link: Ordinals
    """(N)"""

    def __len__(self) -> int:
        """Flows."""
        return len(self.first) - 1

    def of(self, flow: int) -> Ordinals:
        """The links of one flow."""
        return self.link[self.first[flow] : self.first[flow + 1]]
