"""Choice among layouts: what the planner's choice of each published sweep loses against the best of it.

A sweep is three or more layouts that one source measured for one job: the same framework and settings, model,
number and kind of accelerators, global batch and type. Its rows differ in the layout alone: parallel degrees,
micro-batch, virtual stages, recomputation, schedule. Two figures say how well predictions choose:

    regret      seconds of the layout with the smallest prediction over those of the fastest layout, less 1
    tau         Kendall's tau of both orders, over the pairs of layouts whose measured seconds differ by more
                than 3 %: (pairs in the same order - pairs in the opposite order) / pairs

Runs of one layout count as one, by the mean of their seconds. Nothing is counted where predictions are
equal: such a pair of layouts is in neither order, and of such choices the slowest is taken.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np

from myriad.planner.validation.prediction_errors import PredictedRow, TableResult

__all__ = ["LayoutSweep", "SweepSummary", "SweptLayout", "layout_sweeps", "summarize_sweeps"]

_FEWEST = 3
"""Fewest layouts of a sweep."""
_TIE = 0.03
"""Relative difference of measured seconds up to which the order of two layouts is not known: the same recipe
drifts by 3 to 6 % between releases."""
_CLOSE_REGRET, _CLOSE_TAU = 0.10, 0.8
"""Largest regret and smallest tau that a summary counts as close."""


class SweptLayout(NamedTuple):
    """One layout of a sweep."""

    name: str
    """Name of its first row."""
    seconds: float
    """Measured seconds of an iteration, on average over its rows."""
    predicted: float


@dataclass(frozen=True)
class LayoutSweep:
    """The layouts that a source measured for one job."""

    table: str
    name: str
    framework: str
    num_rows: int
    layouts: tuple[SweptLayout, ...]

    @property
    def best(self) -> SweptLayout:
        """The layout with the fewest measured seconds."""
        return min(self.layouts, key=lambda one: one.seconds)

    @property
    def chosen(self) -> SweptLayout:
        """The layout with the fewest predicted seconds."""
        return min(self.layouts, key=lambda one: (one.predicted, -one.seconds))

    @property
    def regret(self) -> float:
        """Share of the best layout's seconds by which the chosen layout is slower."""
        return self.chosen.seconds / self.best.seconds - 1

    @property
    def ordered_pairs(self) -> tuple[int, int]:
        """Sum of +1 for each pair in the predicted order and -1 for each in the opposite one, and the number
        of pairs, both over those whose measured seconds differ by more than a tie."""
        total = pairs = 0
        for one, other in combinations(self.layouts, 2):
            slow, fast = (one, other) if one.seconds > other.seconds else (other, one)
            if slow.seconds > (1 + _TIE) * fast.seconds:
                pairs += 1
                total += (slow.predicted > fast.predicted) - (slow.predicted < fast.predicted)
        return total, pairs

    @property
    def tau(self) -> float | None:
        """Kendall's tau of predicted and measured seconds; ``None``: all measured seconds are alike."""
        total, pairs = self.ordered_pairs
        return total / pairs if pairs else None


@dataclass(frozen=True)
class SweepSummary:
    """Figures over several sweeps, each of equal weight."""

    num_sweeps: int
    median_regret: float
    worst_regret: float
    num_close_regrets: int
    """Sweeps with a regret of at most 10 %."""
    num_taus: int
    """Sweeps with a tau."""
    median_tau: float
    """Not a number without a tau."""
    num_close_taus: int
    """Sweeps with a tau of at least 0.8."""
    all_pairs_tau: float
    """Tau over the pairs of all sweeps; not a number without a pair."""


def layout_sweeps(results: Sequence[TableResult]) -> list[LayoutSweep]:
    """Return the sweeps of each table, in the order of their first rows."""
    found = []
    for result in results:
        groups: dict[tuple[object, ...], list[PredictedRow]] = defaultdict(list)
        for one in result.rows:
            groups[_job(one)].append(one)
        for rows in groups.values():
            layouts = _layouts(rows)
            if len(layouts) >= _FEWEST:
                framework = rows[0].row.framework
                found.append(
                    LayoutSweep(result.table.name, _name(rows[0]), framework, len(rows), tuple(layouts))
                )
    return found


def summarize_sweeps(sweeps: Sequence[LayoutSweep]) -> SweepSummary:
    """Return the figures over at least one sweep."""
    regrets = [one.regret for one in sweeps]
    taus = [one.tau for one in sweeps if one.tau is not None]
    ordered, pairs = (sum(counts) for counts in zip(*(one.ordered_pairs for one in sweeps), strict=True))
    return SweepSummary(
        len(sweeps),
        float(np.median(regrets)),
        max(regrets),
        sum(one <= _CLOSE_REGRET for one in regrets),
        len(taus),
        float(np.median(taus)) if taus else float("nan"),
        sum(one >= _CLOSE_TAU for one in taus),
        ordered / pairs if pairs else float("nan"),
    )


def _job(one: PredictedRow) -> tuple[object, ...]:
    """Return what all rows of a sweep share."""
    work, cluster = one.workload, one.row.cluster
    return (
        one.row.framework,
        one.row.source,
        work.model,
        work.global_batch,
        cluster.world,
        cluster.accelerator.name,
        work.profile,
        # Some frameworks wait for messages with one schedule, and not with others.
        work.overlap.model_copy(update={"pipeline": True}),
        work.comm,
        work.optimizer,
        work.value_bytes,
    )


def _layouts(rows: Sequence[PredictedRow]) -> list[SweptLayout]:
    """Return the different layouts of rows; those that a row leaves open are part of what it states."""
    runs: dict[tuple[object, ...], list[PredictedRow]] = defaultdict(list)
    for one in rows:
        runs[tuple(work.layout for work in one.row.works)].append(one)
    return [
        SweptLayout(
            same[0].row.name,
            float(np.mean([one.row.seconds for one in same])),
            float(np.mean([one.seconds for one in same])),
        )
        for same in runs.values()
    ]


def _name(one: PredictedRow) -> str:
    """Return the name of a sweep. Some sources add the layout to the model's name, behind a slash."""
    row, work = one.row, one.workload
    model, cluster = (row.model_name or row.model).split(" / ")[0], row.cluster
    gpus = f"{cluster.world} {cluster.accelerator.name}"
    return f"{model}, {gpus}, batch {work.global_batch}, s{work.model.sequence}"
