"""Search over all legal layouts of a problem by the closed form: the best that fit in memory, and the Pareto
front.

A score is the bytes and closed-form seconds of all layouts of a grid (`score_grid`), or of one
(`score_layout`). Of the layouts that differ only in shards, recomputation and overlaps, only the best few
are passed on. Otherwise a hundred variants of one layout would fill the list of candidates for the
simulator. Layouts whose programs take long to simulate are left out, such as thousands of blocks in
hundreds of stages.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache, partial
from typing import Literal

import numpy as np
import numpy.typing as npt

from myriad.comm.config import CommConfig
from myriad.comm.hierarchy import count_shard_levels
from myriad.comm.layout import Layout
from myriad.planner.cost.stage_layers import cut_layers
from myriad.planner.memory.closed_form_memory import PeakMemory, probability_within, worst_stage_memory
from myriad.planner.memory.layer_memory import RECOMPUTE
from myriad.planner.search.closed_form_times import grid_seconds
from myriad.planner.search.layout_problem import LayoutCandidate, LayoutProblem, Sharding
from myriad.planner.search.layout_space import LayoutGrid, layout_grids
from myriad.planner.search.stage_times import Array, GridTimes, LayerTable
from myriad.planner.simulation.steady_state import num_simulated_forwards
from myriad.planner.workload import rank_model
from myriad.program.build import count_chunks

__all__ = [
    "MIN_FIT_PROBABILITY",
    "Objective",
    "SearchResult",
    "layout_memory",
    "score_layout",
    "search_layouts",
]

Objective = Literal["time", "cost", "memory"]
_VARIANTS = 3
"""Number of variants of one (dp, tp, pp, schedule, micro-batch) that are passed on."""
_TIE = 1e-4
"""Share of the time by which a layout that fills all memory ranks behind one that needs none: of equal
layouts the one with less memory wins."""

_MOST_FORWARDS, _MOST_IN_ALL = 2**17, 1_000_000
"""Forwards in the programs of one layout that is passed on, and of all of them. A million take some ten
seconds; of ready-made jobs the longest have 53 thousand, a hundred of them half a million."""


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    best: tuple[LayoutCandidate, ...]
    """The best layouts that fit, ordered by the objective."""
    score_front: Callable[[], Iterator[LayoutCandidate]]
    """Iterates over `front`, layout by layout: most searches need only the first few."""
    num_layouts: int
    """Number of legal layouts."""
    num_fitting: int
    """Number of legal layouts that fit in memory."""
    with_more_memory: tuple[LayoutCandidate, ...] = ()
    """The best few layouts on the same accelerators with twice the memory, if they were asked for."""

    @cached_property
    def front(self) -> tuple[LayoutCandidate, ...]:
        """The Pareto front of time and memory, from the least memory on, whether a layout fits or not."""
        return tuple(self.score_front())


@dataclass(frozen=True)
class _Scores:
    """Scores of the layouts of a grid: seconds over all its axes, the others over the first four, because
    overlaps need no memory."""

    seconds: Array
    num_bytes: Array
    deviation: Array
    """Standard deviation of the bytes."""
    fits: npt.NDArray[np.bool_]

    def with_capacity(self, capacity: float) -> "_Scores":
        """Return the scores of the same layouts with other memory. Redundant layouts have infinite bytes."""
        fits = _fits(self.num_bytes.ravel(), self.deviation.ravel(), capacity)
        return replace(self, fits=fits.reshape(self.fits.shape))


@dataclass
class _Pool:
    """Rows ``[grid, place in it, key, seconds, bytes, deviation]`` of the candidates for the best layouts."""

    grids: list[LayoutGrid]
    capacity: float
    """Bytes of an accelerator's memory."""
    rows: list[Array] = field(default_factory=list)
    num_forwards: dict[tuple[int, ...], int] = field(default_factory=dict)

    def add(self, number: int, places: npt.NDArray[np.int64], keys: Array, scores: _Scores) -> None:
        grid, in_memory = np.full(len(places), float(number)), places // (keys.size // scores.num_bytes.size)
        memory = (scores.num_bytes.ravel()[in_memory], scores.deviation.ravel()[in_memory])
        columns = (grid, places.astype(float), keys.ravel()[places], scores.seconds.ravel()[places], *memory)
        self.rows.append(np.stack(columns, axis=1))

    def joined(self) -> Array:
        """Return all rows, the best key first."""
        rows = np.concatenate([np.zeros((0, 6)), *self.rows])
        return rows[np.lexsort((rows[:, 4], rows[:, 2]))]

    def candidate(self, row: Array) -> LayoutCandidate:
        grid, index = self._place(row)
        seconds, num_bytes, deviation = row[3:].tolist()
        fits = float(probability_within(self.capacity, num_bytes, deviation))
        return LayoutCandidate(*grid.at(index), seconds, num_bytes, fits)

    def first(self, count: int) -> list[LayoutCandidate]:
        """Return the best layouts that are simulated in a short time; if all take long, the one that takes
        the least."""
        rows, chosen, in_all = self.joined(), list[Array](), 0
        for row in rows:
            own = self._num_forwards(row)
            if own > _MOST_FORWARDS:
                continue
            in_all += own
            if len(chosen) == count or in_all > _MOST_IN_ALL:
                break
            chosen.append(row)
        if not chosen and len(rows):
            chosen = [min(rows, key=self._num_forwards)]
        return [self.candidate(row) for row in chosen]

    def _place(self, row: Array) -> tuple[LayoutGrid, tuple[int, ...]]:
        grid = self.grids[int(row[0])]
        return grid, tuple(int(place) for place in np.unravel_index(int(row[1]), grid.axes))

    def _num_forwards(self, row: Array) -> int:
        """Return the number of forwards that the simulation of a layout executes."""
        grid, index = self._place(row)
        key = int(row[0]), *index[:2], index[6]
        if key not in self.num_forwards:
            layout, overlap = grid.at(index)
            whole = grid.problem.global_batch // (grid.dp * layout.micro_batch)
            layers = cut_layers(grid.problem.model, layout.partition, layout.num_stages)
            self.num_forwards[key] = num_simulated_forwards(
                layout, count_chunks(layout, overlap, layers), whole
            )
        return self.num_forwards[key]


