"""How far predictions are from what was published, table by table.

    zero-shot    data sheets and the model's own constants, the same for every table
    calibrated   what the iteration goes to is scaled by a few factors, fitted to rows of the same table that
                 are not the one predicted: five folds, and each model left out in turn

The factors (matrix products; attention and memory-bound operators; tensor-parallel communication; the rest:
bubble, pipeline, data parallelism, host) are near 1 unless the rows say otherwise: ridge regression on
relative errors, with rows far off weighing less (Huber), since a table has rows that its own authors' model
misses by half.

Intervals come from other tables only (`myriad.planner.interval`): what a prediction for a new cluster can
promise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from myriad.planner.activations import RECOMPUTE
from myriad.planner.cluster import Cluster
from myriad.planner.costs import Costs
from myriad.planner.interval import width
from myriad.planner.memory import fits_probability, worst_stage_memory
from myriad.planner.published import Row, Table
from myriad.planner.rescore import Simulations
from myriad.planner.work import Work

__all__ = [
    "Ratio",
    "Score",
    "TableResult",
    "interval",
    "intervals",
    "predict_table",
    "probability_of_fit",
    "ratios",
    "score",
]

_Array = npt.NDArray[np.float64]
_FOLDS = 5
_RIDGE = 0.02
"""Of each factor's distance from 1, against a row's squared relative error: factors move by a tenth only if
several rows agree."""
_HUBER = 0.08
"""Relative error from which a row's pull grows no more."""


@dataclass(frozen=True)
class Predicted:
    """One row."""

    row: Row
    work: Work
    """Of those that the row leaves open, the quickest."""
    seconds: float
    parts: tuple[float, ...]
    """Seconds by what the factors scale; their sum is the whole."""

    @property
    def error(self) -> float:
        """Relative, positive when predicted too slow."""
        return self.seconds / self.row.seconds - 1


@dataclass(frozen=True)
class Score:
    """Of one table in one mode."""

    errors: tuple[float, ...]
    rank_correlation: float | None
    """Spearman's, of times; ``None`` with fewer than three rows."""

    @property
    def mean(self) -> float:
        """Absolute."""
        return float(np.mean(np.abs(self.errors)))

    @property
    def worst(self) -> float:
        """Absolute."""
        return float(np.max(np.abs(self.errors)))

    @property
    def bias(self) -> float:
        """Mean with its sign."""
        return float(np.mean(self.errors))

    @property
    def is_one_sided(self) -> bool:
        """Whether all errors of several have one sign."""
        return len(self.errors) > 1 and (min(self.errors) > 0 or max(self.errors) < 0)


@dataclass(frozen=True)
class Ratio:
    """How much better one system is than another at the same model, GPUs and batch, as a ratio of MFU."""

    setting: str
    system: str
    baseline: str
    published: float
    predicted: float


@dataclass(frozen=True)
class TableResult:
    """A table's rows and scores."""

    table: Table
    rows: tuple[Predicted, ...]
    zero_shot: Score
    calibrated: Score | None
    """``None``: too few rows to hold some back."""
    left_out: Score | None
    """Each model predicted from the other models' rows; ``None``: there is one model, or a row for each."""
    factors: tuple[float, ...]
    """Fitted to all rows."""


def predict_table(table: Table, progress: Callable[[], None] | None = None) -> TableResult:
    """Every row in all modes; ``progress`` is called after each row."""
    simulations, rows = Simulations(), []
    for row in table.rows:
        rows.append(_predict(row, simulations))
        if progress:
            progress()
    folds = [list(range(start, len(rows), _FOLDS)) for start in range(min(_FOLDS, len(rows)))]
    models = list(dict.fromkeys(one.row.model for one in rows))
    by_model = [[i for i, one in enumerate(rows) if one.row.model == model] for model in models]
    some_left = 1 < len(models) < len(rows)
    return TableResult(
        table,
        tuple(rows),
        score(rows, [one.seconds for one in rows]),
        score(rows, _held_out(rows, folds)) if len(rows) >= 2 * _FACTORS else None,
        score(rows, _held_out(rows, by_model)) if some_left else None,
        tuple(float(factor) for factor in _fit(rows)),
    )


