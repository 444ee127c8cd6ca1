"""Prediction errors framework by framework, and the interval for a framework that was left out.

Rows of one framework err alike: they share its kernels and waits. So the interval for a framework comes from
the other frameworks' rows, each framework with equal weight, however many rows it has:

    half width of F = the smallest w for which the mean over the other frameworks of the share of their rows
                      with |log error| <= w is at least 0.9

Its coverage is the share of F's own rows within it. Models with experts are groups of their own.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from myriad.planner.validation.prediction_errors import TableResult

__all__ = ["FrameworkErrors", "framework_errors", "left_out_interval"]

_COVERAGE = 0.9
_CLOSE = 0.1
"""Errors up to this are counted as close."""


@dataclass(frozen=True)
class FrameworkErrors:
    """Zero-shot errors of one framework's rows."""

    framework: str
    has_experts: bool
    errors: tuple[float, ...]
    interval: float
    """Relative half width from the other frameworks' rows; not a number with one framework."""

    @property
    def mean(self) -> float:
        """Mean absolute relative error."""
        return float(np.mean(np.abs(self.errors)))

    @property
    def median(self) -> float:
        """Median absolute relative error."""
        return float(np.median(np.abs(self.errors)))

    @property
    def p90(self) -> float:
        """Absolute relative error that nine of ten rows do not exceed."""
        return float(np.quantile(np.abs(self.errors), _COVERAGE))

    @property
    def bias(self) -> float:
        """Mean signed relative error: positive if predictions are too slow."""
        return float(np.mean(self.errors))

    @property
    def close(self) -> float:
        """Share of the rows within 10 %."""
        return float(np.mean(np.abs(self.errors) <= _CLOSE))

    @property
    def coverage(self) -> float:
        """Share of the rows within `interval`."""
        return float(np.mean(np.abs(np.log1p(self.errors)) <= np.log1p(self.interval)))


def framework_errors(results: Sequence[TableResult]) -> list[FrameworkErrors]:
    """Return the errors of each framework in all tables, those of models with experts apart."""
    groups: dict[tuple[bool, str], list[float]] = defaultdict(list)
    for result in results:
        for one in result.rows:
            groups[one.row.has_experts, one.row.framework].append(one.error)
    found = []
    for (has_experts, name), errors in sorted(groups.items()):
        others = {
            other: _logarithms(theirs)
            for (experts, other), theirs in groups.items()
            if experts == has_experts and other != name
        }
        width = left_out_interval(others) if others else float("nan")
        found.append(FrameworkErrors(name, has_experts, tuple(errors), width))
    return found


def left_out_interval(others: Mapping[str, npt.NDArray[np.float64]]) -> float:
    """Return the relative half width of the interval, from the logarithms of the errors of each other
    framework."""
    sizes = np.concatenate([np.abs(errors) for errors in others.values()])
    weights = np.concatenate([np.full(len(errors), 1 / len(errors)) for errors in others.values()])
    order = np.argsort(sizes)
    reached = np.cumsum(weights[order]) / len(others)
    return float(np.expm1(sizes[order][min(len(sizes) - 1, int(np.searchsorted(reached, _COVERAGE)))]))


def _logarithms(errors: Sequence[float]) -> npt.NDArray[np.float64]:
    return np.log1p(np.array(errors))
