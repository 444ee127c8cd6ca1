"""Find a rank's place and device, and what the device can compute.

A job is refused before anything starts, or a fallback is used and reported. A memory budget becomes a
recompute setting by the planner's formula, so that every rank and every attempt finds the same.

    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT    as torchrun sets them
    SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID and the first node's name         instead, under Slurm

Where neither is set, the process is a world of one.
"""

import logging
import os
import re
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from myriad.comm.collectives import all_reduce_max
from myriad.comm.config import CommConfig
from myriad.comm.groups import Groups
from myriad.comm.layout import Layout
from myriad.comm.node_order import grid_rank
from myriad.errors import BadInputError
from myriad.job import Job, work_of
from myriad.job.job_steps import JobSteps
from myriad.kernels.attention_choice import (
    AttentionShape,
    check_attention,
    fallback_attention,
    fallback_pieces,
)
from myriad.kernels.choice import check_kernels, fallback, has_triton, in_interpreter
from myriad.kernels.config import Kernels
from myriad.optim.config import float8_scaling
from myriad.planner import layout_within
from myriad.program.config import OverlapConfig
from myriad.program.device_needs import rank_environment
from myriad.system.machine import cores_near_device, num_cores
from myriad.units import format_bytes

__all__ = [
    "RankEnvironment",
    "agree_on_kernels",
    "check_device_here",
    "choose_kernels",
    "describe_precision",
    "fix_order",
    "keep_memory_whole",
    "pick_device",
    "prepare_cuda",
    "read_rank_environment",
    "within_budget",
]

_COMM = CommConfig()
_LOG = logging.getLogger(__name__)
_FIXED_PRODUCTS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Without this setting, cuBLAS may choose another algorithm when several streams multiply (NVIDIA cuBLAS,
section 2.1.4)."""


@dataclass(frozen=True)
class RankEnvironment:
    """The rank of this process, and its index on its node."""

    rank: int
    """The rank in the grid: the launcher's rank, unless comm.node_order reorders the nodes."""
    world: int
    local_rank: int
    local_world: int


def _adopt_slurm() -> None:
    """Set torchrun's variables from Slurm's."""
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
    """Return the number of tasks of a node; ``2(x3),1`` means 2, 2, 2, 1."""
    counts: list[int] = []
    for tasks, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", listed):
        counts += [int(tasks)] * int(repeats or 1)
    return counts[node] if node < len(counts) else counts[-1]


def _first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list; ``rack[2-3]n[04,07-09],login`` begins with rack2n04."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    assert first is not None, "Slurm always names a node"
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first.group())


def read_rank_environment(world: int, comm: CommConfig = _COMM) -> RankEnvironment:
    """Return this process's place in a world of ``world`` ranks. Raises `BadInputError` if the launcher
    started another number of ranks."""
    _adopt_slurm()
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != world:
        allowed = f"the layout needs {world} ranks (dp x pp x cp x tp x ep)"
        raise BadInputError("WORLD_SIZE", started, allowed)
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", str(started)))
    return RankEnvironment(
        grid_rank(comm, world), started, int(os.environ.get("LOCAL_RANK", "0")), local_world
    )


def keep_memory_whole() -> None:
    """Make PyTorch's allocator use expandable segments, so that any free memory is usable for any size.

    Call it before this process first uses a GPU. A user's own setting stays.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def prepare_cuda(layout: Layout, overlap: OverlapConfig, *, deterministic: bool = False) -> None:
    """Set the variables that CUDA reads when a process first uses a GPU.

    They keep pipeline ranks from a deadlock (`myriad.program.device_check`), and make matrix products
    ``deterministic``. A user's own settings stay.
    """
    fixed = _FIXED_PRODUCTS if deterministic else {}
    for name, value in {**rank_environment(layout, overlap), **fixed}.items():
        os.environ.setdefault(name, value)


def fix_order(device: torch.device) -> None:
    """Make a GPU add in a fixed order from now on.

    Operators use PyTorch's deterministic kernels; operators that have none raise. New memory is not filled.
    """
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True)
        deterministic: Any = torch.utils.deterministic  # its stub lacks the switch
        deterministic.fill_uninitialized_memory = False


def _sum_in_float32() -> None:
    """Make split-K matrix products add their parts in float32.

    PyTorch's default lets cuBLAS add them in the type of the result."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def pick_device(kind: Literal["auto", "cpu", "cuda"], threads: int, place: RankEnvironment) -> torch.device:
    """Return the device of this rank, and set its number of threads.

    ``auto`` picks the CPU if the node has more ranks than GPUs, and is refused if other nodes have ranks too.
    With 0 threads, OMP_NUM_THREADS decides, else the node's cores are divided among its ranks. Raises
    `BadInputError` for a device that is missing.
    """
    if kind != "cpu" and _takes_gpu(kind, place):
        keep_memory_whole()
        torch.cuda.set_device(_on_machine(place)[0] % torch.cuda.device_count())
        device = torch.device("cuda", torch.cuda.current_device())
        _sum_in_float32()
        _stay_near(device)
        return device
    cores = num_cores()
    asked = os.environ.get("OMP_NUM_THREADS", "")
    own = threads or (int(asked) if asked.isdigit() else 0) or cores // place.local_world
    torch.set_num_threads(max(1, own))
    return torch.device("cpu")


def check_device_here(job: Job) -> None:
    """Refuse a GPU or Triton's kernels that the ranks of this machine would not have, before a run is
    written. Raises `BadInputError`."""
    asks = job.train.device == "cuda" or job.train.kernels == "triton"
    if not asks or job.resilience.engine != "local":
        return
    ranks = RankEnvironment(0, job.layout.world, 0, job.layout.world)
    on_gpu = job.train.device != "cpu" and _takes_gpu(job.train.device, ranks)
    kind = "cuda" if on_gpu else "cpu"
    check_kernels(job.train.kernels, kind, "float32", job.model.kernel_widths)


