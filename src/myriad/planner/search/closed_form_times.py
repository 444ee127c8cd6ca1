"""Seconds of an iteration of every layout of a grid, without running its program.

An iteration is compute and bubble, messages between stages, data parallelism and optimizer. Each part depends
on few of a grid's axes, so each is a small array, and one addition gives the whole grid.

    t, f, b, w   seconds of a micro-batch on the slowest rank: all, forward, gradients of inputs, of weights
    m, p, v      micro-batches, pipeline ranks, stages of each;   c   a message

    schedule             compute and bubble, of equal stages     messages, but for a few at the ends
    1f1b                 (m + p - 1) t                           2 (p - 1) / p of each micro-batch
    eager-1f1b           the same                                none, while 2 (p - 1) c < (p - 1) t
    interleaved, gpipe   m t + (p - 1) t / v                     none, while they fit behind other stages
    zero-bubble          m t + (p - 1) (f + b - w)               none
    zero-bubble-v        slots of equal length: 3 m max(f, b, w) up to 6 of each micro-batch
    dualpipe-v           m t + (p - 1) max(f / 2, b - w / 2)     none, while c < f / 2

The forms of compute and bubble come from the schedules' sources (`program/schedules.py`). Those of messages,
and of coupled transfers, were counted on simulated programs of unit costs. `_DpForm` adds data parallelism
and the optimizer, and `snapshot_costs` the seconds of snapshots.

The data-parallel part uses these symbols:

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

import numpy as np

from myriad.comm.layout import Layout
from myriad.model.matrix_shapes import hidden_matrices
from myriad.planner.cost.collective_costs import (
    DpCollectives,
    all_reduce_seconds,
    copied_sum_seconds,
    group_along,
    message_seconds,
    shard_group_comm,
)
from myriad.planner.cost.expert_ranks import holders
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.cost.matrix_costs import newton_schulz_seconds
from myriad.planner.cost.operator_costs import optimizer_bytes, sweep_seconds
from myriad.planner.cost.snapshot_costs import SnapshotSchedule
from myriad.planner.cost.stage_layers import first_alike
from myriad.planner.search.layout_problem import LayoutCandidate, Sharding
from myriad.planner.search.layout_space import LayoutGrid
from myriad.planner.search.stage_times import Array, GridTimes
from myriad.program.build import count_chunks

__all__ = ["grid_seconds"]

_VEE_RANKS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
_VEE_IDLE = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 5.5, 6.5, 7.5, 11.5, 19.5, 24.5)
"""Forwards that each rank idles under zero-bubble-v (`myriad simulate --program`)."""
_VEE_MESSAGES = (0.0, 3.0, 4.0, 4.0, 4.4, 4.8, 5.1, 5.4, 5.4, 5.6, 5.8, 6.0)
"""Exposed messages of each micro-batch under zero-bubble-v, for the same numbers of ranks."""


def grid_seconds(times: GridTimes) -> Array:
    """Return the seconds of an iteration, ``[micro-batch, schedule, shards, recompute, tensor, pipeline,
    switches]``."""
    compute = compute_seconds(times)[:, :, None, :, :, None, None]
    messages = transfer_seconds(times)[:, :, None, None, None, :, None]
    data = dp_seconds(times)[:, :, :, None, None, None, :]
    found: Array = compute + messages + data
    assert found.shape == times.grid.axes
    return found + _stalls(times, found)


def _stalls(times: GridTimes, seconds: Array) -> Array | float:
    """Return the seconds that snapshots add."""
    grid, problem = times.grid, times.grid.problem
    if problem.snapshots == SnapshotSchedule():
        return 0.0
    others, experts = times.held
    shards = np.array([_num_shards(grid, shard) for shard in grid.shards])
    of_experts = np.array([_num_expert_shards(grid, shard) for shard in grid.shards])
    layout, overlap = grid.at((0,) * 7)
    costs = Costs(LayoutCandidate(layout, overlap, 0.0, 0.0, 1.0).workload(problem), problem.cluster)
    updated = (others[:, None] / shards + experts[:, None] / of_experts) * costs.optimizer_bytes
    update = np.asarray(sweep_seconds(problem.cluster.accelerator, updated, 2.0))
    wide = (slice(None), slice(None), *(None,) * 4)
    copied = others / grid.num_holders + experts / grid.experts.num_replicas
    layouts = [grid.at((0, 0, shard, 0, 0, 0, 0))[0] for shard in range(len(grid.shards))]
    holders = np.array([problem.snapshots.num_holders(one, problem.cluster.nodes) for one in layouts])
    copied = copied[:, None] * holders
    return np.asarray(costs.snapshot_costs.stall_seconds(seconds, update[wide], copied[wide]))


def compute_seconds(times: GridTimes) -> Array:
    """Return the seconds of compute and bubble, ``[micro-batch, schedule, recompute, tensor]``."""
    names, stages = _schedules(times)
    p, m = times.grid.pp, _num_micro_batches(times)[:, None, None, None]
    v = stages[None, :, None, None]
    worst = times.slowest
    forward, inputs, weights, again = times.mean
    f, w = forward[:, None, None, :], weights[:, None, None, :]
    b = inputs[:, None, None, :] + again[:, None, :, :]
    mean = f + b + w
    many = m * worst + (p - 1) / v * mean
    looped = np.where(m >= p, many, p * mean + (m - 1) / v * worst)
    halves = m * worst + np.maximum(0.0, (p - 1) * (f + b) - np.minimum(p - 1, m - 1) * w)
    vee = _vee_seconds(m, p, worst, (f, b, w))
    whole = (m - 1) * worst + p * mean
    few = np.maximum(0.0, 2 * p - m) * (p - 1) / p * (f + b) / 2
    dual = m * worst + (p - 1) * np.maximum(f / 2, b - w / 2) + few
    return _by_schedule(names, whole, looped, halves, vee, dual)


def _vee_seconds(m: Array, p: int, worst: Array, turns: tuple[Array, Array, Array]) -> Array:
    """Return the compute seconds of zero-bubble-v. Up to p micro-batches run freely; more run in slots that
    are all as long as the longest pass."""
    f, b, w = turns
    slot = np.maximum(np.maximum(f, b), w)
    rigid = 3 * slot if p > 2 else (f + b + w + 3 * slot) / 2
    idle = max(0.0, float(np.interp(p, _VEE_RANKS, _VEE_IDLE)) - (p - 1) / 2)
    flows = np.minimum(m, p) * worst + np.maximum(0.0, p - m) * f + (p - 1) * np.maximum(0.0, b - w / 2)
    found: Array = flows + np.maximum(0.0, m - p) * np.maximum(worst, rigid) + np.where(m > p, idle * slot, 0)
    return found


def transfer_seconds(times: GridTimes) -> Array:
    """Return the exposed seconds of messages, ``[micro-batch, schedule, pipeline]``."""
    grid = times.grid
    if grid.pp == 1:
        return np.zeros((len(grid.micro_batches), len(grid.schedules), 1))
    problem = grid.problem
    group = group_along(problem.cluster, float(grid.pp), float(grid.tp * grid.cp))
    tokens = np.array(grid.micro_batches) * float(problem.model.sequence // grid.cp)
    size = tokens * problem.model.hidden * problem.value_bytes / grid.tp
    c = np.asarray(message_seconds(group, size))[:, None]
    forms = [(_decoupled if pipeline else _coupled)(times, c) for pipeline in grid.pipelines]
    found: Array = np.stack(forms, axis=-1)
    return found


def _decoupled(times: GridTimes, c: Array) -> Array:
    names, v = _schedules(times)
    p, m = times.grid.pp, _num_micro_batches(times)[:, None]
    forward, inputs, weights, _ = times.mean
    f, b, w = forward[:, :1], inputs[:, :1], weights[:, :1]
    t = f + b + w
    ends = 2 * (p - 1) * c
    plain = ends + 2 * (p - 2) * c * np.minimum(1.0, m / p) + m * 2 * (p - 1) / p * c
    eager = ends + m * np.maximum(0.0, (p * t + 2 * (p - 1) * c) / (2 * p - 1) - t)
    full = m * v * (np.maximum(0.0, c - f / v) + np.maximum(0.0, c - (b + w) / v))
    size = m / np.maximum(1, m // p)
    turn = np.maximum(0.0, p * c - np.maximum(0.0, size - p) * f / v)
    slot = 0.8 * m * v * np.maximum(0.0, c - f / v)
    loop = ends + 2 * (v - 1) * turn + np.maximum(slot, full)
    whole = np.maximum(0.0, m - p)
    gpipe = ends + 2 * (v - 1) * np.maximum(0.0, p * c - whole * f / v) + full
    halves = ends * (1 + np.minimum(1.0, m / p)) + m * np.maximum(0.0, 2 * (p - 1) / p * c - w)
    early = ends / 2 + m * np.maximum(0.0, (p * t + 2 * (p - 1) * c) / (2 * p - 1) - t)
    slack = 3 * np.maximum(np.maximum(f, b), w) - t
    each = np.maximum(0.0, float(np.interp(p, _VEE_RANKS, _VEE_MESSAGES)) * c - slack)
    dual = 5 * (p - 1) * c + 2 * m * np.maximum(0.0, c - f / 2)
    return _named(names, plain, eager, loop, gpipe, halves, early, m * each + (p + 2) * c, dual)


def _coupled(times: GridTimes, c: Array) -> Array:
    names, v = _schedules(times)
    p, m = times.grid.pp, _num_micro_batches(times)[:, None]
    ends = 2 * p - 4
    few = 2 * (v - 1) * np.maximum(0.0, p - m)
    counts = (
        2 * m + ends,
        2 * m + ends,
        v * m + p * v + np.maximum(0.0, p - 2.5),
        2 * v * m + ends + few,
        3 * m + p - 2,
        2 * m + ends,
        6 * m + 1.7 * p,
        2 * m + 4.5 * p - 5,
    )
    return _named(names, *(np.maximum(2 * (p - 1), count) * c for count in counts))


def _schedules(times: GridTimes) -> tuple[list[str], Array]:
    names = [name for name, _ in times.grid.schedules]
    return names, np.array([float(stages) for _, stages in times.grid.schedules])


def _num_micro_batches(times: GridTimes) -> Array:
    grid = times.grid
    return grid.problem.global_batch / grid.dp / np.array(grid.micro_batches, dtype=float)


def _by_schedule(names: list[str], *forms: Array) -> Array:
    """Select each schedule's form of `compute_seconds`."""
    index = {"1f1b": 0, "eager-1f1b": 0, "interleaved": 1, "gpipe": 1, "zero-bubble-v": 3, "dualpipe-v": 4}
    forms = np.broadcast_arrays(*forms)
    found: Array = np.stack([forms[index.get(name, 2)][:, place] for place, name in enumerate(names)], axis=1)
    return found


