"""Since when: the step at which a series of ratios changed its level.

Of all cuts of the series the one with the largest difference of means, weighed as a t-test does:

    |mean after - mean before| x sqrt(n before x n after / n)

It is a change where the levels differ by more than the noise around them lets one cut of many differ.
"""

import numpy as np

from myriad.dashboard.insight.ranks import Array

__all__ = ["changed_at"]

_NOISE = 4.0
"""Standard errors."""
_FEWEST = 2
"""Values on either side."""


def changed_at(values: Array, least: float) -> int | None:
    """Index of the first value on the higher level that the series ends on; ``None``: it was there all along.
    ``least``: by how much the levels must differ."""
    known = np.flatnonzero(~np.isnan(values))
    series = values[known]
    count = len(series)
    if count < 2 * _FEWEST:
        return None
    cuts = np.arange(_FEWEST, count - _FEWEST + 1)
    sums = np.cumsum(series)
    before = sums[cuts - 1] / cuts
    after = (sums[-1] - sums[cuts - 1]) / (count - cuts)
    weight = np.sqrt(cuts * (count - cuts) / count)
    best = int(np.argmax((after - before) * weight))
    cut, rise = int(cuts[best]), float(after[best] - before[best])
    noise = float(np.median(np.abs(np.diff(series)))) / 0.954
    if rise < least or rise * weight[best] < _NOISE * noise:
        return None
    return int(known[cut])
