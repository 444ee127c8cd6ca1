"""The 90 % prediction interval for a system that was never measured.

The known errors of predictions come from a handful of tables, and rows of one table have similar errors: they
share a machine, a framework and its authors' care. So each table counts once, by the mean square of its
errors. The error of a row of another table follows Student's t with one degree of freedom for each table:

    width = t(0.95; tables) x sqrt(mean of the tables' mean squares)         1.9 x for 7 tables, 6.3 x for one

That is the prediction interval of a random-effects meta-analysis (Higgins, Thompson and Spiegelhalter, J. R.
Statist. Soc. A 172, 2009, pages 137 to 159), without its two degrees for a mean: predictions are not shifted.
A quantile of the observed errors would ignore that the next system may differ from all of them. Errors are
logarithms of predicted by true seconds.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from myriad.planner.cluster_config import Cluster

__all__ = ["INTERVAL_RATIO", "describe_interval", "interval_ratio", "interval_width"]

INTERVAL_RATIO = 0.12
"""Relative half width of the interval for a system that is in no table: the result of `myriad validate` for
all tables that come with Myriad."""
_COVERAGE = 0.9
_GRID = 100_001


def interval_ratio(cluster: Cluster) -> float | None:
    """Return the half width for times predicted from data sheets; ``None``: the cluster's ranks are CPU
    cores, which no table contains."""
    return None if cluster.on_cpu else INTERVAL_RATIO


def describe_interval(cluster: Cluster, *, has_experts: bool) -> str:
    """Return a line that describes the interval, or an empty string where none is known."""
    ratio = interval_ratio(cluster)
    if has_experts and ratio is not None:
        return "with experts, published times are farther from the predicted ones than without"
    return "" if ratio is None else f"nine of ten predicted times are within {ratio:.0%} (myriad validate)"


def interval_width(tables: Sequence[npt.NDArray[np.float64]]) -> float:
    """Return the half width in logarithms, from the errors of some tables."""
    voices = [np.mean(errors**2) for errors in tables]
    return _student(len(voices)) * float(np.mean(voices)) ** 0.5


def _student(degrees: int) -> float:
    """Return the factor of Student's t for the interval's probability: with t = sqrt(n) tan(a), the density
    of a is cos(a)^(n-1)."""
    angles = np.linspace(-np.pi / 2, np.pi / 2, _GRID)
    density = np.cos(angles) ** (degrees - 1)
    below = np.cumsum((density[1:] + density[:-1]) / 2)
    angle = np.interp((1 + _COVERAGE) / 2, below / below[-1], angles[1:])
    return float(degrees**0.5 * np.tan(angle))
