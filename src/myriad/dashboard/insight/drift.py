"""Detect drift: ranks that reach a step's first collective a little later with each step.

    lag[step, rank]    start of the rank's first gradient reduction less the median of its peers'
    slope              median of the slopes between step i and step i + n / 2 (a robust line, after Theil and
                       Sen): one pause, however long, does not move it. Of each half of the steps; the
                       smaller one counts, and none where they differ in sign: a rank that became slow once
                       does not drift

MegaScale (section 6.3) lost MFU slowly over weeks this way: pauses at different moments on different ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from myriad.dashboard.insight.nesting import Nested
from myriad.dashboard.insight.rank_arrays import Array, Ranks
from myriad.telemetry.stragglers import median_known
from myriad.units import format_number

__all__ = ["Drift", "drift", "launches"]

_LAUNCHES = ("reduce", "start_reduce", "clip", "step")
_FEWEST_STEPS = 8
_MOST_WORST = 50


@dataclass(frozen=True)
class Drift:
    """Drift of launch times over some steps."""

    slope: Array
    """Seconds per step, by rank; NaN if unknown."""
    lag: Array
    """Seconds behind the median of its peers, median of steps."""

    def worst(self, least: float = 1e-6) -> list[int]:
        """Ranks that come later by at least ``least`` seconds a step and by four spreads more than others,
        the worst first."""
        known = np.flatnonzero(~np.isnan(self.slope))
        if len(known) == 0:
            return []
        spread = 1.4826 * float(np.median(np.abs(self.slope[known] - np.median(self.slope[known]))))
        late = known[self.slope[known] > max(least, 4 * spread)]
        return [int(rank) for rank in late[np.argsort(-self.slope[late])][:_MOST_WORST]]

    def sentence(self, rank: int) -> str:
        """Describe the drift of a rank."""
        each = self.slope[rank] * 1e3
        return f"rank {rank} comes {format_number(each)} ms later to its first reduction with each step"


def launches(spans: Nested, names: Sequence[str], world: int) -> tuple[Array, Array]:
    """Return the steps, and the seconds at which each rank began its first reduction, ``[step, rank]``; NaN
    if it has none."""
    for wanted in (_LAUNCHES[:2], _LAUNCHES[2:]):
        codes = [code for code, name in enumerate(names) if name in wanted]
        found = np.flatnonzero(np.isin(spans.records["name"], codes))
        if len(found):
            break
    steps = np.unique(spans.records["step"][found])
    first = np.full((len(steps), world), np.nan)
    if len(found):
        row = np.searchsorted(steps, spans.records["step"][found])
        at = row * world + spans.records["rank"][found]
        # In order of time: written backwards, the first of each step stays.
        origin = int(spans.start[found].min())
        first.ravel()[at[::-1]] = (spans.start[found[::-1]] - origin) * 1e-9
    return steps, first


def drift(steps: Array, first: Array, ranks: Ranks) -> Drift:
    """Return the drift of launch times from `launches`."""
    lag = first.copy()
    for place in range(ranks.layout.pp):
        members = np.flatnonzero(ranks.pipeline == place)
        own = lag[:, members]
        own -= median_known(own, axis=1)[:, None] if own.size else 0.0
        lag[:, members] = own
    slope = np.full(ranks.world, np.nan)
    if len(steps) >= _FEWEST_STEPS:
        half = len(steps) // 2
        early, late = _slope(steps[:half], lag[:half]), _slope(steps[half:], lag[half:])
        smaller = np.where(np.abs(early) < np.abs(late), early, late)
        slope = np.where(early * late > 0, smaller, 0.0 * smaller)
    usual = median_known(lag, axis=0) if len(steps) else np.full(ranks.world, np.nan)
    return Drift(slope, usual)


def _slope(steps: Array, lag: Array) -> Array:
    half = len(steps) // 2
    between = (steps[half:] - steps[: len(steps) - half])[:, None]
    return median_known((lag[half:] - lag[: len(steps) - half]) / between, axis=0)
