"""Data-parallel part of the closed form (`closed_form_times`): gathers and reductions, and the optimizer.

    g, r   a chunk's gather and reduction;   f, b   its forward and backward;   n   chunks of a rank

    data off   each collective where it is needed: n g + n r; with ZeRO 3 a gather for each run of computes of
               a stage, with reduce = each a reduction for each micro-batch
    data on    the first gather and the last reduction, and the excess over the compute that they overlap
               with: the other chunks of a stage, and with more stages those of a round of micro-batches
    optimizer  gathers of ZeRO 1 and 2 begin behind the update of the iteration before

Overlapped communication slows the compute that it overlaps with (`busy_ratio` of its link).
"""

from collections import Counter
from dataclasses import replace
from functools import cached_property

import numpy as np

from myriad.comm.layout import Layout
from myriad.model.matrix_shapes import hidden_matrices
from myriad.planner.cost.collective_costs import (
    DpCollectives,
    all_reduce_seconds,
    copied_sum_seconds,
    group_along,
    shard_group_comm,
)
from myriad.planner.cost.expert_ranks import holders
from myriad.planner.cost.matrix_costs import newton_schulz_seconds
from myriad.planner.cost.operator_costs import sweep_seconds
from myriad.planner.cost.stage_layers import first_alike
from myriad.planner.search.layout_problem import Sharding
from myriad.planner.search.layout_space import LayoutGrid
from myriad.planner.search.stage_times import Array, GridTimes
from myriad.program.build import count_chunks

__all__ = ["dp_seconds", "num_expert_shards", "num_shards"]


def dp_seconds(times: GridTimes) -> Array:
    """Return the seconds of data parallelism and the optimizer, ``[micro-batch, schedule, shards,
    switches]``."""
    grid = times.grid
    groups = {size: _group_collectives(grid, size) for _, _, size in grid.shards}
    of_experts = {size: _expert_collectives(grid, size) for size in groups}
    step = _StepForm(times)
    forms = []
    for shard in grid.shards:
        own = groups[shard.shard_group], of_experts[shard.shard_group]
        by_data = {data: _DpForm(times, step, *own, shard, data) for data, _ in grid.switches}
        forms.append([by_data[data].seconds(optimizer) for data, optimizer in grid.switches])
    shape = (len(grid.micro_batches), len(grid.schedules))
    wide = [[np.broadcast_to(form, shape) for form in row] for row in forms]
    found: Array = np.array(wide).transpose(2, 3, 0, 1) + _tied_seconds(grid)
    return found


def num_shards(grid: LayoutGrid, shard: Sharding) -> int:
    """Return the number of ranks that share the state of one parameter."""
    return (shard.shard_group or grid.num_holders) if shard.zero else 1


def num_expert_shards(grid: LayoutGrid, shard: Sharding) -> int:
    """Return the number of ranks that share the state of one expert's parameter."""
    return grid.experts.num_replicas * num_shards(grid, shard) // grid.num_holders if shard.zero else 1


_Groups = tuple[DpCollectives, DpCollectives | None]
"""Collectives inside the groups that share the state, and across such groups, if there are several."""


def _expert_collectives(grid: LayoutGrid, size: int | None) -> DpCollectives | None:
    """Return the collectives of the ranks of a group of ``size`` replicas that hold the same experts;
    ``None``: all replicas do."""
    if not grid.experts.folds:
        return None
    num_groups = grid.num_holders // (size or grid.num_holders)
    return DpCollectives(grid.problem.cluster, grid.problem.comm, *grid.experts.alike(num_groups))


