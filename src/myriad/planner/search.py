"""All legal layouts of a problem, memory first, by the closed form; the best of them, and the Pareto front.

Of the layouts that differ only in shards, recomputation and overlaps only the best few are handed on:
otherwise a hundred variants of one layout would fill the list that the simulator is to judge. Layouts whose
programs take long to simulate are left out, as thousands of blocks in hundreds of stages make them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from myriad.planner.costs import cut_layers
from myriad.planner.judge import judge, judge_plot
from myriad.planner.space import Candidate, Plot, Problem, plots
from myriad.planner.stage_times import Array, LayerTable
from myriad.planner.steady import num_computes
from myriad.program.build import count_chunks

__all__ = ["Found", "Objective", "search"]

Objective = Literal["time", "cost", "memory"]
_VARIANTS = 3
"""Of one (dp, tp, pp, schedule, micro-batch) that are handed on."""
_TIE = 1e-4
"""Of the time, that a layout which fills all memory is put behind one that needs none: between equals the
leaner one wins."""

_MOST_COMPUTES, _MOST_IN_ALL = 2**17, 1_000_000
"""Forwards in the programs of one layout that is handed on, and of all of them: a million take some ten
seconds. Of ready-made jobs the longest have 53 thousand, a hundred of them half a million."""


@dataclass(frozen=True)
class Found:
    """What a search came to."""

    best: tuple[Candidate, ...]
    """By the objective, of those that fit."""
    front: tuple[Candidate, ...]
    """Layouts than which none is both quicker and leaner, leanest first, whether they fit or not."""
    num_layouts: int
    """All legal ones."""
    num_fitting: int


@dataclass
class _Pool:
    """Rows ``[plot, place in it, key, bytes]`` of what may be among the best."""

    plots: list[Plot]
    table: LayerTable
    rows: list[Array] = field(default_factory=list)
    num_computes: dict[tuple[int, ...], int] = field(default_factory=dict)

    def add(self, number: int, places: npt.NDArray[np.int64], keys: Array, num_bytes: Array) -> None:
        plot = np.full(len(places), float(number))
        self.rows.append(np.stack([plot, places.astype(float), keys, num_bytes], axis=1))

    def joined(self) -> Array:
        """All rows, best key first."""
        rows = np.concatenate([np.zeros((0, 4)), *self.rows])
        return rows[np.lexsort((rows[:, 3], rows[:, 2]))]

    def candidate(self, row: Array) -> Candidate:
        plot, index = self._place(row)
        layout, overlap = plot.at(index)
        return judge(plot.problem, Candidate(layout, overlap, 0.0, 0.0, 0.0), self.table)

    def first(self, count: int) -> list[Candidate]:
        """The best that are simulated in a short time; if all take long, the one that takes the least."""
        rows, chosen, in_all = self.joined(), list[Array](), 0
        for row in rows:
            own = self._num_computes(row)
            if own > _MOST_COMPUTES:
                continue
            in_all += own
            if len(chosen) == count or in_all > _MOST_IN_ALL:
                break
            chosen.append(row)
        if not chosen and len(rows):
            chosen = [min(rows, key=self._num_computes)]
        return [self.candidate(row) for row in chosen]

    def _place(self, row: Array) -> tuple[Plot, tuple[int, ...]]:
        plot = self.plots[int(row[0])]
        return plot, tuple(int(place) for place in np.unravel_index(int(row[1]), plot.axes))

    def _num_computes(self, row: Array) -> int:
        """Forwards that the simulation of a layout goes through."""
        plot, index = self._place(row)
        key = int(row[0]), *index[:2], index[6]
        if key not in self.num_computes:
            layout, overlap = plot.at(index)
            whole = plot.problem.global_batch // (plot.dp * layout.micro_batch)
            layers = cut_layers(plot.problem.model, layout.partition, layout.num_stages)
            self.num_computes[key] = num_computes(layout, count_chunks(layout, overlap, layers), whole)
        return self.num_computes[key]


def search(
    problem: Problem,
    *,
    count: int = 100,
    objective: Objective = "time",
    progress: Callable[[int, int], None] | None = None,
) -> Found:
    """``progress(done, total)`` is called after each plot."""
    table, every = LayerTable(problem), list(plots(problem))
    best, front = _Pool(every, table), _Pool(every, table)
    num_fitting = 0
    for number, plot in enumerate(every):
        seconds, total, fits = _without_redundant(plot, *judge_plot(plot, table))
        keys = _keys(problem, seconds, total, objective)
        _add_best(best, number, keys, total, fits, num_cells=_num_cells(plot))
        _add_front(front, number, seconds, total)
        num_fitting += _count(plot, fits)
        if progress:
            progress(number + 1, len(every))
    first = best.first(count)
    pareto = [front.candidate(row) for row in reversed(list(_undominated(front.joined())))]
    return Found(tuple(first), tuple(pareto), sum(plot.num_layouts for plot in every), num_fitting)


def _without_redundant(
    plot: Plot, seconds: Array, total: Array, fits: npt.NDArray[np.bool_]
) -> tuple[Array, Array, npt.NDArray[np.bool_]]:
    """The same with layouts that are others written differently put out of reach."""
    if not plot.redundant.any():
        return seconds, total, fits
    gone = plot.redundant[None, :, :, None]
    return (
        np.where(gone[..., None, None, None], np.inf, seconds),
        np.where(gone, np.inf, total),
        fits & ~gone,
    )


def _keys(problem: Problem, seconds: Array, total: Array, objective: Objective) -> Array:
    """What to keep small. Cost is time: the number of accelerators is given."""
    filled = (total / problem.cluster.accelerator.memory_bytes)[..., None, None, None]
    keys: Array = filled + 1e-9 * seconds if objective == "memory" else seconds * (1 + _TIE * filled)
    return keys


def _num_cells(plot: Plot) -> int:
    """Return the number of cells; only the best variant of each goes on, and a single pipeline rank's
    schedules are variants."""
    return len(plot.micro_batches) * (1 if plot.pp == 1 else len(plot.schedules))


def _add_best(
    pool: _Pool, number: int, keys: Array, total: Array, fits: npt.NDArray[np.bool_], *, num_cells: int
) -> None:
    if not fits.any():
        return
    keys = np.where(fits[..., None, None, None], keys, np.inf)
    cells = keys.reshape(num_cells, -1)
    count = min(_VARIANTS, cells.shape[1])
    chosen = np.argpartition(cells, count - 1, axis=1)[:, :count]
    places = (chosen + np.arange(num_cells)[:, None] * cells.shape[1]).ravel()
    places = places[np.isfinite(keys.ravel()[places])]
    overlaps = int(np.prod(keys.shape[4:]))
    pool.add(number, places, keys.ravel()[places], total.ravel()[places // overlaps])


def _add_front(pool: _Pool, number: int, seconds: Array, total: Array) -> None:
    """The quickest overlaps of each layout, of these what no other of the plot beats in both."""
    flat = seconds.reshape(total.size, -1)
    chosen = flat.argmin(axis=1)
    places = chosen + np.arange(total.size) * flat.shape[1]
    quickest, num_bytes = flat[np.arange(total.size), chosen], total.ravel()
    order = np.lexsort((num_bytes, quickest))
    kept = order[_falls(num_bytes[order])]
    pool.add(number, places[kept], quickest[kept], num_bytes[kept])


def _falls(values: Array) -> npt.NDArray[np.bool_]:
    """Where a value is below all before it."""
    before = np.minimum.accumulate(np.concatenate([[np.inf], values[:-1]]))
    return np.asarray(values < before)


def _undominated(rows: Array) -> Iterator[Array]:
    yield from rows[_falls(rows[:, 3])]


def _count(plot: Plot, fits: npt.NDArray[np.bool_]) -> int:
    """Layouts that fit, each switch counted where it changes something."""
    shares = fits.sum(axis=(0, 1, 3))
    return int((shares * plot.num_switches).sum()) * len(plot.tensors) * len(plot.pipelines)
