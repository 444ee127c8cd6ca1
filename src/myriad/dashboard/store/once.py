"""Each span once, though it may come twice: in a file of the run's folder, and posted by its node.

Of each rank it is known from when to when spans were posted, and from when to when they came in files: what
the other way then brings of that time is there already. Files may come in any order.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from myriad.telemetry.records import Records

__all__ = ["Once"]

_NEVER = np.iinfo(np.int64).max // 2
_ROUNDED_NS = 1_000
"""Files tell times to fewer digits than posts."""


class _Times:
    """Of each rank, ends of spans in ns since the epoch: the first and the last that came one way."""

    def __init__(self, world: int) -> None:
        self._first, self._last = np.full(world, _NEVER), np.full(world, -_NEVER)

    def hold(self, ranks: npt.NDArray[Any], ends: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Which of these lie between: bool."""
        between: npt.NDArray[Any] = ends >= self._first[ranks] - _ROUNDED_NS
        between &= ends <= self._last[ranks] + _ROUNDED_NS
        return between

    def add(self, ranks: npt.NDArray[Any], ends: npt.NDArray[Any]) -> None:
        """These came, too."""
        np.minimum.at(self._first, ranks, ends)
        np.maximum.at(self._last, ranks, ends)


class Once:
    """Of all ranks of a run."""

    def __init__(self, world: int) -> None:
        self._posted, self._filed = _Times(world), _Times(world)

    def new(self, records: Records, *, posted: bool) -> npt.NDArray[Any]:
        """Which of these did not come the other way before: bool."""
        mine, others = (self._posted, self._filed) if posted else (self._filed, self._posted)
        ranks, ends = records["rank"], records["start_ns"] + records["duration_ns"]
        new = ~others.hold(ranks, ends)
        mine.add(ranks[new], ends[new])
        return new
