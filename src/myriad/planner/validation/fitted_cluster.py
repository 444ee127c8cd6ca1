"""A cluster fitted to a user's own iterations: `myriad plan --calibrate`.

Four factors scale what the data sheets and their defaults say: the rate of matrix products, that of attention
and of the operators between products, and the rate of the links in a node and between nodes. They minimise,
over the rows,

    sum of (log predicted - log measured)^2, each beyond 8 % counted linearly, + ridge x sum of (log factor)^2

so they stay at 1 unless several rows agree, as in `myriad.planner.validation.prediction_errors`. Predictions
are simulated, with derivatives from differences of a twentieth (Gauss-Newton). Each row is then predicted
with factors from the other rows: that error is what a new layout may expect.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from myriad.errors import BadInputError
from myriad.planner.cluster_config import Accelerator, Cluster, Level, Link
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.simulation.simulation_cache import SimulationCache
from myriad.planner.validation.prediction_errors import (
    HUBER,
    RIDGE,
    ErrorScore,
    PredictedRow,
    predict_rows,
    score,
)
from myriad.planner.validation.prediction_interval import interval_width
from myriad.planner.validation.published_rows import PublishedRow

__all__ = ["FEWEST_ROWS", "ClusterFactors", "FittedCluster", "fit_cluster", "scaled_cluster", "steps_of"]

_Array = npt.NDArray[np.float64]
FEWEST_ROWS = 3
"""Fewest rows that factors can be fitted to and tested on."""
_STEP = 0.05
_ROUNDS = 3
_MOST = float(np.log(4))
"""Largest logarithm of a factor."""


class ClusterFactors(NamedTuple):
    """Factors on the rates of a cluster; 1: as its file says."""

    products: float = 1.0
    """Factor on the rate of matrix products."""
    streams: float = 1.0
    """Factor on the rates of attention and of the operators between products."""
    node: float = 1.0
    """Factor on the rates of links inside a node."""
    network: float = 1.0
    """Factor on the rates of links between nodes."""


@dataclass(frozen=True)
class FittedCluster:
    """Factors with the errors before and after."""

    factors: ClusterFactors
    before: ErrorScore
    """Errors with all factors 1."""
    after: ErrorScore
    """Errors of the rows that the factors were fitted to."""
    left_out: ErrorScore
    """Errors of rows with the factors of all others."""

    @property
    def at_bound(self) -> tuple[str, ...]:
        """Names of the factors that are as far from 1 as they may be: the rows are of another cluster or job
        than they say, or miss something."""
        logs = zip(ClusterFactors._fields, np.log(self.factors), strict=True)
        return tuple(name for name, one in logs if abs(one) > _MOST - 1e-6)

    @property
    def interval(self) -> float:
        """Relative half width of the interval that contains nine of ten times of other rows."""
        return float(np.expm1(interval_width([np.log1p([error]) for error in self.left_out.errors])))


def fit_cluster(rows: Sequence[PublishedRow], progress: Callable[[], None] | None = None) -> FittedCluster:
    """Fit the factors to measured iterations. ``progress`` is called `steps_of` times. Raises
    `BadInputError` for fewer than `FEWEST_ROWS` rows, and rows of several frameworks, or with and without
    experts: they do not lose the same."""
    if len(rows) < FEWEST_ROWS:
        raise BadInputError("--calibrate", f"{len(rows)} rows", f"at least {FEWEST_ROWS} rows")
    kinds = sorted({row.framework + ", experts" * row.has_experts for row in rows})
    if len(kinds) > 1:
        allowed = (
            "rows of one framework (--framework NAME: predict all as this one), all with experts or none"
        )
        raise BadInputError("--calibrate", "; ".join(kinds), allowed)
    predicted = predict_rows(rows, progress)
    seconds = _Seconds(predicted, progress)
    logs = np.zeros(len(ClusterFactors()))
    before = errors = np.log([one.seconds / one.row.seconds for one in predicted])
    for _ in range(_ROUNDS):
        slopes = seconds.slopes(logs, errors)
        logs = _solve(slopes, errors, logs)
        errors = seconds.errors(logs)
    without = [
        seconds.error(i, _solve(np.delete(slopes, i, 0), np.delete(errors, i), logs))
        for i in range(len(rows))
    ]
    times = [
        [float(np.exp(one)) * row.seconds for one, row in zip(found, rows, strict=True)]
        for found in (before, errors, without)
    ]
    scores = [score(predicted, one) for one in times]
    return FittedCluster(ClusterFactors(*(float(one) for one in np.exp(logs))), *scores)


def steps_of(num_rows: int) -> int:
    """Return the number of predictions of a fit."""
    return num_rows * (1 + _ROUNDS * (len(ClusterFactors()) + 1) + 1)


@dataclass
class _Seconds:
    """Predicts rows on scaled clusters."""

    rows: Sequence[PredictedRow]
    progress: Callable[[], None] | None

    def __post_init__(self) -> None:
        self._simulations = SimulationCache()

    def error(self, number: int, logs: _Array) -> float:
        """Return the logarithm of predicted over measured seconds of a row."""
        one = self.rows[number]
        cluster = scaled_cluster(one.row.cluster, ClusterFactors(*np.exp(logs)))
        found = self._simulations.seconds(Costs(one.workload, cluster))
        if self.progress:
            self.progress()
        return float(np.log(found / one.row.seconds))

    def errors(self, logs: _Array) -> _Array:
        """Return the errors of all rows."""
        return np.array([self.error(number, logs) for number in range(len(self.rows))])

    def slopes(self, logs: _Array, errors: _Array) -> _Array:
        """Return the derivatives of the errors, a column for each factor."""
        steps = _STEP * np.eye(len(logs))
        return np.stack([(self.errors(logs + step) - errors) / _STEP for step in steps], 1)


def _solve(slopes: _Array, errors: _Array, logs: _Array) -> _Array:
    """Return the logarithms of the factors at which the errors, linear in them, are smallest."""
    pull = RIDGE * len(errors) ** 0.5 * np.eye(len(logs))
    start, found = errors - slopes @ logs, logs
    for _ in range(20):
        weights = np.minimum(1.0, HUBER / np.maximum(np.abs(start + slopes @ found), 1e-9))
        weighted = slopes.T * weights
        found = np.linalg.solve(weighted @ slopes + pull, -weighted @ start)
    return np.clip(found, -_MOST, _MOST)


def scaled_cluster(cluster: Cluster, factors: ClusterFactors) -> Cluster:
    """Return the cluster with scaled rates. Shares of a peak stay at most 1."""
    links = cluster.links
    changed = {"node": _scaled_link(cluster, "node", factors.node)}
    if links.network is not None:
        changed["network"] = _scaled_link(cluster, "network", factors.network)
    if links.spine is not None:
        changed["spine"] = _scaled_link(cluster, "spine", factors.network)
    if links.tensor is not None:
        rate = links.tensor.bytes_per_second * factors.node
        changed["tensor"] = links.tensor.model_copy(update={"bytes_per_second": rate})
    return cluster.model_copy(
        update={
            "accelerator": _scaled_accelerator(cluster.accelerator, factors),
            "links": links.model_copy(update=changed),
        }
    )


def _scaled_link(cluster: Cluster, level: Level, factor: float) -> Link:
    link: Link | None = getattr(cluster.links, level)
    assert link is not None
    return link.model_copy(update={"achievable_ratio": min(1.0, cluster.ratio(level) * factor)})


def _ratios(factors: ClusterFactors) -> dict[str, float]:
    """Return the factor on each share of a rate."""
    products, streams = factors.products, factors.streams
    return {
        "achievable_ratio": products,
        "float8_achievable_ratio": products,
        "float4_achievable_ratio": products,
        "memory_ratio": streams,
        "flash_ratio": streams,
        "flash3_ratio": streams,
    }


_STREAMS = ("stream_bytes_per_second", "loss_bytes_per_second", "weights_bytes_per_second")


def _scaled_accelerator(accelerator: Accelerator, factors: ClusterFactors) -> Accelerator:
    changed = {}
    for key, factor in _ratios(factors).items():
        if (ratio := getattr(accelerator, key)) is not None:
            changed[key] = min(1.0, ratio * factor)
    for key in _STREAMS:
        if (rate := getattr(accelerator, key)) is not None:
            changed[key] = rate * factors.streams
    own = accelerator.float32
    float32 = {key: rate * factors.streams for key in _STREAMS if (rate := getattr(own, key)) is not None}
    if own.flash_ratio is not None:
        float32["flash_ratio"] = min(1.0, own.flash_ratio * factors.streams)
    return accelerator.model_copy(update=changed | {"float32": own.model_copy(update=float32)})
