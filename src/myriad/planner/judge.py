"""Bytes and closed-form seconds of all layouts of a plot, or of one layout: the only place that asks
`memory`."""

from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import numpy.typing as npt

from myriad.planner.closed_form import plot_seconds
from myriad.planner.memory import Memory, fits_probability, worst_stage_memory
from myriad.planner.space import RECOMPUTES, Candidate, Plot, Problem
from myriad.planner.stage_times import Array, LayerTable, PlotTimes

__all__ = ["FITS", "judge", "judge_plot", "layout_memory"]

FITS = 0.9
"""Probability of fitting that a plan needs."""
_DEVIATIONS = 1.2816
"""Standard deviations below which 0.9 of a normal distribution lies."""


def judge_plot(plot: Plot, table: LayerTable) -> tuple[Array, Array, npt.NDArray[np.bool_]]:
    """Seconds over the plot's axes; bytes, and what fits, over the first four (overlaps hold nothing)."""
    memory, shape = _plot_memory(plot)
    count = int(np.prod(shape))
    total = np.broadcast_to(memory.total, count)
    fits = total + _DEVIATIONS * memory.deviation <= plot.problem.cluster.accelerator.memory_bytes
    return plot_seconds(PlotTimes(plot, table)), total.reshape(shape), fits.reshape(shape)


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
    place, count = np.ravel_multi_index(index[:4], shape), int(np.prod(shape))
    parts = (np.broadcast_to(getattr(memory, one.name), count)[place] for one in fields(Memory))
    return Memory(*(float(part) for part in parts))


def _single(problem: Problem, candidate: Candidate) -> tuple[Plot, tuple[int, ...]]:
    """A plot with one micro-batch and schedule, and where in it the layout is."""
    layout, overlap = candidate.layout, candidate.choice.overlap
    schedule = (layout.schedule_name, layout.virtual_stages)
    shard = (layout.zero, layout.reduce)
    problem = replace(problem, partition=layout.partition, shards=(shard,))
    plot = Plot(problem, layout.tp, layout.pp, layout.dp, (layout.micro_batch,), (schedule,))
    switches = (overlap.data, overlap.optimizer and overlap.data)
    index = (
        0,
        0,
        0,
        RECOMPUTES.index(candidate.choice.recompute),
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
    flood = _those(names, lambda name: name == "gpipe")[schedule]
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
        virtual_stages=np.where(flood, 1.0, stages[schedule]),
        micro_batch=size,
        num_micro_batches=num,
        zero=np.array([zero for zero, _ in plot.shards])[shard],
        reduce_each=np.array([reduce == "each" for _, reduce in plot.shards])[shard],
        recompute=again,
        eager=_those(names, lambda name: name.startswith("eager"))[schedule],
        zero_bubble=_those(names, lambda name: "zero-bubble" in name)[schedule],
        value_bytes=problem.value_bytes,
    )
    held = np.where(flood, num / np.minimum(num, plot.pp), 1.0)  # gpipe holds all micro-batches
    return replace(memory, activations=memory.activations * held), shape


def _those(names: list[str], rule: Callable[[str], bool]) -> npt.NDArray[np.bool_]:
    return np.array([rule(name) for name in names])