_ORDER = (
    "1f1b",
    "eager-1f1b",
    "interleaved",
    "gpipe",
    "zero-bubble",
    "eager-zero-bubble",
    "zero-bubble-v",
    "dualpipe-v",
)


def _named(names: list[str], *forms: Array) -> Array:
    """Select each schedule's form; ``forms`` are in the order of `_ORDER`."""
    shape = np.broadcast_shapes((1, len(names)), *(np.shape(form) for form in forms))
    wide = {name: np.broadcast_to(form, shape) for name, form in zip(_ORDER, forms, strict=True)}
    return np.stack([wide[name][:, place] for place, name in enumerate(names)], axis=1)


def dp_seconds(times: GridTimes) -> Array:
    """Return the seconds of data parallelism and the optimizer, ``[micro-batch, schedule, shards,
    switches]``."""
    grid = times.grid
    groups = {size: _group_collectives(grid, size) for _, _, size in grid.shards}
    of_experts = {size: _expert_collectives(grid, size) for size in groups}
    forms = [
        [
            _DpForm(times, groups[shard.shard_group], of_experts[shard.shard_group], shard, data).seconds(
                optimizer
            )
            for data, optimizer in grid.switches
        ]
        for shard in grid.shards
    ]
    shape = (len(grid.micro_batches), len(grid.schedules))
    wide = [[np.broadcast_to(form, shape) for form in row] for row in forms]
    found: Array = np.array(wide).transpose(2, 3, 0, 1) + _tied_seconds(grid)
    return found


