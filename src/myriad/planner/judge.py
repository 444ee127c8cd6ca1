"""Bytes and closed-form seconds of all layouts of a plot, or of one layout: the only place that asks
`memory`."""

from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import numpy.typing as npt

from myriad.planner.activations import RECOMPUTE
from myriad.planner.closed_form import plot_seconds
from myriad.planner.memory import Memory, fits_probability, worst_stage_memory
from myriad.planner.space import Candidate, Plot, Problem
from myriad.planner.stage_times import Array, LayerTable, PlotTimes

__all__ = ["FITS", "judge", "judge_plot", "layout_memory"]

FITS = 0.9
"""Probability of fitting that a plan needs."""
_SURELY, _HARDLY = 0.75, 1.05
"""Shares of the memory below which a layout fits, and above which it does not, whatever the probability."""


def judge_plot(plot: Plot, table: LayerTable) -> tuple[Array, Array, npt.NDArray[np.bool_]]:
    """Seconds over the plot's axes; bytes, and what fits, over the first four (overlaps hold nothing)."""
    memory, shape = _plot_memory(plot)
    memory = _each(memory, np.arange(int(np.prod(shape))), shape)
    total = np.asarray(memory.total)
    capacity = float(plot.problem.cluster.accelerator.memory_bytes)
    fits = total < _SURELY * capacity
    near = np.flatnonzero(~fits & (total < _HARDLY * capacity))
    fits[near] = np.asarray(fits_probability(_each(memory, near, shape), capacity)) >= FITS
    return plot_seconds(PlotTimes(plot, table)), total.reshape(shape), fits.reshape(shape)


def _each(memory: Memory, places: npt.NDArray[np.intp], shape: tuple[int, ...]) -> Memory:
    """Of some layouts."""
    count = int(np.prod(shape))
    parts = (np.broadcast_to(getattr(memory, one.name), count)[places] for one in fields(Memory))
    return Memory(*parts)


def judge(problem: Problem, candidate: Candidate, table: LayerTable | None = None) -> Candidate:
    """The same layout with its seconds, bytes and probability of fitting."""
    plot, index = _single(problem, candidate)
    seconds = plot_seconds(PlotTimes(plot, table or LayerTable(problem)))[index]
    memory = layout_memory(problem, candidate)
    fits = float(fits_probability(memory, float(problem.cluster.accelerator.memory_bytes)))
    return replace(candidate, seconds=float(seconds), memory_bytes=float(memory.total), fits=fits)


def layout_memory(problem: Problem, candidate: Candidate) -> Memory:
    """Of the fullest accelerator."""
    plot, index = _single(problem, candidate)
    memory, shape = _plot_memory(plot)
    one = _each(memory, np.array([np.ravel_multi_index(index[:4], shape)]), shape)
    return Memory(*(float(np.asarray(getattr(one, part.name))[0]) for part in fields(Memory)))


def _single(problem: Problem, candidate: Candidate) -> tuple[Plot, tuple[int, ...]]:
    """A plot with one micro-batch and schedule, and where in it the layout is."""
    layout, overlap = candidate.layout, candidate.overlap
    schedule = (layout.schedule_name, layout.virtual_stages)
    shard = (layout.zero, layout.reduce)
    again = layout.recompute
    problem = replace(problem, partition=layout.partition, shards=(shard,), recomputes=(again,))
    plot = Plot(problem, layout.tp, layout.pp, layout.dp, (layout.micro_batch,), (schedule,))
    switches = (overlap.data, overlap.optimizer and overlap.data)
    index = (
        0,
        0,
        0,
        0,
        plot.tensors.index(overlap.tensor) if layout.tp > 1 else 0,
        plot.pipelines.index(overlap.pipeline) if layout.pp > 1 else 0,
        plot.switches.index(switches) if layout.dp > 1 else 0,
    )
    return plot, index


def _plot_memory(plot: Plot) -> tuple[Memory, tuple[int, ...]]:
    """Of each ``[micro-batch, schedule, shards, recompute]``, flat, and that shape."""
    problem, shape = plot.problem, plot.axes[:4]
    batch, schedule, shard, again = (axis.ravel() for axis in np.indices(shape))
    names = [name for name, _ in plot.schedules]
    size = np.array(plot.micro_batches, dtype=float)[batch]
    num = problem.global_batch / plot.dp / size
    stages = np.array([float(v) for _, v in plot.schedules])
    one = np.ones(len(batch))
    memory = worst_stage_memory(
        problem.model,
        problem.practice,
        dp=plot.dp * one,
        tp=plot.tp * one,
        pp=plot.pp * one,
        virtual_stages=stages[schedule],
        micro_batch=size,
        num_micro_batches=num,
        zero=np.array([zero for zero, _ in plot.shards])[shard],
        reduce_each=np.array([reduce == "each" for _, reduce in plot.shards])[shard],
        recompute=np.array([RECOMPUTE.index(name) for name in problem.recomputes])[again],
        eager=_those(names, lambda name: name.startswith("eager"))[schedule],
        zero_bubble=_those(names, lambda name: "zero-bubble" in name)[schedule],
        gpipe=_those(names, lambda name: name == "gpipe")[schedule],
        value_bytes=problem.value_bytes,
        on_cpu=problem.cluster.on_cpu,
    )
    return memory, shape


def _those(names: list[str], rule: Callable[[str], bool]) -> npt.NDArray[np.bool_]:
    return np.array([rule(name) for name in names])
