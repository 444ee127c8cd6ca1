"""Placement: which nodes are close, which nodes jobs get, and the formats that schedulers read.

    set     nodes whose ports are connected to the same first-tier switches (with rails, all of a set's)
    pod     sets that reach each other over second-tier switches
    tier    the highest switch that a flow goes through: 1 within a set, 2 within a pod (without a third tier
            all nodes are one pod), 3 above pods; 0 is inside a node

Formats of a fabric and a placement:

    slurm          topology.conf of Slurm's topology/tree: SwitchName=, Nodes=, Switches= (topology.conf(5))
    slurm-blocks   the same for topology/block, Slurm 23.11 and later: BlockName=, Nodes=, BlockSizes=
    ranks          a line for each rank with its host: SLURM_HOSTFILE with srun --distribution=arbitrary, and
                   mpirun --hostfile with --map-by seq
    kubernetes     Node objects with the labels of NVIDIA's Topograph, which schedulers (Kueue, KAI) read:
                   network.topology.nvidia.com/leaf, spine and core; and with the node's slot in a job

A tree has one switch above each node: with rails that is the set of the node's switches.

Arrays: N nodes, F flows.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby

import numpy as np
import numpy.typing as npt

from myriad.errors import BadInputError
from myriad.network.fabric import Fabric, Flows, Numbers, Paths, pieces

__all__ = ["TopologyDomains", "pack_jobs", "shared_ratio", "tier_bytes"]

_Ints = npt.NDArray[np.int64]


class TopologyDomains:
    """Which nodes are close: their first-tier switches, sets and pods."""

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
        """(N) Set of each node; sets are numbered by their first node."""
        numbers: dict[tuple[int, ...], int] = {}
        return np.array([numbers.setdefault(one, len(numbers)) for one in self.switches], dtype=np.int64)

    @cached_property
    def pod_of(self) -> _Ints:
        """(N) Pod of each node: all in one pod if there are at most two tiers."""
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
        """Number of pods of the fabric; 1 without pods."""
        return int(self.pod_of.max()) + 1


def pack_jobs(sizes: Sequence[int], set_of: _Ints, pod_of: _Ints) -> list[list[int]]:
    """Assign nodes to jobs of the given sizes such that few jobs span several switches: the largest job
    first, each in the fullest set with room for it, else in the fullest such pod, else anywhere; there from
    the emptiest set. Raises `BadInputError` if there are too few nodes."""
    if sum(sizes) > len(set_of):
        raise BadInputError("JOB", f"{sum(sizes)} nodes in all", f"at most the cluster's {len(set_of)}")
    free = np.ones(len(set_of), dtype=bool)
    found: dict[int, list[int]] = {}
    for job in sorted(range(len(sizes)), key=lambda one: -sizes[one]):
        nodes = _fullest_group_with_room(sizes[job], set_of, free)
        if nodes is None:
            pod = _fullest_group_with_room(sizes[job], pod_of, free)
            within = np.flatnonzero(free) if pod is None else np.array(pod)
            nodes = _emptiest_first(within, set_of)[: sizes[job]]
        else:
            nodes = nodes[: sizes[job]]
        free[nodes] = False
        found[job] = sorted(int(node) for node in nodes)
    return [found[job] for job in range(len(sizes))]


def _fullest_group_with_room(size: int, group_of: _Ints, free: npt.NDArray[np.bool_]) -> _Ints | None:
    """Return all free nodes of the fullest group that has at least ``size`` of them."""
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
    """Return (F) the highest tier that each flow goes through."""
    height = np.maximum(fabric.tier[fabric.source], fabric.tier[fabric.target]).astype(np.int64)
    found = np.zeros(len(paths), dtype=np.int64)
    length = np.diff(paths.first)
    owner = np.repeat(np.arange(len(paths)), length)
    np.maximum.at(found, owner, height[paths.link])
    return found


def tier_bytes(fabric: Fabric, flows: Flows, paths: Paths) -> Numbers:
    """Return the bytes of flows by the highest tier that they go through, 0 to 3."""
    tiers = np.minimum(_flow_tiers(fabric, paths), 3)
    return np.bincount(tiers, weights=flows.num_bytes, minlength=4).astype(np.float64)


def shared_ratio(fabric: Fabric, paths: Paths, queue_pairs: int = 1) -> float:
    """Return the share of flows that cross an overloaded link between switches, among all flows that leave
    their first-tier switch. Each flow demands its port's full rate, divided among its queue pairs."""
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