def _num_shards(grid: LayoutGrid, shard: Sharding) -> int:
    return (shard.shard_group or grid.num_holders) if shard.zero else 1


def _num_expert_shards(grid: LayoutGrid, shard: Sharding) -> int:
    return grid.experts.num_replicas * _num_shards(grid, shard) // grid.num_holders if shard.zero else 1


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
    problem, every = grid.problem, grid.num_holders
    layout, stride = Layout(dp=grid.dp, tp=grid.tp, pp=grid.pp, cp=grid.cp), grid.tp * grid.pp * grid.cp
    if size is None or size == every:
        return DpCollectives(problem.cluster, problem.comm, *holders(layout, stride, every)), None
    comm = shard_group_comm(problem.comm, layout.model_copy(update={"zero": 1, "shard_group": size}))
    inside = DpCollectives(problem.cluster, comm, *holders(layout, stride, size))
    across = holders(layout, stride, every // size, every=size)
    return inside, DpCollectives(problem.cluster, comm, *across)


class _DpForm:
    """Data-parallel seconds of one sharding, with overlap.data on or off; arrays are ``[micro-batch,
    schedule]``."""

    def __init__(
        self,
        times: GridTimes,
        groups: _Groups,
        of_experts: DpCollectives | None,
        shard: Sharding,
        data: bool,
    ) -> None:
        grid, problem = times.grid, times.grid.problem
        self.times, self.grid = times, grid
        self.sums, self.sums_across = groups
        self.zero, self.each = shard.zero, shard.reduce == "each"
        self.num_shards = _num_shards(grid, shard)
        self.data = data and grid.num_holders > 1
        self.v = np.array([float(stages) for _, stages in grid.schedules])
        self.m = (problem.global_batch / grid.dp / np.array(grid.micro_batches, dtype=float))[:, None]
        self.chunks = self._num_chunks()
        self.n = self.v * self.chunks
        others, experts = times.held
        self.own = others / self.num_shards + experts / _num_expert_shards(grid, shard)
        self.gather, self.reduce = self._collectives(self.sums, others / self.n)
        if of_experts is not None and np.any(experts):
            gather, reduce = self._collectives(of_experts, experts / self.n)
            self.gather, self.reduce = self.gather + gather, self.reduce + reduce
        self.across = self._across_seconds(self.own / self.n)
        forward, inputs, weights, _ = times.mean
        self.forward = forward[:, :1] / self.n
        self.backward = (inputs + weights)[:, :1] / self.n

    def _num_chunks(self) -> Array:
        layout, overlap = self.grid.at((0,) * 7)
        overlap = overlap.model_copy(update={"data": self.data})
        counts = [count_chunks(layout, overlap, [range(cut.fewest_layers)]) for cut in self.times.cuts]
        return np.array(counts, dtype=float)[self.times.cut_of]

    def _collectives(self, sums: DpCollectives, parameters: Array) -> tuple[Array, Array]:
        problem = self.grid.problem
        gradients = parameters * problem.profile.gradient_bytes
        if not self.zero:
            return np.zeros_like(parameters), np.asarray(sums.all_reduce_seconds(gradients))
        whole = np.asarray(sums.all_gather_seconds(parameters * problem.value_bytes))
        return whole, np.asarray(sums.all_gather_seconds(gradients))

    def _across_seconds(self, own: Array) -> Array | None:
        """Return the seconds of a chunk's sum across groups, of so many parameters of this rank's shards;
        ``None``: there is one group."""
        if self.sums_across is None:
            return None
        return np.asarray(self.sums_across.all_reduce_seconds(own * self.grid.problem.profile.gradient_bytes))

    def seconds(self, optimizer: bool) -> Array:
        """Return the sum of the exposed seconds, the slowdown of compute and the update."""
        update = self._update()
        if self.grid.num_holders == 1 and self.grid.experts.etp_groups == 1:
            return np.broadcast_to(update, (len(self.m), len(self.v)))
        gathers = self._runs() * self.chunks * self.gather
        reduces = (self.m if self.each else 1.0) * self.n * self.reduce
        if not self.data:
            found: Array = gathers + reduces + update
            return found if self.across is None else found + self.n * self.across
        shown = self._shown_gathers()
        if optimizer and self.zero in (1, 2):
            shown = np.maximum(0.0, shown - update * (1 - 1 / self.n))
        shown = np.minimum(shown, gathers) + np.minimum(self._shown_reduces(), reduces)
        slowed: Array = shown + self.sums.ring.busy_ratio * (gathers + reduces - shown) + update
        return slowed if self.across is None else slowed + self._slowed_across(self.across)

    def _slowed_across(self, across: Array) -> Array:
        """Return the exposed seconds of the sums across groups, and the slowdown of compute by the rest."""
        assert self.sums_across is not None
        shown = self._shown_once(across)
        slowed: Array = shown + self.sums_across.ring.busy_ratio * np.maximum(0.0, self.n * across - shown)
        return slowed

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
        g, f, k = self.gather, self.forward, self.chunks
        once = np.maximum(g, k * g - (k - 1) * f)
        later = (self.v - 1) * np.minimum(self.m, self.grid.pp) * k * f
        once = np.maximum(once, self.n * g - later - (k - 1) * f)
        if self.zero != 3:
            return once
        again = g + self._runs() * k * np.maximum(0.0, g - f)
        return np.where(self.v > 1, again, once)

    def _shown_reduces(self) -> Array:
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

    def _update(self) -> Array:
        """Return the seconds of the gradient norm, the optimizer, and the wait for the batch."""
        problem, own = self.grid.problem, self.own
        accelerator = problem.cluster.accelerator
        each = optimizer_bytes(problem.optimizer, problem.value_bytes, problem.ema_every)
        step = sweep_seconds(accelerator, own * each, 2.0)
        norm = sweep_seconds(accelerator, 4 * own, 2.0)
        everybody = group_along(problem.cluster, float(problem.cluster.world), 1.0)
        copied = copied_sum_seconds(
            problem.model, problem.cluster, self.grid.tp, self.grid.pp, self.num_shards
        )
        norm = norm + all_reduce_seconds(everybody, 8.0) + copied
        return np.asarray(step + norm + problem.profile.host_seconds + self._orthogonalization())

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


def _tied_seconds(grid: LayoutGrid) -> float:
    model, problem = grid.problem.model, grid.problem
    if not model.shares_embedding or grid.pp == 1:
        return 0.0
    along = group_along(problem.cluster, float(grid.pp), float(grid.tp))
    rows = model.vocabulary_rows(grid.tp) * model.hidden
    return float(all_reduce_seconds(replace(along, size=2.0), rows * problem.profile.gradient_bytes))
