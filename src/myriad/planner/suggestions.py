"""What to ask instead, where no layout divides a batch among a cluster's accelerators: the nearest batches
and the nearest numbers of accelerators for which there is a plan.

Each suggestion has been planned before it is made, so whoever follows one gets a layout that fits.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice

from myriad.comm.layout import MOST_RANKS
from myriad.planner.cluster import Cluster
from myriad.planner.space import Problem, grids, has_layout

__all__ = ["nearest_that_plan"]

_MOST_BATCH = 2**24
"""Largest batch that `train.global_batch` allows."""
_MOST_TRIED, _MOST_STEPS = 3, 4096
"""Problems that are planned, and numbers of nodes that are looked at, in each direction."""

Plans = Callable[[Problem], bool]


def nearest_that_plan(problem: Problem, plans: Plans) -> str:
    """Return the end of an error message; ``plans`` says whether a problem has a plan."""
    batches = _both(_batches(problem, -1), _batches(problem, 1), plans)
    sizes = _both(_sizes(problem, -1), _sizes(problem, 1), plans)
    found = []
    if batches:
        found.append(f"with a global batch of {_either(one.global_batch for one in batches)}")
    if sizes:
        found.append(f"on {_either(one.cluster.world for one in sizes)} accelerators")
    return f"; there is a plan {', or '.join(found)}" if found else ""


def _both(below: Iterator[Problem], above: Iterator[Problem], plans: Plans) -> list[Problem]:
    """The first of each that has a plan."""
    found = [next(filter(plans, islice(some, _MOST_TRIED)), None) for some in (below, above)]
    return [one for one in found if one is not None]


def _either(numbers: Iterable[int]) -> str:
    return " or ".join(map(str, numbers))


def _batches(problem: Problem, direction: int) -> Iterator[Problem]:
    """The same with other batches that can be divided, the nearest first."""
    sizes = problem.fixed.get("micro_batch", 1)
    units = {dp * sizes for _, _, dp in grids(problem)}
    batch = problem.global_batch
    for _ in range(_MOST_STEPS):
        if direction < 0:
            batch = max((batch - 1) // unit * unit for unit in units) if units else 0
        else:
            batch = min((batch // unit + 1) * unit for unit in units) if units else 0
        if not 1 <= batch <= _MOST_BATCH:
            return
        other = replace(problem, global_batch=batch)
        if has_layout(other):
            yield other


def _sizes(problem: Problem, direction: int) -> Iterator[Problem]:
    """The same on fewer or more nodes, or on a part of one, the nearest first."""
    cluster = problem.cluster
    for step in range(1, _MOST_STEPS):
        other = _resized(cluster, direction * step)
        if other is None:
            return
        if has_layout(problem.with_cluster(other)):
            yield problem.with_cluster(other)


def _resized(cluster: Cluster, step: int) -> Cluster | None:
    """With so many more nodes; of one node with fewer accelerators."""
    nodes, each = cluster.nodes + step, cluster.accelerators_per_node
    if nodes >= 1:
        if nodes > 1 and (cluster.links.network is None or nodes * each > MOST_RANKS):
            return None
        unequal = tuple(group for group in cluster.unequal if max(group.nodes) < nodes)
        return cluster.model_copy(update={"nodes": nodes, "unequal": unequal})
    each = cluster.accelerators_per_node + nodes - 1
    if each < 1:
        return None
    return cluster.model_copy(update={"nodes": 1, "accelerators_per_node": each, "unequal": ()})
