"""Fits of timings: coefficients that cannot be negative, as seconds cannot."""

from itertools import chain, combinations

import numpy as np
import numpy.typing as npt

__all__ = ["ENDLESS", "Floats", "least_squares", "relative_fit"]

Floats = npt.NDArray[np.float64]
ENDLESS = 1e18
"""Rate of an operation that takes no time: the highest that a cluster file may have."""


def relative_fit(columns: Floats, seconds: Floats) -> Floats:
    """Least squares of relative errors, of coefficients that are not negative."""
    return least_squares(columns / seconds[:, None], np.ones(len(seconds)))


def least_squares(columns: Floats, values: Floats) -> Floats:
    """The best whose coefficients are not negative: one of those that are positive for some columns and 0
    for the others. There are few columns."""
    count = columns.shape[1]
    best, least = np.zeros(count), float((values**2).sum())
    for kept in chain.from_iterable(combinations(range(count), size) for size in range(1, count + 1)):
        found = np.zeros(count)
        found[list(kept)] = np.linalg.lstsq(columns[:, kept], values, rcond=None)[0]
        error = float(((columns @ found - values) ** 2).sum())
        if (found >= 0).all() and error < least:
            best, least = found, error
    return best