_TAIL = re.compile(r"(.*?)(0|[1-9]\d*)?", re.DOTALL)
_LABEL = "network.topology.nvidia.com"
_OWN = "placement.myriad"


def host_list(names: Sequence[str]) -> str:
    """Return Slurm's hostlist expression: ``n0 n1 n2 n7 login`` is n[0-2,7],login."""
    found: defaultdict[str, list[int | None]] = defaultdict(list)
    for name in names:
        match = _TAIL.fullmatch(name)
        assert match is not None
        found[match[1]].append(None if match[2] is None else int(match[2]))
    return ",".join(_expression(prefix, numbers) for prefix, numbers in found.items())


def _expression(prefix: str, numbers: Sequence[int | None]) -> str:
    known = sorted({number for number in numbers if number is not None})
    if not known:
        return prefix
    if len(known) == 1 and len(numbers) == 1:
        return f"{prefix}{known[0]}"
    runs = []
    for _, run in groupby(enumerate(known), key=lambda pair: pair[1] - pair[0]):
        own = [number for _, number in run]
        runs.append(f"{own[0]}-{own[-1]}" if len(own) > 1 else str(own[0]))
    return f"{prefix}[{','.join(runs)}]" + (f",{prefix}" if None in numbers else "")


def slurm_tree(near: TopologyDomains, names: Sequence[str]) -> str:
    """Return topology.conf of topology/tree; ``names`` are those of the nodes."""
    sets, pods = _members(near.set_of), _members(near.pod_of)
    lines = [f"SwitchName=leaf{one} Nodes={host_list([names[n] for n in nodes])}" for one, nodes in sets]
    if len(sets) > 1:
        for one, nodes in pods:
            below = [f"leaf{number}" for number in sorted({int(near.set_of[node]) for node in nodes})]
            lines.append(f"SwitchName=spine{one} Switches={host_list(below)}")
    if len(pods) > 1:
        lines.append(f"SwitchName=core Switches={host_list([f'spine{one}' for one, _ in pods])}")
    return "\n".join(lines) + "\n"


def slurm_blocks(near: TopologyDomains, names: Sequence[str]) -> str:
    """Return topology.conf of topology/block. All blocks are as large as the smallest set."""
    sets = _members(near.set_of)
    size = min(len(nodes) for _, nodes in sets)
    lines = [f"BlockName=block{one} Nodes={host_list([names[n] for n in nodes])}" for one, nodes in sets]
    return "\n".join([*lines, f"BlockSizes={size}"]) + "\n"


def host_file(nodes: Sequence[int], num_ranks: int, ranks_per_node: int, names: Sequence[str]) -> str:
    """Return a line for each rank with its host; ``nodes`` are those of the job, slot by slot."""
    return "".join(f"{names[nodes[rank // ranks_per_node]]}\n" for rank in range(num_ranks))


def node_labels(
    near: TopologyDomains, names: Sequence[str], jobs: Mapping[str, Sequence[int]]
) -> Iterator[dict[str, object]]:
    """Yield Kubernetes Node objects with labels; ``jobs`` gives the nodes of each job, slot by slot."""
    place = {node: (job, slot) for job, nodes in jobs.items() for slot, node in enumerate(nodes)}
    for node, name in enumerate(names):
        labels = {f"{_LABEL}/leaf": f"leaf{near.set_of[node]}"}
        labels[f"{_LABEL}/spine"] = f"spine{near.pod_of[node]}"
        if near.num_pods > 1:
            labels[f"{_LABEL}/core"] = "core"
        if node in place:
            job, slot = place[node]
            labels |= {f"{_OWN}/job": _value(job), f"{_OWN}/slot": str(slot)}
        yield {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}


def _value(text: str) -> str:
    """Return a valid label value: at most 63 letters and digits, with . _ - inside."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)[:63].strip("._-") or "job"


def _members(group_of: npt.NDArray[np.int64]) -> list[tuple[int, list[int]]]:
    return [
        (one, [int(node) for node in np.flatnonzero(group_of == one)])
        for one in range(int(group_of.max()) + 1)
    ]
