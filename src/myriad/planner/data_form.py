"""Seconds that data parallelism and the optimizer add to an iteration, for every layout of a plot.

    g, r   a chunk's gather and reduction;   f, b   its forward and backward;   n   chunks of a rank

    data off   each where it is needed: n g + n r; with ZeRO 3 a gather for each run of computes of a stage,
               with reduce = each a reduction for each micro-batch
    data on    the first gather and the last reduction, and what is longer than the compute they travel
               behind: the other chunks of a stage, and with more stages those of a round of micro-batches
    optimizer  gathers of ZeRO 1 and 2 begin behind the update of the iteration before

What is hidden slows the compute it hides behind (`busy_ratio` of its link).
"""

from dataclasses import replace

import numpy as np

from myriad.planner.collectives import group_along, sum_seconds
from myriad.planner.costs import optimizer_bytes
from myriad.planner.data_sums import DataSums
from myriad.planner.operators import sweep_seconds
from myriad.planner.space import Plot, Shards
from myriad.planner.stage_times import Array, PlotTimes
from myriad.program.build import count_chunks

__all__ = ["data_seconds"]


def data_seconds(times: PlotTimes) -> Array:
    """``[micro-batch, schedule, shards, switches]``."""
    plot = times.plot
    sums = DataSums(plot.problem.cluster, plot.problem.comm, plot.dp, plot.tp * plot.pp)
    forms = [
        [_Form(times, sums, (zero, each), data).seconds(optimizer) for data, optimizer in plot.switches]
        for zero, each in plot.shards
    ]
    shape = (len(plot.micro_batches), len(plot.schedules))
    wide = [[np.broadcast_to(form, shape) for form in row] for row in forms]
    found: Array = np.array(wide).transpose(2, 3, 0, 1) + _tied_seconds(plot)
    return found


class _Form:
    """Of one way to shard, with overlap.data on or off; arrays are ``[micro-batch, schedule]``."""

    def __init__(self, times: PlotTimes, sums: DataSums, shards: Shards, data: bool) -> None:
        plot, problem = times.plot, times.plot.problem
        self.times, self.plot, self.sums = times, plot, sums
        self.zero, self.each = shards[0], shards[1] == "each"
        self.data = data and plot.dp > 1
        self.v = np.array([float(stages) for _, stages in plot.schedules])
        self.m = (problem.global_batch / plot.dp / np.array(plot.micro_batches, dtype=float))[:, None]
        self.chunks = self._num_chunks()
        self.n = self.v * self.chunks
        held = np.array([cut.parameters for cut in times.cuts])[times.cut_of] / plot.tp
        self.own = held / (plot.dp if self.zero else 1)
        self.gather, self.reduce = self._collectives(held / self.n)
        forward, inputs, weights, _ = times.mean
        self.forward = forward[:, :1] / self.n
        self.backward = (inputs + weights)[:, :1] / self.n

    def _num_chunks(self) -> Array:
        layout, overlap = self.plot.at((0,) * 7)
        overlap = overlap.model_copy(update={"data": self.data})
        counts = [count_chunks(layout, overlap, [range(cut.fewest_layers)]) for cut in self.times.cuts]
        return np.array(counts, dtype=float)[self.times.cut_of]

    def _collectives(self, parameters: Array) -> tuple[Array, Array]:
        problem, sums = self.plot.problem, self.sums
        gradients = parameters * problem.practice.gradient_bytes
        if not self.zero:
            return np.zeros_like(parameters), np.asarray(sums.whole_seconds(gradients))
        whole = np.asarray(sums.half_seconds(parameters * problem.value_bytes))
        return whole, np.asarray(sums.half_seconds(gradients))

    def seconds(self, optimizer: bool) -> Array:
        """Exposed, slowed, updated."""
        update = self._update()
        if self.plot.dp == 1:
            return np.broadcast_to(update, (len(self.m), len(self.v)))
        gathers = self._runs() * self.chunks * self.gather
        reduces = (self.m if self.each else 1.0) * self.n * self.reduce
        if not self.data:
            found: Array = gathers + reduces + update
            return found
        shown = self._shown_gathers()
        if optimizer and self.zero in (1, 2):
            shown = np.maximum(0.0, shown - update * (1 - 1 / self.n))
        shown = np.minimum(shown, gathers) + np.minimum(self._shown_reduces(), reduces)
        slowed: Array = shown + self.sums.ring.busy_ratio * (gathers + reduces - shown) + update
        return slowed

    def _runs(self) -> Array:
        """Gathers of a stage, summed over a rank's stages."""
        if self.zero != 3:
            return np.broadcast_to(self.v, np.broadcast_shapes(self.m.shape, self.v.shape))
        p, m, v = self.plot.pp, self.m, self.v
        size = m / np.maximum(1, m // p)
        warm = np.minimum(m * v, 2 * (p - 1) + (v - 1) * size)
        forms = {
            "gpipe": 2 * v - 1 + 0 * m,
            "interleaved": 2 * (m * v - warm) + 2 * warm / size,
            "zero-bubble-v": 4 * m + 0 * v,
        }
        one = np.ones(np.broadcast_shapes(m.shape, v.shape))
        columns = [forms.get(name, one)[:, i] for i, (name, _) in enumerate(self.plot.schedules)]
        return np.stack(columns, axis=1)

    def _shown_gathers(self) -> Array:
        g, f, k = self.gather, self.forward, self.chunks
        once = np.maximum(g, k * g - (k - 1) * f)
        later = (self.v - 1) * np.minimum(self.m, self.plot.pp) * k * f
        once = np.maximum(once, self.n * g - later - (k - 1) * f)
        if self.zero != 3:
            return once
        again = g + self._runs() * k * np.maximum(0.0, g - f)
        return np.where(self.v > 1, again, once)

    def _shown_reduces(self) -> Array:
        r, b, k = self.reduce, self.backward, self.chunks
        if self.each:
            shown: Array = r + self.m * self.n * np.maximum(0.0, r - b)
            return shown
        later = (self.v - 1) * np.minimum(self.m, self.plot.pp) * k * b
        last = np.maximum(r, k * r - (k - 1) * b)
        return np.maximum(last, self.n * r - later - (k - 1) * b)

    def _update(self) -> Array:
        """Norm, optimizer, and the batch if it is waited for."""
        problem, own = self.plot.problem, self.own
        accelerator = problem.cluster.accelerator
        step = sweep_seconds(accelerator, own * optimizer_bytes(problem.optimizer, problem.value_bytes), 2.0)
        norm = sweep_seconds(accelerator, 4 * own, 2.0)
        everybody = group_along(problem.cluster, float(problem.cluster.world), 1.0)
        return np.asarray(step + norm + sum_seconds(everybody, 8.0) + problem.practice.host_seconds)


def _tied_seconds(plot: Plot) -> float:
    model, problem = plot.problem.model, plot.problem
    if not model.tied or plot.pp == 1:
        return 0.0
    along = group_along(problem.cluster, float(plot.pp), float(plot.tp))
    rows = model.padded_vocabulary() * model.hidden / plot.tp
    return float(sum_seconds(replace(along, size=2.0), rows * problem.practice.gradient_bytes))
