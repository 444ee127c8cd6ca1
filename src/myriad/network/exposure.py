"""What a whole fabric's hashes do to the rings of a job, draw by draw.

Each port of a node sends to the same port of the next node of its ring: what data parallelism does when a
node's other ranks are its tensor-parallel group. All flows are under way at once, and each draw gives every
switch another seed. A flow that is cut into queue pairs of equal size is as quick as the slowest of them.

    packed    rings of neighbours: most flows stay under one switch
    spread    the next node is always under another switch, as long as there is one
    random    as a scheduler that knows nothing of switches

Arrays: K draws, F flows, N nodes.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from myriad.errors import BadInputError
from myriad.machine import check_memory
from myriad.network.conflicts import Rule
from myriad.network.fabric import Fabric, Numbers
from myriad.network.flows import Flows, Paths
from myriad.network.max_min import max_min
from myriad.network.routing import Routes, adaptive, ecmp, into_queue_pairs, spray

__all__ = ["FlowExposure", "Placement", "expose", "node_order", "on_ports", "ring_flows"]

Placement = Literal["packed", "spread", "random"]

_WAYS = 64
"""Of a sprayed flow: twice the uplinks of a switch of 64 ports, so that all carry as good as the same."""
_ENTRY_BYTES = 64
"""Of memory for each link of each queue pair's way, with what is computed from it."""
_FULL = 1 - 1e-9


@dataclass(frozen=True, eq=False)
class FlowExposure:
    """Of each draw (K); ratios of what a flow has where nothing is narrow but the ports."""

    slowest_ratio: Numbers
    """Of the slowest flow: so fast is its ring."""
    mean_ratio: Numbers
    """Of all flows."""
    held_up_ratio: Numbers
    """Share of the flows that have less than all."""


def node_order(routes: Routes, placement: str, seed: int = 0) -> npt.NDArray[np.int64]:
    """(N) The node at each place. Raises `BadInputError`."""
    fabric = routes.fabric
    if placement not in get_args(Placement):
        raise BadInputError("--placement", placement, f"one of {', '.join(get_args(Placement))}")
    if placement == "random":
        return np.random.default_rng(seed).permutation(fabric.num_nodes)
    above = routes.home[:: fabric.ports_per_node]
    packed = np.argsort(above, kind="stable")
    if placement == "packed":
        return packed
    count = np.bincount(above)
    place = np.arange(fabric.num_nodes) - np.repeat(np.cumsum(count) - count, count)
    return packed[np.argsort(place, kind="stable")]


def ring_flows(fabric: Fabric, order: npt.NDArray[np.int64], ring_nodes: int) -> Flows:
    """Rings of so many nodes in turn, one for each port; what is left over makes a shorter one."""
    place = np.arange(len(order))
    first = place // ring_nodes * ring_nodes
    size = np.minimum(ring_nodes, len(order) - first)
    following = order[first + (place - first + 1) % size]
    rail = np.arange(fabric.ports_per_node)
    source = (order[:, None] * fabric.ports_per_node + rail).reshape(-1)
    target = (following[:, None] * fabric.ports_per_node + rail).reshape(-1)
    moves = source != target
    return Flows(
        source=source[moves].astype(np.int32),
        target=target[moves].astype(np.int32),
        num_bytes=np.ones(int(moves.sum())),
        start_seconds=np.zeros(int(moves.sum())),
        entropy=np.zeros(int(moves.sum()), dtype=np.uint16),
    )


def expose(
    routes: Routes, flows: Flows, *, rule: Rule = "hash", queue_pairs: int = 1, draws: int = 1, seed: int = 0
) -> FlowExposure:
    """Of flows that are all under way. Raises `BadInputError` for more than there is memory for."""
    if queue_pairs < 1 or draws < 1:
        key = "--queue-pairs" if queue_pairs < 1 else "--draws"
        raise BadInputError(key, min(queue_pairs, draws), "at least 1")
    parts = _WAYS if rule == "spray" else queue_pairs
    check_memory(f"{len(flows)} flows x {parts}", len(flows) * parts * routes.most_links * _ENTRY_BYTES)
    most = on_ports(routes.fabric, flows)
    columns = []
    for draw in range(draws if rule != "adaptive" else 1):  # which has nothing to draw
        paths = _routed(routes, flows, rule, queue_pairs, seed + draw)
        rates = max_min(routes.fabric.bytes_per_second, paths).reshape(-1, parts)
        ratio = np.minimum(1.0, parts * rates.min(1) / most)
        columns.append((ratio.min(initial=1.0), _mean(ratio), _mean(ratio < _FULL)))
    slowest, mean, held_up = np.array(columns).T
    return FlowExposure(slowest, mean, held_up)


def _mean(values: npt.NDArray[np.float64] | npt.NDArray[np.bool_]) -> float:
    return float(values.mean()) if len(values) else 0.0


def _routed(routes: Routes, flows: Flows, rule: Rule, queue_pairs: int, seed: int) -> Paths:
    if rule == "spray":
        return spray(routes, flows, _WAYS, seed)[1]
    parts = into_queue_pairs(flows, queue_pairs)
    return adaptive(routes, parts) if rule == "adaptive" else ecmp(routes, parts, seed, alike=rule == "alike")


def on_ports(fabric: Fabric, flows: Flows) -> Numbers:
    """(F) What flows have that share nothing but NICs, each of which carries what all its links do."""
    rates = np.bincount(fabric.source, weights=fabric.bytes_per_second, minlength=fabric.num_vertices)
    alone = rates[: fabric.num_ports].astype(np.float64)
    both = np.stack([flows.source, flows.target + fabric.num_ports], axis=1)
    first = 2 * np.arange(len(flows) + 1, dtype=np.int64)
    return max_min(np.concatenate([alone, alone]), Paths(first, both.reshape(-1).astype(np.int32)))
