"""How far a prediction may be off, nine times of ten, for a system that was never measured.

What is known of the predictions' errors comes from a handful of tables, and rows of one table err alike: they
share a machine, a framework and its authors' care. So a table is one voice (the mean square of its errors),
and how far a row of another table errs is Student's t with a degree of freedom for each table:

    width = t(0.95; tables) x sqrt(mean of the tables' mean squares)         1.9 x for 7 tables, 6.3 x for one

That is the prediction interval of a random-effects meta-analysis (Higgins, Thompson and Spiegelhalter, J. R.
Statist. Soc. A 172, 2009, pages 137 to 159), without its two degrees for a mean: predictions are not shifted.
A quantile of the errors that were seen would leave out that the next system may be none of those. Errors are
logarithms of predicted by true seconds.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from myriad.planner.cluster import Cluster

__all__ = ["INTERVAL_RATIO", "interval_ratio", "promise", "width"]

INTERVAL_RATIO = 0.12
"""Half width of the interval for a system that is in no table: what `myriad validate` prints of all tables
that come with Myriad."""
_COVERAGE = 0.9
_GRID = 100_001


def interval_ratio(cluster: Cluster) -> float | None:
    """Of times predicted from data sheets; ``None``: this cluster is ranks on processors, in no table."""
    return None if cluster.on_cpu else INTERVAL_RATIO


def promise(cluster: Cluster) -> str:
    """The same in a line for people; empty: nothing can be said."""
    ratio = interval_ratio(cluster)
    return "" if ratio is None else f"nine of ten predicted times are within {ratio:.0%} (myriad validate)"


def width(tables: Sequence[npt.NDArray[np.float64]]) -> float:
    """Half width in logarithms, from the errors of some tables."""
    voices = [np.mean(errors**2) for errors in tables]
    return _student(len(voices)) * float(np.mean(voices)) ** 0.5


def _student(degrees: int) -> float:
    """The factor that holds so much of Student's t: where t = sqrt(n) tan(a), the density of a is
    cos(a)^(n-1)."""
    angles = np.linspace(-np.pi / 2, np.pi / 2, _GRID)
    density = np.cos(angles) ** (degrees - 1)
    below = np.cumsum((density[1:] + density[:-1]) / 2)
    angle = np.interp((1 + _COVERAGE) / 2, below / below[-1], angles[1:])
    return float(degrees**0.5 * np.tan(angle))