def ratios(result: TableResult) -> list[Ratio]:
    """Compare each system of a table with the one that is named first at the same setting.

    MFU counts only the FLOPs that a system's own model needs, so that a model with fewer of them gains
    nothing by that; empty for a table of one system.
    """
    found, first = [], dict[str, Predicted]()
    for one in result.rows:
        base = first.setdefault(one.row.setting, one) if one.row.setting else one
        if base.row.system != one.row.system:
            published = one.row.mfu(one.row.seconds) / base.row.mfu(base.row.seconds)
            predicted = one.row.mfu(one.seconds) / base.row.mfu(base.seconds)
            found.append(Ratio(one.row.setting, one.row.system, base.row.system, published, predicted))
    return found


def probability_of_fit(work: Work, cluster: Cluster) -> float:
    """Return the probability that the memory of the fullest stage is within an accelerator's."""
    layout = work.layout
    memory = worst_stage_memory(
        work.model,
        work.practice,
        dp=layout.dp,
        tp=layout.tp,
        pp=layout.pp,
        virtual_stages=layout.virtual_stages,
        micro_batch=layout.micro_batch,
        num_micro_batches=work.num_micro_batches,
        zero=layout.zero,
        reduce_each=layout.reduce == "each",
        recompute=RECOMPUTE.index(layout.recompute),
        eager=layout.schedule_name.startswith("eager"),
        zero_bubble="zero-bubble" in layout.schedule_name,
        value_bytes=work.value_bytes,
    )
    return float(fits_probability(memory, float(cluster.accelerator.memory_bytes)))


def _predict(row: Row, simulations: Simulations) -> Predicted:
    works = [work for work in row.works if probability_of_fit(work, row.cluster) > 0.5] or row.works
    every = [Costs(work, row.cluster) for work in works]
    seconds, costs = min(((simulations.seconds(one), one) for one in every), key=lambda one: one[0])
    return Predicted(row, costs.work, seconds, _parts(costs, seconds))


_FACTORS = 4


def _parts(costs: Costs, seconds: float) -> tuple[float, ...]:
    parts, again = costs.busiest_rank
    parts = parts + again
    slowdown = costs.cluster.expected_slowdown
    products, streams, tensor = (
        float(one) * slowdown for one in (parts.matmul, parts.attention + parts.memory, parts.tensor)
    )
    return products, streams, tensor, max(0.0, seconds - products - streams - tensor)


def _held_out(rows: Sequence[Predicted], groups: Sequence[Sequence[int]]) -> list[float]:
    """Seconds of every row, predicted from the rows of other groups."""
    seconds = [0.0] * len(rows)
    for group in groups:
        factors = _fit([row for i, row in enumerate(rows) if i not in group])
        for i in group:
            seconds[i] = float(np.dot(factors, rows[i].parts))
    return seconds


def _fit(rows: Sequence[Predicted]) -> _Array:
    """Factors of the parts."""
    shares = np.array([[part / one.row.seconds for part in one.parts] for one in rows])
    factors, weights = np.ones(_FACTORS), np.ones(len(rows))
    pull = _RIDGE * len(rows) ** 0.5 * np.eye(_FACTORS)
    for _ in range(20):
        weighted = shares.T * weights
        factors = np.linalg.solve(weighted @ shares + pull, weighted @ np.ones(len(rows)) + pull.sum(1))
        off = np.abs(shares @ factors - 1)
        weights = np.minimum(1.0, _HUBER / np.maximum(off, 1e-9))
    return factors


def score(rows: Sequence[Predicted], seconds: Sequence[float]) -> Score:
    """``seconds``: predicted, in the order of the rows."""
    truth = [one.row.seconds for one in rows]
    errors = tuple(ours / real - 1 for ours, real in zip(seconds, truth, strict=True))
    return Score(errors, _spearman(seconds, truth) if len(rows) > 2 else None)


def _spearman(ours: Sequence[float], truth: Sequence[float]) -> float:
    ranks = [np.argsort(np.argsort(values)) for values in (ours, truth)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def intervals(results: Sequence[TableResult]) -> list[tuple[float, float]]:
    """For each table: half width of the interval that should hold 90 % of its truths, as a ratio, from the
    other tables' errors; and the share of its truths that it holds."""
    found = []
    for result in results:
        others = [_logarithms(other) for other in results if other is not result]
        half = width(others) if others else float("nan")
        found.append((float(np.expm1(half)), float(np.mean(np.abs(_logarithms(result)) <= half))))
    return found


def interval(results: Sequence[TableResult]) -> float:
    """Half width for a system that is in none of the tables, as a ratio."""
    return float(np.expm1(width([_logarithms(result) for result in results])))


def _logarithms(result: TableResult) -> _Array:
    return np.log1p(np.array(result.zero_shot.errors))
