"""Values of `myriad.log` from all ranks, as means that every rank has after a step.

    message of CLIP    norms, losses, ... | new names | sum, count | sum, count | ...   64 pairs
                                                        name 0       name 1

A name has the same pair on all ranks from the step on in which a rank logs it first. In that step ranks
gather the new names with their values; in all other steps they exchange nothing beside the message of CLIP.
The message is as long without values, so that logging changes no bit of the sums beside it.
"""

import logging
import math
from collections.abc import Sequence

import torch

from myriad.comm.groups import Groups
from myriad.comm.typed_collectives import gather_values
from myriad.system.user_metrics import MOST_NAMES, take_logged

__all__ = ["UserMeans"]

_LOG = logging.getLogger(__name__)
_Sums = dict[str, tuple[float, int]]


class UserMeans:
    """The means of the values that this and other ranks log in each step."""

    num_sums = 1 + 2 * MOST_NAMES
    """Number of values that a rank adds to the message of CLIP."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._places: dict[str, int] = {}
        self._new: _Sums = {}
        self._has_warned = False

    def write_sums(self, into: torch.Tensor) -> None:
        """Write what this rank has logged since the last call into its part of the message, which is 0."""
        self._new = {}
        for name, (total, count) in take_logged().items():
            if (place := self._places.get(name)) is not None:
                into[place].fill_(total)
                into[place + 1].fill_(count)
            elif len(self._places) < MOST_NAMES:
                self._new[name] = total, count
            else:
                self._report_dropped(name)
        if self._new:
            into[0].fill_(len(self._new))

    def means(self, sums: Sequence[float]) -> dict[str, float | None]:
        """Return the mean of each name that any rank has logged, from the message's sums; ``None`` for a mean
        that is not finite. All ranks call it."""
        found = {name: (sums[at], sums[at + 1]) for name, at in self._places.items() if sums[at + 1]}
        if sums[0]:
            found |= self._gather_new()
        means = {name: total / count for name, (total, count) in found.items()}
        return {name: mean if math.isfinite(mean) else None for name, mean in means.items()}

    def _gather_new(self) -> _Sums:
        """Give each new name of any rank a place, and return its sums over all ranks."""
        found: _Sums = {}
        for own in gather_values(self._new, _Sums, self._groups.world):
            for name, (total, count) in own.items():
                before = found.get(name, (0.0, 0))
                found[name] = before[0] + total, before[1] + count
        kept = list(found)[: MOST_NAMES - len(self._places)]
        for name in kept:
            self._places[name] = 1 + 2 * len(self._places)
        for name in self._new:
            if name not in self._places:
                self._report_dropped(name)
        return {name: found[name] for name in kept}

    def _report_dropped(self, name: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _LOG.warning("myriad.log: %r and other names after the first %d are dropped", name, MOST_NAMES)
