"""Bytes and closed-form seconds of all layouts of a grid, or of one layout. Only this module uses
`closed_form_memory` in the search."""

from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import numpy.typing as npt

from myriad.comm.hierarchy import count_levels
from myriad.planner.memory.closed_form_memory import PeakMemory, fits_probability, worst_stage_memory
from myriad.planner.memory.layer_memory import RECOMPUTE
from myriad.planner.search.closed_form_times import grid_seconds
from myriad.planner.search.layout_space import LayoutCandidate, LayoutGrid, LayoutProblem
from myriad.planner.search.stage_times import Array, GridTimes, LayerTable

__all__ = ["MIN_FIT_PROBABILITY", "layout_memory", "score_grid", "score_layout"]

MIN_FIT_PROBABILITY = 0.9
"""Least probability of fitting in memory for a plan."""
_SURELY, _HARDLY = 0.75, 1.05
"""Shares of the memory: below the first a layout fits, above the second it does not, whatever the
probability."""


def score_grid(grid: LayoutGrid, table: LayerTable) -> tuple[Array, Array, npt.NDArray[np.bool_]]:
    """Return the seconds over the grid's axes; and, over the first four axes, the bytes and whether the
    layout fits (overlaps need no memory)."""
    memory, shape = _grid_memory(grid)
    memory = _each(memory, np.arange(int(np.prod(shape))), shape)
    total = np.asarray(memory.total)
    capacity = float(grid.problem.cluster.accelerator.memory_bytes)
    fits = total < _SURELY * capacity
    near = np.flatnonzero(~fits & (total < _HARDLY * capacity))
    fits[near] = np.asarray(fits_probability(_each(memory, near, shape), capacity)) >= MIN_FIT_PROBABILITY
    return grid_seconds(GridTimes(grid, table)), total.reshape(shape), fits.reshape(shape)


def _each(memory: PeakMemory, places: npt.NDArray[np.intp], shape: tuple[int, ...]) -> PeakMemory:
    """Return the memory of some layouts."""
    count = int(np.prod(shape))
    parts = (np.broadcast_to(getattr(memory, one.name), count)[places] for one in fields(PeakMemory))
    return PeakMemory(*parts)


def score_layout(
    problem: LayoutProblem, candidate: LayoutCandidate, table: LayerTable | None = None
) -> LayoutCandidate:
    """Return the candidate with its seconds, bytes and probability of fitting."""
    grid, index = _single(problem, candidate)
    seconds = grid_seconds(GridTimes(grid, table or LayerTable(problem)))[index]
    memory = layout_memory(problem, candidate)
    fits = float(fits_probability(memory, float(problem.cluster.accelerator.memory_bytes)))
    return replace(candidate, seconds=float(seconds), memory_bytes=float(memory.total), fit_probability=fits)


def layout_memory(problem: LayoutProblem, candidate: LayoutCandidate) -> PeakMemory:
    """Return the memory of the fullest accelerator."""
    grid, index = _single(problem, candidate)
    memory, shape = _grid_memory(grid)
    one = _each(memory, np.array([np.ravel_multi_index(index[:4], shape)]), shape)
    return PeakMemory(*(float(np.asarray(getattr(one, part.name))[0]) for part in fields(PeakMemory)))


def _single(problem: LayoutProblem, candidate: LayoutCandidate) -> tuple[LayoutGrid, tuple[int, ...]]:
    """Return a grid with one micro-batch and schedule, and the index of the layout in it."""
    layout, overlap = candidate.layout, candidate.overlap
    schedule = (layout.schedule_name, layout.virtual_stages)
    shard = (layout.zero, layout.reduce)
    again = layout.recompute
    problem = replace(problem, partition=layout.partition, shards=(shard,), recomputes=(again,))
    grid = LayoutGrid(problem, layout.tp, layout.pp, layout.dp, (layout.micro_batch,), (schedule,))
    switches = (overlap.data, overlap.optimizer and overlap.data)
    index = (
        0,
        0,
        0,
        0,
        grid.tensors.index(overlap.tensor) if layout.tp > 1 else 0,
        grid.pipelines.index(overlap.pipeline) if layout.pp > 1 else 0,
        grid.switches.index(switches) if layout.dp > 1 else 0,
    )
    return grid, index


def _grid_memory(grid: LayoutGrid) -> tuple[PeakMemory, tuple[int, ...]]:
    """Return the memory of each ``[micro-batch, schedule, shards, recompute]``, flat, and that shape."""
    problem, shape = grid.problem, grid.axes[:4]
    batch, schedule, shard, again = (axis.ravel() for axis in np.indices(shape))
    names = [name for name, _ in grid.schedules]
    size = np.array(grid.micro_batches, dtype=float)[batch]
    num = problem.global_batch / grid.dp / size
    stages = np.array([float(v) for _, v in grid.schedules])
    one = np.ones(len(batch))
    memory = worst_stage_memory(
        problem.model,
        problem.profile,
        dp=grid.dp * one,
        tp=grid.tp * one,
        pp=grid.pp * one,
        virtual_stages=stages[schedule],
        micro_batch=size,
        num_micro_batches=num,
        zero=np.array([zero for zero, _ in grid.shards])[shard],
        reduce_each=np.array([reduce == "each" for _, reduce in grid.shards])[shard],
        recompute=np.array([RECOMPUTE.index(name) for name in problem.recomputes])[again],
        eager=_those(names, lambda name: name.startswith("eager"))[schedule],
        zero_bubble=_those(names, lambda name: "zero-bubble" in name)[schedule],
        gpipe=_those(names, lambda name: name == "gpipe")[schedule],
        levels=count_levels(problem.comm, grid.dp, grid.tp * grid.pp, problem.cluster.accelerators_per_node),
        lamb=problem.optimizer == "lamb",
        value_bytes=problem.value_bytes,
        on_cpu=problem.cluster.on_cpu,
    )
    return memory, shape


def _those(names: list[str], rule: Callable[[str], bool]) -> npt.NDArray[np.bool_]:
    return np.array([rule(name) for name in names])
