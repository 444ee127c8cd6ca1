"""The 90 % prediction interval, by what is known of the framework.

    a framework with published times      nine of ten of its own times, and at least `LEAST_RATIO`: its
                                          profile was made with them at hand, and other runs differ
    one with a profile and too few times  rows of tables that no profile was made with, which do not come with
                                          Myriad: each framework has equal weight
    one without a profile                 the same rows, all predicted as `unknown`
    a model with experts                  rows of models with experts
    a cluster that --calibrate wrote      the user's own rows, each predicted without itself: `interval_width`
                                          with each row as a table

Numbers are results of `myriad validate` for all tables that come with Myriad; a test predicts some again.

`interval_width` is the interval for a table that was left out, among the few that describe Megatron-LM and
its relatives. Rows of one table have similar errors: they share a machine, a framework and its authors' care.
So each table counts once, by the mean square of its errors. The error of a row of another table follows
Student's t with one degree of freedom for each table:

    width = t(0.95; tables) x sqrt(mean of the tables' mean squares)         1.9 x for 7 tables, 6.3 x for one

That is the prediction interval of a random-effects meta-analysis (Higgins, Thompson and Spiegelhalter, J. R.
Statist. Soc. A 172, 2009, pages 137 to 159), without its two degrees for a mean: predictions are not shifted.
Errors are logarithms of predicted by true seconds.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from myriad.planner.cluster_config import Calibration, Cluster

__all__ = [
    "EXPERTS_RATIO",
    "FRAMEWORKS",
    "LEAST_RATIO",
    "PROFILE_RATIO",
    "UNKNOWN_RATIO",
    "describe_interval",
    "framework_interval",
    "interval_ratio",
    "interval_width",
]

PROFILE_RATIO = 0.26
"""Relative half width for a framework with a profile whose times are in no table: what nine of ten rows of
eight such frameworks need in rows that were collected later (benchmarks/planner/later_rows.py)."""
LEAST_RATIO = 0.10
"""Least relative half width for a framework with published times: that of a framework that was left out, by
the rows of those with ten or more."""
UNKNOWN_RATIO = 0.52
"""Relative half width for a framework without a profile: 0.31 by the rule above. That is for rows of systems
that have a profile, on the usual clusters; others differ more. Of 33 rows of systems that had no profile, it
held 31."""
EXPERTS_RATIO = 0.46
"""Relative half width for models with experts, of any framework: 0.31 by the rule above, and wider for the
same reason."""


class OwnTimes(NamedTuple):
    """What is known of a framework from its own published times of dense models."""

    rows: int
    ratio: float
    """Relative error that nine of ten rows do not exceed."""
    accelerators: str


FRAMEWORKS = {
    "internevo": OwnTimes(19, 0.06, "A100"),
    "maxtext": OwnTimes(12, 0.07, "H100"),
    "megascale": OwnTimes(20, 0.06, "A100"),
    "megatron-bridge": OwnTimes(45, 0.08, "H100, GB200 and GB300"),
    "megatron-bridge-nvfp4": OwnTimes(18, 0.14, "GB200 and GB300"),
    "megatron-core": OwnTimes(40, 0.05, "H100 and GB200"),
    "megatron-core-sync": OwnTimes(16, 0.15, "B200"),
    "megatron-deepspeed": OwnTimes(37, 0.11, "A100"),
    "megatron-lm-2023": OwnTimes(11, 0.04, "A100"),
    "mosaicml-fsdp": OwnTimes(63, 0.11, "A100"),
    "nanotron": OwnTimes(74, 0.16, "H100"),
    "nemo-2024": OwnTimes(13, 0.06, "H100"),
    "zero-bubble": OwnTimes(24, 0.07, "A100"),
}
"""Frameworks with ten or more rows."""
_COVERAGE = 0.9
_GRID = 100_001


def interval_ratio(cluster: Cluster, framework: str = "myriad", *, has_experts: bool = False) -> float | None:
    """Return the half width for predicted times; ``None``: the cluster's ranks are CPU cores, which no table
    contains, and it was not calibrated."""
    if own := _calibration(cluster, framework, has_experts=has_experts):
        return own.interval_ratio
    return None if cluster.on_cpu else framework_interval(framework, has_experts=has_experts)


def framework_interval(framework: str, *, has_experts: bool) -> float:
    """Return the half width for a framework's times on accelerators that were not calibrated."""
    if has_experts:
        return EXPERTS_RATIO
    if framework in FRAMEWORKS:
        return max(FRAMEWORKS[framework].ratio, LEAST_RATIO)
    return UNKNOWN_RATIO if framework == "unknown" else PROFILE_RATIO


def _calibration(cluster: Cluster, framework: str, *, has_experts: bool) -> Calibration | None:
    """Return what the cluster was calibrated with, if it was with such iterations."""
    own = cluster.calibration
    return own if own and own.framework == framework and own.experts == has_experts else None


def describe_interval(cluster: Cluster, framework: str = "myriad", *, has_experts: bool) -> str:
    """Return a line that describes the interval and what it is for, or an empty string where none is
    known."""
    ratio = interval_ratio(cluster, framework, has_experts=has_experts)
    if ratio is None:
        return ""
    if own := _calibration(cluster, framework, has_experts=has_experts):
        what = f"{framework}, calibrated with {own.rows} of its iterations"
        return f"nine of ten predicted times are within {ratio:.0%}: {what} (myriad plan --calibrate)"
    if has_experts:
        what = "models with experts, any framework"
    elif times := FRAMEWORKS.get(framework):
        what = f"{framework} on {times.accelerators}, from its {times.rows} published times"
    elif framework == "unknown":
        what = "a framework without a profile, dense models"
    else:
        what = f"{framework}, with a profile and without published times; dense models on A100 to B200"
    return f"nine of ten predicted times are within {ratio:.0%}: {what} (myriad validate)"


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