def _stay_near(device: torch.device) -> None:
    """Bind this rank to the cores on its GPU's NUMA node.

    Host memory for batches and snapshots is then near the GPU. Cores that the launcher excluded stay
    excluded.
    """
    found: Any = torch.cuda.get_device_properties(device)  # its stub lacks the PCI address
    address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    if cores := cores_near_device(address):
        os.sched_setaffinity(0, cores)


def _takes_gpu(kind: Literal["auto", "cuda"], place: RankEnvironment) -> bool:
    """Return whether this rank computes on a GPU. NCCL needs one GPU for each rank."""
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


def _on_machine(place: RankEnvironment) -> tuple[int, int]:
    """Return this rank's index among the ranks of its machine, and their number.

    All nodes that `myriad train` starts are on one machine; an empty MYRIAD_MACHINE marks this case.
    """
    if os.environ.get("MYRIAD_MACHINE") == "":
        return int(os.environ.get("RANK", "0")), place.world
    return place.local_rank, place.local_world


def _has_own_gpu(gpus: int) -> bool:
    """Return whether the launcher shows each rank a GPU of its own. Myriad's agents show all ranks of a
    node the same GPUs."""
    return gpus == 1 and bool(os.environ.get("CUDA_VISIBLE_DEVICES")) and "MYRIAD_EPOCH" not in os.environ


def choose_kernels(job: Job, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Check the job, and return lines about fallbacks. Raises `BadInputError` for a required feature that
    is unavailable."""
    asked, kind, name, model = job.train.kernels, device.type, _name(dtype), job.model
    on_gpu, fixed = kind == "cuda", job.train.deterministic
    if on_gpu and fixed and asked == "plain":
        raise BadInputError(
            "train.deterministic", True, "needs train.kernels = auto: the plain kernels add with atomics"
        )
    shape = AttentionShape(
        kind,
        name,
        model.sequence,
        model.head_width,
        model.window,
        deterministic=on_gpu and fixed,
        interpreted=in_interpreter(),
        capped=model.has_capped_scores,
    )
    check_kernels(asked, kind, name, model.kernel_widths)
    check_attention(asked, shape)
    in_ring = fallback_pieces(asked, shape._replace(capped=model.attention_softcap is not None))
    of_attention = in_ring if job.layout.cp > 1 else fallback_attention(asked, shape)
    lines = [fallback(asked, kind, name, model.kernel_widths), of_attention]
    scaling = float8_scaling(job.train.precision)
    without = kind == "cpu" or asked == "plain" or not has_triton()
    if (scaling == "blocks" and without) or (scaling == "tensor" and kind == "cpu"):
        lines.append(f"{job.train.precision} is emulated here: the same numbers, slower than {name}")
    if kind == "cpu" and job.train.cuda_graphs:
        lines.append("no CUDA graphs here: operators are started one by one")
    return [line for line in lines if line]


def agree_on_kernels(
    kernels: Kernels, doubt: str, groups: Groups, device: torch.device
) -> tuple[Kernels, str]:
    """Return the kernels that every rank uses, and a line if they differ from ``kernels``.

    If one rank finds a Triton kernel to be wrong on its GPU, all ranks use the plain operators. Replicas that
    compute in different ways would drift apart. ``doubt`` is this rank's own line, empty if its kernels are
    right. All ranks call it together."""
    world = groups.grid.layout.world
    first = torch.tensor([groups.grid.rank if doubt else world], dtype=torch.int32, device=device)
    rank = -int(all_reduce_max(-first, groups.world))
    if rank == world or doubt:
        return kernels, doubt
    return "plain", f"without Triton's kernels: rank {rank} found some to be wrong"


def describe_precision(job: Job, dtype: torch.dtype) -> str:
    """Return the precision as text for users."""
    asked = job.train.precision
    return f"{asked} in {_name(dtype)}" if float8_scaling(asked) is not None else _name(dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_OF_BUDGET = ("recompute", "recompute_ratio", "offload_optimizer", "offload_optimizer_ratio")
"""Keys of the layout that a memory budget sets."""


def _fits_like(layout: Layout, other: Layout) -> Layout:
    """Return the layout with what makes another one fit its budget."""
    return layout.model_copy(update={key: getattr(other, key) for key in _OF_BUDGET})


def within_budget(job: Job, *, on_cpu: bool, value_bytes: int) -> tuple[Job, str]:
    """Return the job with what it recomputes and keeps in host memory to fit its budget, and a line about it.
    Without a budget, the job is unchanged and the line empty.

    Raises `BadInputError` when nothing fits.
    """
    budget = job.train.memory_budget
    if budget is None:
        return job, ""
    layout = job.layout
    for changed in JobSteps(job).phase_jobs:  # the setting that fits every phase
        work = replace(work_of(changed, value_bytes), layout=_fits_like(changed.layout, layout))
        offloads = job.train.memory_offload == "auto"
        layout = _fits_like(layout, layout_within(work, budget, on_cpu=on_cpu, offloads=offloads))
    share = f" of {layout.recompute_ratio:.0%} of the layers" if layout.recompute == "full" else ""
    if layout.offload_optimizer:
        share += f", optimizer state of {layout.offload_optimizer_ratio:.0%} of the chunks in host memory"
    line = f"recompute {layout.recompute}{share}, to hold at most {format_bytes(budget)}"
    return job.model_copy(update={"layout": layout}), line
