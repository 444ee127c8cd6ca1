"""From a job and the environment to everything a rank needs.

    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT    as torchrun sets them
    SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID and the first node's name         instead, under Slurm

Where neither is set, the process is a world of one.
"""

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from myriad.comm.config import CommConfig
from myriad.comm.groups import Groups
from myriad.comm.hierarchy import HIERARCHIES
from myriad.comm.layout import AXES, Layout
from myriad.comm.node_order import grid_rank
from myriad.comm.sites import settle_hierarchy
from myriad.errors import BadInputError
from myriad.job import Job
from myriad.machine import cores_near_device, num_cores
from myriad.model.definition import Definition
from myriad.parallel.runtime import Batch
from myriad.program.config import OverlapConfig
from myriad.program.device_needs import rank_environment
from myriad.program.partition import partition_layers
from myriad.train.measured_files import keep_measured, read_measured
from myriad.train.profile import parameters_per_layer, seconds_per_layer

__all__ = [
    "Place",
    "find_place",
    "fix_order",
    "keep_memory_whole",
    "pick_device",
    "prepare_cuda",
    "settle_links",
    "stage_layers",
]

_COMM = CommConfig()
_LOG = logging.getLogger(__name__)
_FIXED_PRODUCTS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Else cuBLAS may choose otherwise when several streams multiply (NVIDIA cuBLAS, section 2.1.4)."""
_PLACEMENT = {"node_size", "switch_size", "node_bandwidth", "network_bandwidth", "switch_bandwidth"}


@dataclass(frozen=True)
class Place:
    """Which rank this process is, and where."""

    rank: int
    """In the grid: the launcher's, unless comm.node_order says otherwise."""
    world: int
    local_rank: int
    local_world: int


def _adopt_slurm() -> None:
    """Fills what torchrun would have set from Slurm's variables."""
    slurm = os.environ
    if "RANK" in slurm or "SLURM_PROCID" not in slurm:
        return
    per_node = slurm.get("SLURM_STEP_TASKS_PER_NODE", slurm.get("SLURM_NTASKS", "1"))
    nodes = slurm.get("SLURM_STEP_NODELIST", slurm.get("SLURM_JOB_NODELIST", "localhost"))
    os.environ |= {
        "RANK": slurm["SLURM_PROCID"],
        "WORLD_SIZE": slurm.get("SLURM_STEP_NUM_TASKS", slurm.get("SLURM_NTASKS", "1")),
        "LOCAL_RANK": slurm.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(_tasks_of_node(per_node, int(slurm.get("SLURM_NODEID", "0")))),
    }
    os.environ.setdefault("MASTER_ADDR", _first_host(nodes))
    os.environ.setdefault("MASTER_PORT", str(20000 + int(slurm.get("SLURM_JOB_ID", "0")) % 20000))


def _tasks_of_node(listed: str, node: int) -> int:
    """``2(x3),1`` is 2, 2, 2, 1."""
    counts: list[int] = []
    for tasks, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", listed):
        counts += [int(tasks)] * int(repeats or 1)
    return counts[node] if node < len(counts) else counts[-1]


def _first_host(nodes: str) -> str:
    """``rack[2-3]n[04,07-09],login`` begins with rack2n04."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    assert first is not None, "Slurm always names a node"
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first.group())


def find_place(world: int, comm: CommConfig = _COMM) -> Place:
    """This process's place in a world of ``world`` ranks. Raises `BadInputError` when the launcher made
    another number."""
    _adopt_slurm()
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != world:
        allowed = f"the layout needs {world} ranks (dp x pp x cp x tp x ep)"
        raise BadInputError("WORLD_SIZE", started, allowed)
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", str(started)))
    return Place(grid_rank(comm, world), started, int(os.environ.get("LOCAL_RANK", "0")), local_world)


def keep_memory_whole() -> None:
    """Before this process first touches a GPU: PyTorch's allocator maps pages behind one another instead of
    holding blocks of the sizes that were once asked for, so that what is free is usable for any size. A
    user's own setting stays."""
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def prepare_cuda(layout: Layout, overlap: OverlapConfig, *, deterministic: bool = False) -> None:
    """Before this process first asks for a GPU: set what CUDA reads then, so that pipeline ranks do not wait
    for each other for ever (`myriad.program.device_check`), and so that products are ``deterministic``. A
    user's own settings stay."""
    fixed = _FIXED_PRODUCTS if deterministic else {}
    for name, value in {**rank_environment(layout, overlap), **fixed}.items():
        os.environ.setdefault(name, value)


def fix_order(device: torch.device) -> None:
    """Add in a fixed order on a GPU from now on: operators take PyTorch's deterministic kernels, and those
    that have none raise. New memory is not filled for it."""
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True)
        deterministic: Any = torch.utils.deterministic  # its stub lacks the switch
        deterministic.fill_uninitialized_memory = False


def pick_device(kind: Literal["auto", "cpu", "cuda"], threads: int, place: Place) -> torch.device:
    """The device of this rank, with its threads set; ``auto`` is the CPU where the node's ranks are more than
    its GPUs, and is refused there if other nodes have ranks too.

    0 threads: as OMP_NUM_THREADS says, else the node's cores divided among its ranks. Raises `BadInputError`
    for a device that is not there."""
    if kind != "cpu" and _takes_gpu(kind, place):
        keep_memory_whole()
        torch.cuda.set_device(_on_machine(place)[0] % torch.cuda.device_count())
        device = torch.device("cuda", torch.cuda.current_device())
        _stay_near(device)
        return device
    cores = num_cores()
    asked = os.environ.get("OMP_NUM_THREADS", "")
    own = threads or (int(asked) if asked.isdigit() else 0) or cores // place.local_world
    torch.set_num_threads(max(1, own))
    return torch.device("cpu")


