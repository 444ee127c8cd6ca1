"""How far a rank is from its peers, in spreads of theirs: robust z-scores.

Peers do the same work: ranks of one place of the pipeline. For each of them, over some steps,

    ratio = median over steps of (own seconds / median of the peers' in that step)
    z     = (ratio - 1) / spread
    spread = max(1.4826 x MAD of the peers' ratios, 1.3 x median change from step to step / sqrt(n), 1.5 %)

A median and a MAD (median absolute deviation) are not moved by the ones that are to be found. The floor keeps
a group of perfectly equal ranks from shouting at a microsecond. Of few peers one would move the median
itself: up to 32 each is compared with the others only, and with those on other nodes where there are any, as
a node may be slow as a whole.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from myriad.dashboard.insight.ranks import Array, Ranks

__all__ = ["LEAST_SPREAD", "Scores", "compare", "median_known"]

LEAST_SPREAD = 0.015
"""Of ratios."""
_MAD_TO_DEVIATION = 1.4826
_CHANGE_TO_ERROR = 1.314
"""Of a median of n: a change of level within them, which is to be found, makes it no larger."""
_MANY = 32
_LEAST_SECONDS = 20e-6
"""Of a step, under which a phase is noise."""


@dataclass(frozen=True)
class Scores:
    """Of one phase over some steps, by rank; NaN where nothing is known or nobody is like it."""

    z: Array
    ratio: Array
    seconds: Array
    """Own ones a step, median over steps."""
    peers_seconds: Array
    """The peers' median."""
    step_ratio: Array
    """``[step, rank]``: to the peers, in each step."""


def compare(seconds: Array, ranks: Ranks, work: Array | None = None) -> Scores:
    """``seconds``: ``[step, rank]``, NaN where unknown; ``work``: of each rank, as a multiple of others' (its
    replica's micro-batches), by which seconds are divided first."""
    per_work = seconds if work is None else seconds / work
    step_ratio = np.full(seconds.shape, np.nan)
    z, ratio, usual = (np.full(ranks.world, np.nan) for _ in range(3))
    for members, against in _groups(ranks):
        reference = median_known(per_work[:, against], axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            found = per_work[:, members] / reference[:, None]
        found[reference < _LEAST_SECONDS] = np.nan
        step_ratio[:, members] = found
        usual[members] = median_known(reference)
    ratio = median_known(step_ratio, axis=0)
    changes = median_known(np.abs(np.diff(step_ratio, axis=0)), axis=0) if len(seconds) > 1 else ratio * 0
    unsure = np.nan_to_num(_CHANGE_TO_ERROR * changes / np.sqrt(len(seconds) or 1))
    for members, against in _groups(ranks):
        others = ratio[against]
        centre = median_known(others)
        spread = max(_MAD_TO_DEVIATION * float(median_known(np.abs(others - centre))), LEAST_SPREAD)
        if not np.isfinite(spread):
            spread = LEAST_SPREAD
        z[members] = (ratio[members] - 1) / np.maximum(spread, unsure[members])
    own = median_known(seconds, axis=0)
    return Scores(z, ratio, own, usual if work is None else usual * work, step_ratio)


def _groups(ranks: Ranks) -> Iterator[tuple[Array, Array]]:
    """Ranks, and whom they are compared with."""
    for place in range(ranks.layout.pp):
        members = np.flatnonzero(ranks.pipeline == place)
        if len(members) > _MANY:
            yield members, members
            continue
        for one in members:
            others = members[members != one]
            elsewhere = others[ranks.node[others] != ranks.node[one]]
            if len(others):
                yield np.array([one]), elsewhere if len(elsewhere) else others


def median_known(values: Array, axis: int | None = None) -> Array:
    """Of those that are known; NaN where none is, and no word about it."""
    if values.size and not np.isnan(values).any():
        return np.asarray(np.median(values, axis=axis))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.asarray(np.nanmedian(values, axis=axis))
