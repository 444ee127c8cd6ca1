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
and of coupled transfers, were counted on simulated programs of unit costs. `dp_times` adds data parallelism
and the optimizer, and `snapshot_costs` the seconds of snapshots.
"""

import numpy as np

from myriad.planner.cost.collective_costs import group_along, message_seconds
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.cost.operator_costs import sweep_seconds
from myriad.planner.cost.snapshot_costs import SnapshotSchedule
from myriad.planner.search.dp_times import dp_seconds, num_expert_shards, num_shards
from myriad.planner.search.layout_problem import LayoutCandidate
from myriad.planner.search.stage_times import Array, GridTimes

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
    shards = np.array([num_shards(grid, shard) for shard in grid.shards])
    of_experts = np.array([num_expert_shards(grid, shard) for shard in grid.shards])
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
