"""Whether this machine can hold a job's ranks at all: said in a line before one starts, not by the kernel
that kills one when the machine has stood still for minutes.

Only what is certain counts: parameters, gradients and optimizer states of all ranks, by the formula of
`docs/memory.md` (`myriad.planner.rank_memory`), against all memory of the machine, also what is in use now:
ranks of this run may still be at work. Where a GPU may hold them, snapshots in the machine's memory count.
"""

from pathlib import Path

from myriad.checkpoint.config import num_slots
from myriad.errors import BadInputError
from myriad.job import Job, work_of
from myriad.machine import memory_bytes
from myriad.planner.rank_memory import memory_of_ranks
from myriad.units import format_bytes

__all__ = ["check_local_memory", "uses_gpus"]

_BYTES_OF_A_PARAMETER = 12
"""At least, among all ranks: its float32 master value and AdamW's or LAMB's two moments."""
_GPU_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
"""NVIDIA's and AMD's (torch, which would know better, takes a second to import)."""


def check_local_memory(job: Job, machine_bytes: float | None = None) -> None:
    """Refuses a job whose ranks need more than ``machine_bytes``, by default what this machine has. Raises
    `BadInputError`."""
    there = machine_bytes or float(memory_bytes())
    needed = float(_BYTES_OF_A_PARAMETER * job.model.num_parameters())
    if uses_gpus(job):
        _check_snapshots(job, needed, there)
        return
    if needed <= there:  # else the formula may take a minute, of a million layers, to say more of the same
        needed = _states_bytes(job)
    if needed > there:
        key = f"memory for {job.name}'s parameters and their states"
        most = format_bytes(int(there))
        allowed = f"at most {most}, all that this machine has; `myriad plan` says where it fits"
        raise BadInputError(key, format_bytes(int(needed)), allowed)


def _check_snapshots(job: Job, state_bytes: float, there: float) -> None:
    """The memory of snapshots is touched and pinned at the start: what is too much, the kernel kills a rank
    for."""
    slots = num_slots(job.checkpoint, several_nodes=False, compares=job.compares_replicas)
    if slots * state_bytes > there:
        key = f"memory for {slots} snapshots of {job.name}'s parameters and their states"
        fewer = (
            "; checkpoint.memory_every = 0 needs two snapshots less" if job.checkpoint.memory_every else ""
        )
        allowed = f"at most {format_bytes(int(there))}, all that this machine has{fewer}"
        raise BadInputError(key, format_bytes(int(slots * state_bytes)), allowed)


def uses_gpus(job: Job) -> bool:
    """Whether ranks on this machine would take GPUs, as far as can be told without asking for one."""
    has_gpu = any(driver.exists() for driver in _GPU_DRIVERS)
    return job.train.device == "cuda" or (job.train.device == "auto" and has_gpu)


def _states_bytes(job: Job) -> float:
    """Of all ranks, in the narrowest type that the job's precision can mean."""
    value_bytes = 4 if job.train.precision == "float32" else 2
    ranks = memory_of_ranks(work_of(job, value_bytes), on_cpu=True)
    each = sum(float(one.weights + one.gradients + one.optimizer) for one in ranks)
    return each * job.layout.world / len(ranks)