def _group_collectives(grid: LayoutGrid, size: int | None) -> _Groups:
    """Return the collectives of groups of ``size`` replicas that share state; ``None``: all replicas."""
    problem, every = grid.problem, grid.num_holders
    layout, stride = Layout(dp=grid.dp, tp=grid.tp, pp=grid.pp, cp=grid.cp), grid.tp * grid.pp * grid.cp
    if size is None or size == every:
        return DpCollectives(problem.cluster, problem.comm, *holders(layout, stride, every)), None
    comm = shard_group_comm(problem.comm, layout.model_copy(update={"zero": 1, "shard_group": size}))
    inside = DpCollectives(problem.cluster, comm, *holders(layout, stride, size))
    across = holders(layout, stride, every // size, every=size)
    return inside, DpCollectives(problem.cluster, comm, *across)


class _StepForm:
    """What the forms of a grid share: chunks of a stage, and by the shards of the state the seconds of the
    gradient norm, the optimizer and the wait for the batch."""

    def __init__(self, times: GridTimes) -> None:
        grid, problem = times.grid, times.grid.problem
        self.times, self.grid = times, grid
        everybody = group_along(problem.cluster, float(problem.cluster.world), 1.0)
        self.norm_sum = all_reduce_seconds(everybody, 8.0)
        self.orthogonalization = self._orthogonalization()
        self.layout, self.overlap = grid.at((0,) * 7)
        self._found: dict[tuple[int, int], tuple[Array, Array]] = {}
        self._chunks: dict[bool, Array] = {}

    def num_chunks(self, data: bool) -> Array:
        """Return the number of chunks of a stage, by schedule. ``data``: whether overlap.data is on."""
        if data not in self._chunks:
            overlap = self.overlap.model_copy(update={"data": data})
            layers = ([range(cut.fewest_layers)] for cut in self.times.cuts)
            counts = [count_chunks(self.layout, overlap, own) for own in layers]
            self._chunks[data] = np.array(counts, dtype=float)[self.times.cut_of]
        return self._chunks[data]

    def of(self, shard: Sharding) -> tuple[Array, Array]:
        """Return the parameters that a rank updates, and the seconds, by schedule."""
        key = num_shards(self.grid, shard), num_expert_shards(self.grid, shard)
        if key not in self._found:
            others, experts = self.times.held
            own = others / key[0] + experts / key[1]
            self._found[key] = own, self._update(own, key[0])
        return self._found[key]

    def _update(self, own: Array, shards: int) -> Array:
        """Return the seconds of the update of ``own`` parameters, with the gradient norm, the wait for the
        batch and orthogonalization. ``shards``: ranks that share the state of a parameter."""
        problem, grid = self.grid.problem, self.grid
        accelerator = problem.cluster.accelerator
        each = problem.profile.update_bytes(problem.optimizer, problem.value_bytes, problem.ema_every)
        step = sweep_seconds(accelerator, own * each, 2.0)
        norm = sweep_seconds(accelerator, 4 * own, 2.0)
        copied = copied_sum_seconds(problem.model, problem.cluster, grid.tp, grid.pp, shards)
        norm = norm + self.norm_sum + copied
        return np.asarray(step + norm + problem.profile.host_seconds + self.orthogonalization)

    def _orthogonalization(self) -> float:
        """Return the seconds of Newton-Schulz iterations, shared equally by data- and tensor-parallel
        ranks."""
        problem, grid = self.grid.problem, self.grid
        if problem.optimizer != "muon":
            return 0.0
        iterations, value_bytes = problem.newton_schulz.iterations, problem.newton_schulz.value_bytes
        accelerator, value_bytes = problem.cluster.accelerator, value_bytes or problem.value_bytes

        def seconds(block: int) -> float:
            matrices = hidden_matrices(problem.model, 1 + block)
            every = ((one.rows, one.columns, iterations, value_bytes) for one in matrices)
            return sum(newton_schulz_seconds(accelerator, *one) for one in every)

        blocks = Counter(first_alike(problem.model))
        total = sum(seconds(block) * number for block, number in blocks.items())
        return total / grid.pp / (grid.num_holders * grid.tp)


class _DpForm:
    """Data-parallel seconds of one sharding, with overlap.data on or off; arrays are ``[micro-batch,
    schedule]``."""

    def __init__(
        self,
        times: GridTimes,
        step: _StepForm,
        groups: _Groups,
        of_experts: DpCollectives | None,
        shard: Sharding,
        data: bool,
    ) -> None:
        grid, problem = times.grid, times.grid.problem
        self.times, self.grid = times, grid
        self.inside, self.between = groups
        self.zero, self.each = shard.zero, shard.reduce == "each"
        self.data = data and grid.num_holders > 1
        self.v = np.array([float(stages) for _, stages in grid.schedules])
        self.m = (problem.global_batch / grid.dp / np.array(grid.micro_batches, dtype=float))[:, None]
        self.chunks = step.num_chunks(self.data)
        self.n = self.v * self.chunks
        others, experts = times.held
        self.own, self.update = step.of(shard)
        self.gather, self.reduce = self._chunk_seconds(self.inside, others / self.n)
        if of_experts is not None and np.any(experts):
            gather, reduce = self._chunk_seconds(of_experts, experts / self.n)
            self.gather, self.reduce = self.gather + gather, self.reduce + reduce
        self.across = self._across_seconds(self.own / self.n)
        forward, inputs, weights, _ = times.mean
        self.forward = forward[:, :1] / self.n
        self.backward = (inputs + weights)[:, :1] / self.n

    def _chunk_seconds(self, collectives: DpCollectives, parameters: Array) -> tuple[Array, Array]:
        """Return the seconds to gather a chunk of so many parameters, and to reduce its gradients."""
        problem = self.grid.problem
        gradients = parameters * problem.profile.gradient_bytes
        if not self.zero:
            return np.zeros_like(parameters), np.asarray(collectives.all_reduce_seconds(gradients))
        gather = np.asarray(collectives.all_gather_seconds(parameters * problem.value_bytes))
        return gather, np.asarray(collectives.all_gather_seconds(gradients))

    def _across_seconds(self, own: Array) -> Array | None:
        """Return the seconds of a chunk's sum across groups, of so many parameters of this rank's shards;
        ``None``: there is one group."""
        if self.between is None:
            return None
        return np.asarray(self.between.all_reduce_seconds(own * self.grid.problem.profile.gradient_bytes))

    def seconds(self, optimizer: bool) -> Array:
        """Return the sum of the exposed seconds, the slowdown of compute and the update."""
        update = self.update
        if self.grid.num_holders == 1 and self.grid.experts.etp_groups == 1:
            return np.broadcast_to(update, (len(self.m), len(self.v)))
        gathers = self._runs * self.chunks * self.gather
        reduces = (self.m if self.each else 1.0) * self.n * self.reduce
        if not self.data:
            found: Array = gathers + reduces + update
            return found if self.across is None else found + self.n * self.across
        shown = self._shown_gathers()
        if optimizer and self.zero in (1, 2):
            shown = np.maximum(0.0, shown - update * (1 - 1 / self.n))
        shown = np.minimum(shown, gathers) + np.minimum(self._shown_reduces(), reduces)
        slowed: Array = shown + self.inside.ring.busy_ratio * (gathers + reduces - shown) + update
        return slowed if self.across is None else slowed + self._slowed_across(self.across)

    def _slowed_across(self, across: Array) -> Array:
        """Return the exposed seconds of the sums across groups, and the slowdown of compute by the rest."""
        assert self.between is not None
        shown = self._shown_once(across)
        slowed: Array = shown + self.between.ring.busy_ratio * np.maximum(0.0, self.n * across - shown)
        return slowed

    @cached_property
    def _runs(self) -> Array:
        """Return the number of gathers of a stage, summed over a rank's stages."""
        if self.zero != 3:
            return np.broadcast_to(self.v, np.broadcast_shapes(self.m.shape, self.v.shape))
        p, m, v = self.grid.pp, self.m, self.v
        size = m / np.maximum(1, m // p)
        warm = np.minimum(m * v, 2 * (p - 1) + (v - 1) * size)
        forms = {
            "gpipe": 2 * v - 1 + 0 * m,
            "interleaved": 2 * (m * v - warm) + 2 * warm / size,
            "zero-bubble-v": 4 * m + 0 * v,
            "dualpipe-v": 2 * m + 5 * p + 0 * v,
        }
        one = np.ones(np.broadcast_shapes(m.shape, v.shape))
        columns = [forms.get(name, one)[:, i] for i, (name, _) in enumerate(self.grid.schedules)]
        return np.stack(columns, axis=1)

    def _shown_gathers(self) -> Array:
        """Return the exposed seconds of the gathers of an iteration, with overlap."""
        g, f, k = self.gather, self.forward, self.chunks
        once = np.maximum(g, k * g - (k - 1) * f)
        later = (self.v - 1) * np.minimum(self.m, self.grid.pp) * k * f
        once = np.maximum(once, self.n * g - later - (k - 1) * f)
        if self.zero != 3:
            return once
        again = g + self._runs * k * np.maximum(0.0, g - f)
        return np.where(self.v > 1, again, once)

    def _shown_reduces(self) -> Array:
        """Return the exposed seconds of the reductions of an iteration, with overlap."""
        r, b = self.reduce, self.backward
        if self.each:
            shown: Array = r + self.m * self.n * np.maximum(0.0, r - b)
            return shown
        return self._shown_once(r)

    def _shown_once(self, seconds: Array) -> Array:
        """Return what is exposed of a collective of each chunk that overlaps with the last backwards."""
        b, k = self.backward, self.chunks
        later = (self.v - 1) * np.minimum(self.m, self.grid.pp) * k * b
        last = np.maximum(seconds, k * seconds - (k - 1) * b)
        return np.maximum(last, self.n * seconds - later - (k - 1) * b)


def _tied_seconds(grid: LayoutGrid) -> float:
    """Return the seconds to sum the gradients of an embedding that the first and the last stage share."""
    model, problem = grid.problem.model, grid.problem
    if not model.shares_embedding or grid.pp == 1:
        return 0.0
    along = group_along(problem.cluster, float(grid.pp), float(grid.tp))
    rows = model.vocabulary_rows(grid.tp) * model.hidden
    return float(all_reduce_seconds(replace(along, size=2.0), rows * problem.profile.gradient_bytes))