def _stay_near(device: torch.device) -> None:
    """Bind this rank to the cores on its GPU's NUMA node, so that its host memory, which batches and
    snapshots are copied through, is near the GPU. Cores that the launcher took away stay away."""
    found: Any = torch.cuda.get_device_properties(device)  # its stub lacks the PCI address
    address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    if cores := cores_near_device(address):
        os.sched_setaffinity(0, cores)


def _takes_gpu(kind: Literal["auto", "cuda"], place: Place) -> bool:
    """Whether this rank computes on a GPU. NCCL gives each rank one of its own, or nothing."""
    if not torch.cuda.is_available():
        if kind == "cuda":
            raise BadInputError("train.device", kind, "no CUDA device here; cpu or auto")
        return False
    gpus, (index, ranks) = torch.cuda.device_count(), _on_machine(place)
    if ranks <= gpus or _has_own_gpu(gpus):
        return True
    if kind == "cuda" or place.world > ranks:  # other nodes may have enough, and all ranks must do the same
        allowed = f"cpu: {ranks} ranks on this machine, and GPUs for {gpus} of them"
        raise BadInputError("train.device", kind, allowed)
    if index == 0:
        _LOG.warning("on the CPU: %d ranks on this machine, and GPUs for %d of them", ranks, gpus)
    return False


def _on_machine(place: Place) -> tuple[int, int]:
    """This rank's number among those of its machine, and how many they are. All nodes that `myriad train`
    starts are on one, which it marks by a machine without a name."""
    if os.environ.get("MYRIAD_MACHINE") == "":
        return int(os.environ.get("RANK", "0")), place.world
    return place.local_rank, place.local_world


def _has_own_gpu(gpus: int) -> bool:
    """Whether the launcher shows each rank a GPU of its own; Myriad's agents show all ranks of a node the
    same ones."""
    return gpus == 1 and bool(os.environ.get("CUDA_VISIBLE_DEVICES")) and "MYRIAD_EPOCH" not in os.environ


def stage_layers(
    definition: Definition,
    layout: Layout,
    groups: Groups,
    sample: Batch,
    dtype: torch.dtype,
    kept: Path | None = None,
) -> Sequence[range]:
    """Layers of each stage. A profile is measured once and kept in ``kept``, so that a resumed run cuts
    alike."""
    costs: Sequence[float] | None = None
    if layout.partition == "parameters":
        costs = parameters_per_layer(definition)
    elif layout.partition == "profile":
        costs = _profile(definition, groups, sample, dtype, kept)
    return partition_layers(layout.partition, layout.num_stages, definition.kinds, costs)


def _profile(
    definition: Definition, groups: Groups, sample: Batch, dtype: torch.dtype, kept: Path | None
) -> Sequence[float]:
    """Rank 0 reads or measures, and tells the others."""
    costs: Sequence[float] | None = None
    if groups.grid.rank == 0:
        costs = read_measured(kept, partial(_are_costs, len(definition.names)))
        if costs is None:
            costs = seconds_per_layer(definition, sample, dtype)
            keep_measured(kept, costs)
    return _told_by_first(costs, groups)


def settle_links(job: Job, groups: Groups, device: torch.device, kept: Path | None = None) -> CommConfig:
    """``job.comm`` with the hierarchy chosen. What was measured is kept in ``kept`` for each layout and
    placement, so that a resumed run adds up in the same order."""
    comm = job.comm
    if comm.hierarchy != "auto" or comm.sync_every > 1:
        return comm
    where = comm.model_dump(mode="json", include=_PLACEMENT) | {
        "layout": [getattr(job.layout, axis) for axis in AXES],
        "ranks_of_node": int(os.environ.get("LOCAL_WORLD_SIZE", str(job.layout.world))),
    }
    if comm.node_order is not None:
        where["node_order"] = list(comm.node_order)
    first = groups.grid.rank == 0
    choices = (read_measured(kept, _are_choices) or []) if first else []
    known = next((choice["hierarchy"] for choice in choices if choice["where"] == where), None)
    known = _told_by_first(known, groups)
    if known is None:
        known, _ = settle_hierarchy(groups, "dp", comm, device)
        if first:
            keep_measured(kept, [*choices, {"where": where, "hierarchy": known}])
    return comm.model_copy(update={"hierarchy": known})


def _are_costs(num_layers: int, value: Any) -> bool:
    """Seconds of each layer."""
    if not isinstance(value, list) or len(value) != num_layers:
        return False
    return all(isinstance(one, float | int) and 0 <= one < float("inf") for one in value)


def _are_choices(value: Any) -> bool:
    """What `settle_links` has kept."""
    return isinstance(value, list) and all(
        isinstance(one, dict) and "where" in one and one.get("hierarchy") in HIERARCHIES for one in value
    )


def _told_by_first(value: Any, groups: Groups) -> Any:
    """Rank 0's, on every rank."""
    told = [value]
    if groups.world is not None:
        dist.broadcast_object_list(told, src=0)
    return told[0]
