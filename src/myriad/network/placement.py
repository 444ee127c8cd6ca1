"""Nodes and switches as a placement sees them: what hangs together, which jobs get which nodes, and how far
bytes go.

    set     nodes whose ports hang on the same first-tier switches: with rails each on all of a set's
    pod     sets that reach each other over second-tier switches
    tier    the highest switch that a flow goes through: 1 within a set, 2 within a pod (where there is no
            third tier, all is one), 3 above pods; 0 is inside a node

Arrays: N nodes, F flows.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from myriad.errors import BadInputError
from myriad.network.fabric import Fabric, Numbers, pieces
from myriad.network.flows import Flows, Paths

__all__ = ["Neighbourhoods", "packed", "shared_ratio", "tier_bytes"]

_Ints = npt.NDArray[np.int64]


class Neighbourhoods:
    """Which nodes are near each other."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric

    @cached_property
    def switches(self) -> list[tuple[int, ...]]:
        """First-tier switches of each node."""
        fabric = self.fabric
        own = (fabric.source < fabric.num_ports) & (fabric.tier[fabric.target] == 1)
        found: list[set[int]] = [set() for _ in range(fabric.num_nodes)]
        nodes = (fabric.source[own] // fabric.ports_per_node).tolist()
        for node, switch in zip(nodes, fabric.target[own].tolist(), strict=True):
            found[node].add(switch)
        return [tuple(sorted(one)) for one in found]

    @cached_property
    def set_of(self) -> _Ints:
        """(N) Number of the set of each node, by its first node."""
        numbers: dict[tuple[int, ...], int] = {}
        return np.array([numbers.setdefault(one, len(numbers)) for one in self.switches], dtype=np.int64)

    @cached_property
    def pod_of(self) -> _Ints:
        """(N) Number of the pod of each node: all are one where there are no more than two tiers."""
        fabric = self.fabric
        if fabric.tier.max() < 3:
            return np.zeros(fabric.num_nodes, dtype=np.int64)
        below = (fabric.tier[fabric.source] < 3) & (fabric.tier[fabric.target] < 3)
        piece = pieces(fabric.num_vertices, fabric.source[below], fabric.target[below])
        first = piece[: fabric.num_ports : fabric.ports_per_node]
        _, numbers = np.unique(first, return_inverse=True)
        return np.asarray(numbers, dtype=np.int64).reshape(-1)

    @property
    def num_pods(self) -> int:
        """Pods."""
        return int(self.pod_of.max()) + 1


def packed(sizes: Sequence[int], set_of: _Ints, pod_of: _Ints) -> list[list[int]]:
    """Nodes for jobs of so many, so that few lie under several switches: the largest job first, each in the
    fullest set that has room for all of it, else the same of pods, else wherever; there the emptiest set
    first. Raises `BadInputError` where there are fewer nodes."""
    if sum(sizes) > len(set_of):
        raise BadInputError("JOB", f"{sum(sizes)} nodes in all", f"at most the cluster's {len(set_of)}")
    free = np.ones(len(set_of), dtype=bool)
    found: dict[int, list[int]] = {}
    for job in sorted(range(len(sizes)), key=lambda one: -sizes[one]):
        nodes = _room(sizes[job], set_of, free)
        if nodes is None:
            pod = _room(sizes[job], pod_of, free)
            within = np.flatnonzero(free) if pod is None else np.array(pod)
            nodes = _emptiest_first(within, set_of)[: sizes[job]]
        else:
            nodes = nodes[: sizes[job]]
        free[nodes] = False
        found[job] = sorted(int(node) for node in nodes)
    return [found[job] for job in range(len(sizes))]


def _room(size: int, group_of: _Ints, free: npt.NDArray[np.bool_]) -> _Ints | None:
    """All free nodes of the fullest group with so many."""
    left = np.bincount(group_of[free], minlength=int(group_of.max()) + 1)
    fits = np.flatnonzero(left >= size)
    if not len(fits):
        return None
    best = fits[np.argmin(left[fits])]
    return np.flatnonzero(free & (group_of == best)).astype(np.int64)


def _emptiest_first(nodes: _Ints, set_of: _Ints) -> _Ints:
    left = np.bincount(set_of[nodes], minlength=int(set_of.max()) + 1)
    order = np.lexsort((nodes, set_of[nodes], -left[set_of[nodes]]))
    return nodes[order]


def _flow_tiers(fabric: Fabric, paths: Paths) -> _Ints:
    """(F) The highest tier that each goes through."""
    height = np.maximum(fabric.tier[fabric.source], fabric.tier[fabric.target]).astype(np.int64)
    found = np.zeros(len(paths), dtype=np.int64)
    length = np.diff(paths.first)
    owner = np.repeat(np.arange(len(paths)), length)
    np.maximum.at(found, owner, height[paths.link])
    return found


def tier_bytes(fabric: Fabric, flows: Flows, paths: Paths) -> Numbers:
    """Bytes of flows by the highest tier that they go through, 0 to 3."""
    tiers = np.minimum(_flow_tiers(fabric, paths), 3)
    return np.bincount(tiers, weights=flows.num_bytes, minlength=4).astype(np.float64)


def shared_ratio(fabric: Fabric, paths: Paths, queue_pairs: int = 1) -> float:
    """Of the flows that go above a first-tier switch, those that share a link between switches with more than
    it carries at the full rate of each: its port's, or of several queue pairs their share of that."""
    links = (fabric.tier[fabric.source] > 0) & (fabric.tier[fabric.target] > 0)
    if not len(paths.link):
        return 0.0
    owner = np.repeat(np.arange(len(paths)), np.diff(paths.first))
    port = fabric.bytes_per_second[paths.link[paths.first[:-1]]] / queue_pairs
    load = np.bincount(paths.link, weights=port[owner], minlength=fabric.num_links)
    over = links & (load > fabric.bytes_per_second * (1 + 1e-9))
    above, shared = np.zeros(len(paths), dtype=bool), np.zeros(len(paths), dtype=bool)
    above[owner[links[paths.link]]] = True
    shared[owner[over[paths.link]]] = True
    return float(shared.sum() / above.sum()) if above.any() else 0.0
