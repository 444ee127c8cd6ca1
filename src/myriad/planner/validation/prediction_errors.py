"""Prediction errors against published seconds, table by table.

    zero-shot    data sheets and the model's own constants, the same for every table
    calibrated   the parts of an iteration are scaled by a few factors, fitted to rows of the same table that
                 are not the one predicted: five folds, and each model left out in turn

The factors scale four parts: matrix products; attention and memory-bound operators; tensor-parallel
communication; the rest (bubble, pipeline, data parallelism, host). They are near 1 unless the rows show
otherwise: ridge regression on relative errors, with less weight for rows far off (Huber), because a table has
rows that its own authors' model misses by half.

Intervals come from other tables only (`myriad.planner.validation.prediction_interval`), as for a prediction
of a new cluster.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from myriad.comm.hierarchy import count_shard_levels
from myriad.planner.cluster_config import Cluster
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.memory.closed_form_memory import fits_probability, worst_stage_memory
from myriad.planner.memory.layer_memory import RECOMPUTE
from myriad.planner.simulation.simulation_cache import SimulationCache
from myriad.planner.validation.prediction_interval import interval_width
from myriad.planner.validation.published_rows import PublishedRow
from myriad.planner.validation.published_tables import PublishedTable
from myriad.planner.workload import Workload

__all__ = [
    "HUBER",
    "RIDGE",
    "ErrorScore",
    "PredictedRow",
    "SystemRatio",
    "TableResult",
    "interval",
    "intervals",
    "predict_rows",
    "predict_table",
    "probability_of_fit",
    "ratios",
    "score",
]

_Array = npt.NDArray[np.float64]
_FOLDS = 5
RIDGE = 0.02
"""Penalty of each factor's distance from 1, against a row's squared relative error: factors move by a tenth
only if several rows agree."""
HUBER = 0.08
"""Relative error above which a row's influence stops growing."""


@dataclass(frozen=True)
class PredictedRow:
    """One published row with its prediction."""

    row: PublishedRow
    workload: Workload
    """The fastest of the row's possible workloads."""
    seconds: float
    parts: tuple[float, ...]
    """Seconds of the parts that the factors scale; their sum is the whole iteration."""

    @property
    def error(self) -> float:
        """Relative error, positive when the prediction is too slow."""
        return self.seconds / self.row.seconds - 1


@dataclass(frozen=True)
class ErrorScore:
    """Errors of one table in one mode."""

    errors: tuple[float, ...]
    rank_correlation: float | None
    """Spearman's rank correlation of the seconds; ``None`` with fewer than three rows."""

    @property
    def mean(self) -> float:
        """Mean absolute relative error over the rows, as a ratio."""
        return float(np.mean(np.abs(self.errors)))

    @property
    def worst(self) -> float:
        """Largest absolute relative error of a row, as a ratio."""
        return float(np.max(np.abs(self.errors)))

    @property
    def bias(self) -> float:
        """Mean signed relative error: positive if predictions are too slow."""
        return float(np.mean(self.errors))

    @property
    def is_one_sided(self) -> bool:
        """Whether there are several errors and all have the same sign."""
        return len(self.errors) > 1 and (min(self.errors) > 0 or max(self.errors) < 0)


@dataclass(frozen=True)
class SystemRatio:
    """Ratio of the MFU of two systems with the same model, GPUs and batch."""

    setting: str
    system: str
    baseline: str
    published: float
    predicted: float


@dataclass(frozen=True)
class TableResult:
    """A table's rows and scores."""

    table: PublishedTable
    rows: tuple[PredictedRow, ...]
    zero_shot: ErrorScore
    calibrated: ErrorScore | None
    """Errors with held-out rows; ``None``: the table has too few rows."""
    left_out: ErrorScore | None
    """Errors when each model is predicted from the other models' rows; ``None``: there is one model, or a row
    for each."""
    factors: tuple[float, ...]
    """Factors fitted to all rows."""


def predict_table(table: PublishedTable, progress: Callable[[], None] | None = None) -> TableResult:
    """Predict every row in all modes; ``progress`` is called after each row."""
    rows = predict_rows(table.rows, progress)
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


def predict_rows(
    rows: Sequence[PublishedRow], progress: Callable[[], None] | None = None
) -> list[PredictedRow]:
    """Predict rows from data sheets; ``progress`` is called after each."""
    simulations, predicted = SimulationCache(), []
    for row in rows:
        predicted.append(_predict(row, simulations))
        if progress:
            progress()
    return predicted


def ratios(result: TableResult) -> list[SystemRatio]:
    """Compare each system of a table with the first one at the same setting.

    MFU counts only the FLOPs that a system's own model needs, so a model with fewer FLOPs has no advantage.
    The result is empty for a table of one system."""
    found, first = [], dict[str, PredictedRow]()
    for one in result.rows:
        base = first.setdefault(one.row.setting, one) if one.row.setting else one
        if base.row.system != one.row.system:
            published = one.row.mfu(one.row.seconds) / base.row.mfu(base.row.seconds)
            predicted = one.row.mfu(one.seconds) / base.row.mfu(base.seconds)
            found.append(SystemRatio(one.row.setting, one.row.system, base.row.system, published, predicted))
    return found


