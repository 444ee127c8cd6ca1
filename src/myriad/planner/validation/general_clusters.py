"""The cluster of a row of the general form: its accelerator, and links by what the row says of them.

What a row leaves open is the usual server of that accelerator (`Accelerator.server`).
"""

import re
from collections.abc import Callable
from itertools import combinations

from myriad.errors import BadInputError
from myriad.network.node_topology import NodeTopology
from myriad.planner.cluster_config import Accelerator, Cluster, Link
from myriad.planner.cluster_scaling import scale_cluster, usual_server
from myriad.planner.validation.general_cells import GeneralCells

__all__ = ["cluster_of"]


def cluster_of(
    read: GeneralCells, gpus: int, accelerators: Callable[[str, str], tuple[str, Accelerator]]
) -> Cluster:
    """Return the cluster of a row. ``accelerators`` returns the recipe and the accelerator of a type and of
    what else the row says. Raises `BadInputError`."""
    if not read.has("gpu_type"):
        raise read.refused("gpu_type", "needed: the cell is empty; or --cluster for all rows")
    row = " ".join(map(read.word, ("source", "table", "gpu_type", "notes")))
    recipe, accelerator = accelerators(read.word("gpu_type"), row)
    said = read.word("interconnect")
    try:
        cluster = scale_cluster(usual_server(recipe, accelerator, _per_node(read, said)), gpus)
    except BadInputError as error:
        raise read.refused("gpus", error.allowed) from None
    per_node, links = cluster.accelerators_per_node, cluster.links
    check, network_check = _checks(said, cluster.nodes)
    node: dict[str, object] = {"check_seconds": check}
    if inside := re.search(r"NVLink (\d+) GB/s in the node", said):
        node["bytes_per_second"] = float(inside[1]) * 0.5e9
    network: dict[str, object] = {
        "check_seconds": network_check,
        "achievable_ratio": _reached_ratio(said, recipe, cluster.nodes, read.word("notes")),
    }
    if (rate := _network(said, per_node)) is not None:
        network["bytes_per_second"] = rate
    if _BUS_BANDWIDTH.search(said):
        network["latency_seconds"] = _SWEEP_LATENCY
    assert links.network is not None
    changed = {
        "node": Link.model_validate(links.node.model_dump() | node),
        "network": Link.model_validate(links.network.model_dump() | network),
    }
    quad = recipe.startswith("v100") and per_node == 4
    return cluster.model_copy(
        update={"links": links.model_copy(update=changed), "inside": _QUAD if quad else None}
    )


_QUAD = NodeTopology(
    nvlink=tuple((a, b, 2) for a, b in combinations(range(4), 2)), nvlink_bytes_per_second=25e9
)
"""Servers of four V100, whose six NVLinks reach three others by two each: NCCL finds rings in all orders on
Jean Zay's (bigscience-workshop/bigscience, experiments/bandwidth/n1_32gb_all_reduce_bench.txt)."""


_OMNI_PATH = {1: 0.34, 4: 0.21, 16: 0.135}
"""Share of the NICs' rate that is reached, by the number of nodes from which on it is, where its users
measured it: 135 of 400 Gbit/s between two nodes of Jean Zay, 84.7 among four and 54 among sixteen, with V100
(bigscience-workshop/bigscience, experiments/README.md and experiments/bandwidth)."""
_OLD_OMNI_PATH = re.compile(r"\b0(?:1-\d\d|2-(?:[01]\d|2[0-4]))\b"), 0.10
"""Dates of 2022 before the PCI-Express of that machine's A100 nodes was set up anew
(train/tr11-176B-ml/chronicles-prequel.md, "GBS Variations"), and the share that four of them had reached: 40
of 400 Gbit/s (experiments/bandwidth, January 2022). What they reach since is not stated: 135 is assumed."""


def _reached_ratio(said: str, recipe: str, nodes: int, notes: str) -> float | None:
    """Return the share of the NICs' rate that is reached; ``None``: nothing is known about it."""
    if "OmniPath" not in said:
        return None
    if "v100" not in recipe:
        dates, ratio = _OLD_OMNI_PATH
        return ratio if dates.search(notes) else _OMNI_PATH[1]
    return _OMNI_PATH[max(count for count in _OMNI_PATH if count <= nodes)]


_CHECKS = 0.21e-3, 0.31e-3
"""Seconds by which each rank of a group on the same node, and on others, delays a collective that PyTorch
checks (`Link.check_seconds`). Fitted: blocks of nanotron's 1.34G with tp 2 to 8 and micro-batch 1; the
all-reduces of 1 GiB among 256 and 512 ranks whose bandwidth its rows state."""
_CHECKED = {1: 440.0, 2: 375.0, 4: 183.0}
"""Bus bandwidth of an all-reduce in GB/s, by nodes, below which a job of nanotron's sweep checks collectives:
its jobs reach 421 to 430 or 448 to 462 on one node, 317 to 351 or 407 to 438 on two, 143 to 175 or 191 to 262
on four."""
_CHECKED_ON_MORE = 125.0
"""The same on more nodes: 12 to 106, or 141 to 224."""
_SWEEP_LATENCY = 47e-6
"""Seconds of a step of a ring between that sweep's nodes: all-gathers of 1 GiB without checks reach 125, 76
and 45 GB/s among 128, 256 and 512 ranks (bench_final2, column AllGather)."""
_BUS_BANDWIDTH = re.compile(r"busbw GB/s: all-reduce (\d+(?:\.\d+)?)")


def _checks(said: str, nodes: int) -> tuple[float, float]:
    """Return the seconds of a rank of the node, and of another, in the check of a collective that a measured
    bus bandwidth implies, or 0. An all-reduce that waits for a message of each of n ranks loses half of its
    bandwidth with twice the ranks."""
    found = _BUS_BANDWIDTH.search(said)
    checked = found is not None and float(found[1]) < _CHECKED.get(nodes, _CHECKED_ON_MORE)
    return _CHECKS if checked else (0.0, 0.0)


def _per_node(read: GeneralCells, said: str) -> int | None:
    """Return the accelerators of a node, if the row states them."""
    if read.has("gpus_per_node"):
        return read.whole("gpus_per_node")
    stated = re.search(r"(\d+) GPUs a node", said)
    if stated and int(stated[1]) < 1:
        raise read.refused("interconnect", "at least 1 GPU a node")
    return int(stated[1]) if stated else None


_A_NODE = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?) ?G(?:bps|bit/s|b/s) (?:node-node|a node)")
_RATES = (
    (re.compile(r"(\d+) ?x ?(\d+) ?GB/s"), lambda m: float(m[1]) * float(m[2]) * 1e9),
    (re.compile(r"(\d+) ?x ?(?:OmniPath )?(\d+) ?G"), lambda m: float(m[1]) * float(m[2]) * 1e9 / 8),
    (_A_NODE, lambda m: float(m[1]) * 1e9 / 8),
)
"""Phrases for the rate of all NICs of a node, in bytes per second."""
_EACH = re.compile(r"(\d+)G (?:IB|RoCE) a GPU")


def _network(said: str, per_node: int) -> float | None:
    """Return the NICs' share of one accelerator, if the row states it. A node has eight accelerators."""
    if each := _EACH.search(said):
        return float(each[1]) * 1e9 / 8
    for pattern, rate in _RATES:
        if found := pattern.search(said):
            return rate(found) / per_node
    return None
