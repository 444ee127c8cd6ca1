"""A fabric and a placement in the words of what starts jobs: Slurm, host files, Kubernetes.

    slurm          topology.conf of Slurm's topology/tree: SwitchName=, Nodes=, Switches= (topology.conf(5))
    slurm-blocks   the same of topology/block, Slurm 23.11 and newer: BlockName=, Nodes=, BlockSizes=
    ranks          a line for each rank with its host: SLURM_HOSTFILE with srun --distribution=arbitrary, and
                   mpirun --hostfile with --map-by seq
    kubernetes     Node objects with the labels of NVIDIA's Topograph, which schedulers (Kueue, KAI) read:
                   network.topology.nvidia.com/leaf, spine and core; and with the node's place in a job

A tree has one switch above each node: with rails that is the set of a node's switches.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt

from myriad.network.placement import Neighbourhoods

__all__ = ["host_file", "host_list", "node_labels", "slurm_blocks", "slurm_tree"]

_TAIL = re.compile(r"(.*?)(0|[1-9]\d*)?", re.DOTALL)
_LABEL = "network.topology.nvidia.com"
_OWN = "placement.myriad"
_Ints = npt.NDArray[np.int64]


def host_list(names: Sequence[str]) -> str:
    """Slurm's hostlist expression: ``n0 n1 n2 n7 login`` is n[0-2,7],login."""
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


def slurm_tree(near: Neighbourhoods, names: Sequence[str]) -> str:
    """``names``: of the nodes."""
    sets, pods = _members(near.set_of), _members(near.pod_of)
    lines = [f"SwitchName=leaf{one} Nodes={host_list([names[n] for n in nodes])}" for one, nodes in sets]
    if len(sets) > 1:
        for one, nodes in pods:
            below = [f"leaf{number}" for number in sorted({int(near.set_of[node]) for node in nodes})]
            lines.append(f"SwitchName=spine{one} Switches={host_list(below)}")
    if len(pods) > 1:
        lines.append(f"SwitchName=core Switches={host_list([f'spine{one}' for one, _ in pods])}")
    return "\n".join(lines) + "\n"


def slurm_blocks(near: Neighbourhoods, names: Sequence[str]) -> str:
    """Blocks are equal: as large as the smallest set."""
    sets = _members(near.set_of)
    size = min(len(nodes) for _, nodes in sets)
    lines = [f"BlockName=block{one} Nodes={host_list([names[n] for n in nodes])}" for one, nodes in sets]
    return "\n".join([*lines, f"BlockSizes={size}"]) + "\n"


def host_file(nodes: Sequence[int], num_ranks: int, ranks_per_node: int, names: Sequence[str]) -> str:
    """``nodes``: of the job, slot by slot."""
    return "".join(f"{names[nodes[rank // ranks_per_node]]}\n" for rank in range(num_ranks))


def node_labels(
    near: Neighbourhoods, names: Sequence[str], jobs: Mapping[str, Sequence[int]]
) -> Iterator[dict[str, object]]:
    """Node objects; ``jobs``: nodes of each, slot by slot."""
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
    """What a label may be: 63 letters, digits, and within them . _ -"""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)[:63].strip("._-") or "job"


def _members(group_of: _Ints) -> list[tuple[int, list[int]]]:
    return [
        (one, [int(node) for node in np.flatnonzero(group_of == one)])
        for one in range(int(group_of.max()) + 1)
    ]