def probability_of_fit(workload: Workload, cluster: Cluster) -> float:
    """Return the probability that the memory of the fullest stage is within an accelerator's."""
    layout = workload.layout
    memory = worst_stage_memory(
        workload.rank_model,
        workload.profile,
        dp=layout.num_holders,
        tp=layout.tp,
        pp=layout.pp,
        virtual_stages=layout.virtual_stages,
        micro_batch=layout.micro_batch,
        num_micro_batches=workload.num_micro_batches,
        zero=layout.zero,
        reduce_each=layout.reduce == "each",
        recompute=RECOMPUTE.index(layout.recompute),
        eager=layout.schedule_name.startswith("eager"),
        zero_bubble="zero-bubble" in layout.schedule_name,
        dual_pipe=layout.schedule_name == "dualpipe-v",
        levels=count_shard_levels(workload.comm, layout, cluster.accelerators_per_node),
        shard_group=layout.shard_group or 0,
        optimizer=workload.optimizer,
        averages=workload.ema_every > 0,
        value_bytes=workload.value_bytes,
        ep=layout.ep,
        etp=layout.etp,
        expert_load=layout.expert_load,
        context=(layout.cp // layout.ulysses, layout.ulysses),
    )
    return float(fits_probability(memory, float(cluster.accelerator.memory_bytes)))


def _predict(row: PublishedRow, simulations: SimulationCache) -> PredictedRow:
    works = [
        workload for workload in row.works if probability_of_fit(workload, row.cluster) > 0.5
    ] or row.works
    every = [Costs(workload, row.cluster) for workload in works]
    seconds, costs = min(((simulations.seconds(one), one) for one in every), key=lambda one: one[0])
    return PredictedRow(row, costs.workload, seconds, _parts(costs, seconds))


_FACTORS = 4


def _parts(costs: Costs, seconds: float) -> tuple[float, ...]:
    parts, again = costs.busiest_rank
    parts = parts + again
    slowdown = costs.cluster.expected_slowdown
    comm = parts.tensor + parts.experts + parts.context
    products, streams, tensor = (
        float(one) * slowdown for one in (parts.matmul, parts.attention + parts.memory, comm)
    )
    return products, streams, tensor, max(0.0, seconds - products - streams - tensor)


def _held_out(rows: Sequence[PredictedRow], groups: Sequence[Sequence[int]]) -> list[float]:
    """Return the seconds of every row, predicted with factors from the rows of other groups."""
    seconds = [0.0] * len(rows)
    for group in groups:
        factors = _fit([row for i, row in enumerate(rows) if i not in group])
        for i in group:
            seconds[i] = float(np.dot(factors, rows[i].parts))
    return seconds


def _fit(rows: Sequence[PredictedRow]) -> _Array:
    """Return the fitted factors of the parts."""
    shares = np.array([[part / one.row.seconds for part in one.parts] for one in rows])
    factors, weights = np.ones(_FACTORS), np.ones(len(rows))
    pull = RIDGE * len(rows) ** 0.5 * np.eye(_FACTORS)
    for _ in range(20):
        weighted = shares.T * weights
        factors = np.linalg.solve(weighted @ shares + pull, weighted @ np.ones(len(rows)) + pull.sum(1))
        off = np.abs(shares @ factors - 1)
        weights = np.minimum(1.0, HUBER / np.maximum(off, 1e-9))
    return factors


def score(rows: Sequence[PredictedRow], seconds: Sequence[float]) -> ErrorScore:
    """Return the errors of predictions. ``seconds``: predicted seconds, in the order of the rows."""
    truth = [one.row.seconds for one in rows]
    errors = tuple(ours / real - 1 for ours, real in zip(seconds, truth, strict=True))
    return ErrorScore(errors, _spearman(seconds, truth) if len(rows) > 2 else None)


def _spearman(ours: Sequence[float], truth: Sequence[float]) -> float:
    ranks = [np.argsort(np.argsort(values)) for values in (ours, truth)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def intervals(results: Sequence[TableResult]) -> list[tuple[float, float]]:
    """Return two values for each table. First, the relative half width of the interval that should contain 90
    % of its true values, from the other tables' errors. Second, the share of its true values that the
    interval contains."""
    found = []
    for result in results:
        others = [_logarithms(other) for other in results if other is not result]
        half = interval_width(others) if others else float("nan")
        found.append((float(np.expm1(half)), float(np.mean(np.abs(_logarithms(result)) <= half))))
    return found


def interval(results: Sequence[TableResult]) -> float:
    """Return the relative half width for a system that is in none of the tables."""
    return float(np.expm1(interval_width([_logarithms(result) for result in results])))


def _logarithms(result: TableResult) -> _Array:
    return np.log1p(np.array(result.zero_shot.errors))
