"""Seconds of an iteration of every layout of a plot, without running its program.

An iteration is compute and bubble, messages between stages, data parallelism and optimizer. Each depends on
few of a plot's axes, so each is a small array, and their sum over the whole grid is one addition.

    t, f, b, w   seconds of a micro-batch on the slowest rank: all, forward, gradients of inputs, of weights
    m, p, v      micro-batches, pipeline ranks, stages of each;   c   a message

    schedule             compute and bubble, of equal stages     messages, but for a few at the ends
    1f1b                 (m + p - 1) t                           2 (p - 1) / p of each micro-batch
    eager-1f1b           the same                                none, while 2 (p - 1) c < (p - 1) t
    interleaved, gpipe   m t + (p - 1) t / v                     none, while they fit behind other stages
    zero-bubble          m t + (p - 1) (f + b - w)               none
    zero-bubble-v        slots of equal length: 3 m max(f, b, w) up to 6 of each micro-batch

The forms of compute and bubble are the schedules' sources' (`program/schedules.py`). Those of messages, and
of what coupled transfers cost, were counted on simulated programs of unit costs. Data parallelism:
`data_form`. What snapshots add to all of it: `saving`.
"""

import numpy as np

from myriad.planner.collectives import group_along, message_seconds
from myriad.planner.costs import Costs, optimizer_bytes
from myriad.planner.data_form import data_seconds
from myriad.planner.operators import sweep_seconds
from myriad.planner.saving import Saves
from myriad.planner.space import Candidate
from myriad.planner.stage_times import Array, PlotTimes

__all__ = ["plot_seconds"]

_VEE_RANKS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
_VEE_IDLE = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 5.5, 6.5, 7.5, 11.5, 19.5, 24.5)
"""Forwards that each rank idles under zero-bubble-v (`myriad simulate --program`)."""
_VEE_MESSAGES = (0.0, 3.0, 4.0, 4.0, 4.4, 4.8, 5.1, 5.4, 5.4, 5.6, 5.8, 6.0)
"""That each micro-batch waits for."""


def plot_seconds(times: PlotTimes) -> Array:
    """``[micro-batch, schedule, shards, recompute, tensor, pipeline, switches]``."""
    compute = compute_seconds(times)[:, :, None, :, :, None, None]
    messages = transfer_seconds(times)[:, :, None, None, None, :, None]
    data = data_seconds(times)[:, :, :, None, None, None, :]
    found: Array = compute + messages + data
    assert found.shape == times.plot.axes
    return found + _stalls(times, found)


def _stalls(times: PlotTimes, seconds: Array) -> Array | float:
    """By snapshots."""
    plot, problem = times.plot, times.plot.problem
    if problem.saves == Saves():
        return 0.0
    held = np.array([cut.parameters for cut in times.cuts])[times.cut_of] / plot.tp
    shards = np.array([plot.dp if zero else 1 for zero, _ in plot.shards])
    layout, overlap = plot.at((0,) * 7)
    costs = Costs(Candidate(layout, overlap, 0.0, 0.0, 1.0).work(problem), problem.cluster)
    updated = held[:, None] / shards * optimizer_bytes(costs.work.optimizer, costs.work.value_bytes)
    update = np.asarray(sweep_seconds(problem.cluster.accelerator, updated, 2.0))
    wide = (slice(None), slice(None), *(None,) * 4)
    copied = held[:, None, None, None, None, None] / plot.dp
    return np.asarray(costs.saving.stall_seconds(seconds, update[wide], copied))


def compute_seconds(times: PlotTimes) -> Array:
    """With the bubble: ``[micro-batch, schedule, recompute, tensor]``."""
    names, stages = _schedules(times)
    p, m = times.plot.pp, _num_micro_batches(times)[:, None, None, None]
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
    return _by_schedule(names, whole, looped, halves, vee)


def _vee_seconds(m: Array, p: int, worst: Array, turns: tuple[Array, Array, Array]) -> Array:
    """Up to p micro-batches flow; more go in slots that all are as long as the longest turn."""
    f, b, w = turns
    slot = np.maximum(np.maximum(f, b), w)
    rigid = 3 * slot if p > 2 else (f + b + w + 3 * slot) / 2
    idle = max(0.0, float(np.interp(p, _VEE_RANKS, _VEE_IDLE)) - (p - 1) / 2)
    flows = np.minimum(m, p) * worst + np.maximum(0.0, p - m) * f + (p - 1) * np.maximum(0.0, b - w / 2)
    found: Array = flows + np.maximum(0.0, m - p) * np.maximum(worst, rigid) + np.where(m > p, idle * slot, 0)
    return found


def transfer_seconds(times: PlotTimes) -> Array:
    """Messages that somebody waits for: ``[micro-batch, schedule, pipeline]``."""
    plot = times.plot
    if plot.pp == 1:
        return np.zeros((len(plot.micro_batches), len(plot.schedules), 1))
    problem = plot.problem
    group = group_along(problem.cluster, float(plot.pp), float(plot.tp))
    tokens = np.array(plot.micro_batches) * float(problem.model.sequence)
    size = tokens * problem.model.hidden * problem.value_bytes / plot.tp
    c = np.asarray(message_seconds(group, size))[:, None]
    found: Array = np.stack([_decoupled(times, c), _coupled(times, c)], axis=-1)
    return found


def _decoupled(times: PlotTimes, c: Array) -> Array:
    names, v = _schedules(times)
    p, m = times.plot.pp, _num_micro_batches(times)[:, None]
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
    return _named(names, plain, eager, loop, gpipe, halves, early, m * each + (p + 2) * c)


def _coupled(times: PlotTimes, c: Array) -> Array:
    names, v = _schedules(times)
    p, m = times.plot.pp, _num_micro_batches(times)[:, None]
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
    )
    return _named(names, *(np.maximum(2 * (p - 1), count) * c for count in counts))


def _schedules(times: PlotTimes) -> tuple[list[str], Array]:
    names = [name for name, _ in times.plot.schedules]
    return names, np.array([float(stages) for _, stages in times.plot.schedules])


def _num_micro_batches(times: PlotTimes) -> Array:
    plot = times.plot
    return plot.problem.global_batch / plot.dp / np.array(plot.micro_batches, dtype=float)


def _by_schedule(names: list[str], whole: Array, looped: Array, halves: Array, vee: Array) -> Array:
    index = {"1f1b": 0, "eager-1f1b": 0, "interleaved": 1, "gpipe": 1, "zero-bubble-v": 3}
    forms = np.broadcast_arrays(whole, looped, halves, vee)
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
)


def _named(names: list[str], *forms: Array) -> Array:
    """One form for each of `_ORDER`."""
    shape = np.broadcast_shapes((1, len(names)), *(np.shape(form) for form in forms))
    wide = {name: np.broadcast_to(form, shape) for name, form in zip(_ORDER, forms, strict=True)}
    return np.stack([wide[name][:, place] for place, name in enumerate(names)], axis=1)
