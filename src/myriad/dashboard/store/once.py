"""Each span once, though it may come twice: in a file of the run's folder, and posted by its node.

Of each rank what ended before the first span that was posted counts as files have it, and from there on as
it was posted. Files may come in any order.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from myriad.telemetry.records import Records

__all__ = ["Once"]

_NEVER = np.iinfo(np.int64).max
_ROUNDED_NS = 1_000
"""Files tell times to fewer digits than posts."""


class Once:
    """Of all ranks of a run; times are ends of spans in ns since the epoch."""

    def __init__(self, world: int) -> None:
        self._posted_from = np.full(world, _NEVER, np.int64)
        self._filed_to = np.full(world, -_NEVER // 2, np.int64)

    def of_files(self, records: Records) -> npt.NDArray[Any]:
        """Which of these were not posted: bool."""
        ranks, ends = records["rank"], records["start_ns"] + records["duration_ns"]
        new: npt.NDArray[Any] = ends < self._posted_from[ranks] - _ROUNDED_NS
        np.maximum.at(self._filed_to, ranks[new], ends[new])
        return new

    def of_posts(self, records: Records) -> npt.NDArray[Any]:
        """Which of these were in no file: bool."""
        ranks, ends = records["rank"], records["start_ns"] + records["duration_ns"]
        new: npt.NDArray[Any] = ends > self._filed_to[ranks] + _ROUNDED_NS
        np.minimum.at(self._posted_from, ranks[new], ends[new])
        return new