def search_layouts(
    problem: LayoutProblem,
    *,
    count: int = 100,
    objective: Objective = "time",
    num_with_more_memory: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> SearchResult:
    """Search the layouts of a problem. ``num_with_more_memory``: number of the fastest layouts to return for
    twice the memory, which have the same scores. ``progress(done, total)`` is called after each grid."""
    table, every = LayerTable(problem), list(layout_grids(problem))
    capacity = float(problem.cluster.accelerator.memory_bytes)
    best, front, roomy = (_Pool(every, each) for each in (capacity, capacity, 2 * capacity))
    num_fitting = 0
    for number, grid in enumerate(every):
        scores = _without_redundant(grid, _score_grid(grid, table))
        _add_best(best, number, _keys(scores, capacity, objective), scores)
        _add_front(front, number, scores)
        if num_with_more_memory:
            more = scores.with_capacity(roomy.capacity)
            _add_best(roomy, number, _keys(more, roomy.capacity, "time"), more)
        num_fitting += _count(grid, scores.fits)
        if progress:
            progress(number + 1, len(every))
    num_layouts = sum(grid.num_layouts for grid in every)
    score_front = partial(_scored_front, front)
    first, others = tuple(best.first(count)), tuple(roomy.first(num_with_more_memory))
    return SearchResult(first, score_front, num_layouts, num_fitting, others)


def _without_redundant(grid: LayoutGrid, scores: _Scores) -> _Scores:
    """Return the scores of a grid, with redundant layouts excluded from the result."""
    if not grid.redundant.any():
        return scores
    redundant = grid.redundant[None, :, :, None]
    return replace(
        scores,
        seconds=np.where(redundant[..., None, None, None], np.inf, scores.seconds),
        num_bytes=np.where(redundant, np.inf, scores.num_bytes),
        fits=scores.fits & ~redundant,
    )


def _keys(scores: _Scores, capacity: float, objective: Objective) -> Array:
    """Return the keys to minimize. Cost equals time, because the number of accelerators is given."""
    seconds = scores.seconds
    filled = (scores.num_bytes / capacity)[..., None, None, None]
    keys: Array = filled + 1e-9 * seconds if objective == "memory" else seconds * (1 + _TIE * filled)
    return keys


def _num_cells(grid: LayoutGrid) -> int:
    """Return the number of cells. Only the best variant of each cell is passed on; on a single pipeline rank
    the schedules are variants."""
    return len(grid.micro_batches) * (1 if grid.pp == 1 else len(grid.schedules))


def _add_best(pool: _Pool, number: int, keys: Array, scores: _Scores) -> None:
    """Add the best few layouts of each cell of a grid that fit."""
    if not scores.fits.any():
        return
    num_cells = _num_cells(pool.grids[number])
    keys = np.where(scores.fits[..., None, None, None], keys, np.inf)
    cells = keys.reshape(num_cells, -1)
    count = min(_VARIANTS, cells.shape[1])
    chosen = np.argpartition(cells, count - 1, axis=1)[:, :count]
    places = (chosen + np.arange(num_cells)[:, None] * cells.shape[1]).ravel()
    pool.add(number, places[np.isfinite(keys.ravel()[places])], keys, scores)


def _add_front(pool: _Pool, number: int, scores: _Scores) -> None:
    """Add the layouts of a grid that no other one beats in both time and memory, each with its fastest
    overlaps."""
    num_bytes = scores.num_bytes.ravel()
    flat = scores.seconds.reshape(num_bytes.size, -1)
    chosen = flat.argmin(axis=1)
    places = chosen + np.arange(num_bytes.size) * flat.shape[1]
    order = np.lexsort((num_bytes, flat.ravel()[places]))
    pool.add(number, places[order[_falls(num_bytes[order])]], scores.seconds, scores)


def _falls(values: Array) -> npt.NDArray[np.bool_]:
    """Return a mask of the values that are below all earlier ones."""
    before = np.minimum.accumulate(np.concatenate([[np.inf], values[:-1]]))
    return np.asarray(values < before)


def _scored_front(pool: _Pool) -> Iterator[LayoutCandidate]:
    """Yield the layouts that no other one beats in both time and memory, from the least memory on."""
    rows = pool.joined()
    yield from map(pool.candidate, rows[_falls(rows[:, 4])][::-1])


def _count(grid: LayoutGrid, fits: npt.NDArray[np.bool_]) -> int:
    """Count the layouts that fit, with each switch counted only where it changes the program."""
    by_sharding = fits.sum(axis=(0, 1, 3))
    return int((by_sharding * grid.num_switches).sum()) * len(grid.tensors) * len(grid.pipelines)


MIN_FIT_PROBABILITY = 0.9
"""Least probability of fitting in memory for a plan."""
_SURELY, _HARDLY = 0.75, 1.05
"""Shares of the memory: below the first a layout fits, above the second it does not, whatever the
probability."""


def _score_grid(grid: LayoutGrid, table: LayerTable) -> _Scores:
    memory, shape = _grid_memory(grid)
    total, deviation = (np.broadcast_to(one, shape).ravel() for one in (memory.total, memory.deviation))
    fits = _fits(total, deviation, float(grid.problem.cluster.accelerator.memory_bytes))
    seconds = grid_seconds(GridTimes(grid, table))
    return _Scores(seconds, total.reshape(shape), deviation.reshape(shape), fits.reshape(shape))


def _fits(total: Array, deviation: Array, capacity: float) -> npt.NDArray[np.bool_]:
    """Return whether each layout fits in ``capacity`` bytes; flat arrays."""
    fits = total < _SURELY * capacity
    near = np.flatnonzero(~fits & (total < _HARDLY * capacity))
    fits[near] = probability_within(capacity, total[near], deviation[near]) >= MIN_FIT_PROBABILITY
    return fits


def score_layout(
    problem: LayoutProblem, candidate: LayoutCandidate, table: LayerTable | None = None
) -> LayoutCandidate:
    """Return the candidate with its seconds, bytes and probability of fitting."""
    grid, index = _single(problem, candidate)
    seconds = grid_seconds(GridTimes(grid, table or LayerTable(problem)))[index]
    memory = layout_memory(problem, candidate)
    total, capacity = float(memory.total), float(problem.cluster.accelerator.memory_bytes)
    fits = float(probability_within(capacity, total, memory.deviation))
    return replace(candidate, seconds=float(seconds), memory_bytes=total, fit_probability=fits)


def layout_memory(problem: LayoutProblem, candidate: LayoutCandidate) -> PeakMemory:
    """Return the memory of the fullest accelerator."""
    grid, index = _single(problem, candidate)
    memory, shape = _grid_memory(grid)
    parts = (np.broadcast_to(getattr(memory, part.name), shape)[index[:4]] for part in fields(PeakMemory))
    return PeakMemory(*map(float, parts))


def _single(problem: LayoutProblem, candidate: LayoutCandidate) -> tuple[LayoutGrid, tuple[int, ...]]:
    """Return a grid with one micro-batch and schedule, and the index of the layout in it."""
    layout, overlap = candidate.layout, candidate.overlap
    schedule = (layout.schedule_name, layout.virtual_stages)
    shard = Sharding(layout.zero, layout.reduce, layout.shard_group)
    again = layout.recompute
    problem = replace(
        problem,
        partition=layout.partition,
        shards=(shard,),
        searches_groups=False,
        recomputes=(again,),
        fixed={
            **problem.fixed,
            "expert_load": layout.expert_load,
            "expert_dispatch": layout.expert_dispatch,
        },
    )
    degrees, sizes = (layout.tp, layout.pp, layout.dp), (layout.micro_batch,)
    experts = layout.ep, layout.etp
    grid = LayoutGrid(problem, *degrees, sizes, (schedule,), *experts, layout.cp, layout.ulysses)
    switches = (overlap.data, overlap.optimizer and overlap.data)
    index = (
        0,
        0,
        0,
        0,
        grid.tensors.index(overlap.tensor) if layout.tp > 1 else 0,
        grid.pipelines.index(overlap.pipeline) if layout.pp > 1 else 0,
        grid.switches.index(switches) if layout.num_holders > 1 else 0,
    )
    return grid, index


def _grid_memory(grid: LayoutGrid) -> tuple[PeakMemory, tuple[int, ...]]:
    """Return the memory of each ``[micro-batch, schedule, shards, recompute]``, in arrays that broadcast to
    that shape, and the shape."""
    problem, shape = grid.problem, grid.axes[:4]
    names = [name for name, _ in grid.schedules]
    size = _along(0, grid.micro_batches)
    memory = worst_stage_memory(
        rank_model(problem.model, grid.cp),
        problem.profile,
        dp=float(grid.num_holders),
        tp=float(grid.tp),
        pp=float(grid.pp),
        virtual_stages=_along(1, [stages for _, stages in grid.schedules]),
        micro_batch=size,
        num_micro_batches=problem.global_batch / grid.dp / size,
        zero=_along(2, [one.zero for one in grid.shards]),
        reduce_each=_along(2, [one.reduce == "each" for one in grid.shards]),
        shard_group=_along(2, [one.shard_group or 0.0 for one in grid.shards]),
        recompute=_along(3, [RECOMPUTE.index(name) for name in problem.recomputes]),
        eager=_along(1, [name.startswith("eager") for name in names]),
        zero_bubble=_along(1, ["zero-bubble" in name for name in names]),
        dual_pipe=_along(1, [name == "dualpipe-v" for name in names]),
        gpipe=_along(1, [name == "gpipe" for name in names]),
        levels=_along(2, [_num_levels(grid, one) for one in grid.shards]),
        optimizer=problem.optimizer,
        averages=problem.ema_every > 0,
        trains_alone=problem.comm.sync_every > 1,
        generates=problem.generates,
        value_bytes=problem.value_bytes,
        on_cpu=problem.cluster.on_cpu,
        ep=grid.ep,
        etp=grid.etp,
        expert_load=grid.problem.expert_load(grid.ep),
        context=(grid.cp // grid.ulysses, grid.ulysses),
    )
    return memory, shape


def _num_levels(grid: LayoutGrid, shard: Sharding) -> int:
    problem, degrees = grid.problem, (grid.dp, grid.tp, grid.pp, grid.cp)
    return _num_levels_of(problem.comm, problem.cluster.accelerators_per_node, degrees, shard)


@lru_cache(maxsize=2**14)
def _num_levels_of(
    comm: CommConfig, node_size: int, degrees: tuple[int, int, int, int], shard: Sharding
) -> int:
    dp, tp, pp, cp = degrees
    shards = {"zero": shard.zero, "shard_group": shard.shard_group}
    return count_shard_levels(comm, Layout(dp=dp, tp=tp, pp=pp, cp=cp, **shards), node_size)


def _along(axis: int, values: Sequence[float]) -> Array:
    """Return values along one of the four axes of memory."""
    shape = [1, 1, 1, 1]
    shape[axis] = len(values)
    return np.array(values, dtype=float).reshape(shape)
