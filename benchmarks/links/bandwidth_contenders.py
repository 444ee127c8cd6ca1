"""Who takes part in `bandwidth.py`, in which settings, and what each must move at least.

Bytes are those that the busiest host must send in one step (links carry as much the other way at the same
time), without headers:

    data        2 (h - 1) / h x 4 P                  a sum over h hosts, however it is cut: P parameters
    tensor      (h - 1) / h x 4 T H x (8 L + 4)      a gather and a scatter for each of two branches, forward
                                                     and backward, in L layers; embedding and head one each
                                                     way
    pipeline    4 T H for each boundary between stages on different hosts, on the side that sends it: forward
                activations one way, gradients the other

Legend: T tokens of the global batch, H hidden, L layers.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from myriad.program.schedules import schedule as program_of

sys.path.insert(0, str(Path(__file__).parents[1]))

from peers.deepspeed_peer import DeepSpeed
from peers.myriad_side import Myriad
from peers.torch_peers import data_parallel, pipeline, tensor_parallel
from peers.work import Contender, Work

__all__ = ["Machines", "Setting", "all_settings", "data_bytes", "pipeline_bytes", "tensor_bytes"]

OURS = "Myriad"


@dataclass(frozen=True)
class Machines:
    """Hosts and ranks."""

    num_hosts: int
    ranks_per_host: int

    @property
    def world(self) -> int:
        return self.num_hosts * self.ranks_per_host


@dataclass(frozen=True)
class Setting:
    """One contender with one choice of its knobs."""

    contender: str
    kind: str
    """data, tensor, pipeline or mixed."""
    knobs: str
    make: Callable[[Work], Contender]
    least_bytes: float
    """That its kind must send from the busiest host in a step."""

    @property
    def is_ours(self) -> bool:
        return self.contender.startswith(OURS)


def data_bytes(work: Work, num_hosts: int) -> float:
    """Gradients of all parameters summed over hosts."""
    return 2 * (num_hosts - 1) / num_hosts * 4 * work.parameters


def tensor_bytes(work: Work, world: int, num_hosts: int) -> float:
    """Gathers and scatters of the residual stream; ranks of one host send one part out for all of them."""
    remote = (num_hosts - 1) / num_hosts
    return remote * 4 * work.tokens * work.hidden * (8 * work.layers + 4) if world > 1 else 0.0


def pipeline_bytes(work: Work, rank_of_stage: Sequence[int], ranks_per_host: int) -> float:
    """Activations down and gradients up, over every boundary between two hosts."""
    boundaries, hosts = Counter[int](), [rank // ranks_per_host for rank in rank_of_stage]
    for sender, receiver in pairwise(hosts):
        if sender != receiver:
            boundaries[sender] += 1
            boundaries[receiver] += 1
    return 4 * work.tokens * work.hidden * max(boundaries.values(), default=0)


def all_settings(work: Work, machines: Machines, *, with_deepspeed: bool) -> list[Setting]:
    """Return the settings of every contender; its best setting at a rate counts."""
    settings = [*_ours(work, machines), *_torch_data(work, machines), *_torch_tensor(work, machines)]
    settings += _torch_pipelines(work, machines)
    return settings + (list(_deepspeed(work, machines)) if with_deepspeed else [])


def _micro_batches(work: Work, replicas: int, sizes: Sequence[int]) -> list[int]:
    return [size for size in sizes if work.global_batch % (replicas * size) == 0]


_ONE_STAGE = ("zero-bubble", "eager-1f1b", "eager-zero-bubble")


def _ours(work: Work, machines: Machines) -> Iterator[Setting]:
    """The layouts and overlap settings that Myriad is tried in: the one place to add to."""
    world, share = machines.world, work.global_batch // machines.world
    moved = data_bytes(work, machines.num_hosts)
    for zero in (0, 1, 2):
        yield _layout("data", moved, dp=world, zero=zero, micro_batch=share)
    moved = tensor_bytes(work, world, machines.num_hosts)
    for size in _micro_batches(work, 1, (2, 4, 8)):
        for hides in (True, False):
            yield _layout("tensor", moved, {"tensor": hides}, tp=world, micro_batch=size)
    for virtual_stages in (1, 2, 4):
        schedules = {1: _ONE_STAGE, 2: ("interleaved", "zero-bubble-v")}.get(virtual_stages, ("interleaved",))
        num_stages = world * virtual_stages
        if num_stages > work.layers + 2:
            continue
        for schedule in schedules:
            places = program_of(schedule, world, virtual_stages, 1).stage_rank
            moved = pipeline_bytes(work, places, machines.ranks_per_host)
            layout: dict[str, Any] = {"pp": world, "virtual_stages": virtual_stages, "schedule": schedule}
            for size in _micro_batches(work, 1, (1, 2)):
                yield _layout("pipeline", moved, **layout, micro_batch=size)
    yield from _our_mixes(work, machines)


def _our_mixes(work: Work, machines: Machines) -> Iterator[Setting]:
    """Tensor parallelism or replicas inside the hosts, pipeline or replicas between them."""
    hosts, local = machines.num_hosts, machines.ranks_per_host
    if hosts == 1 or local == 1:
        return
    across = pipeline_bytes(work, range(hosts), 1)
    summed = data_bytes(work, hosts)
    for size in _micro_batches(work, 1, (1, 2)):
        yield _layout("mixed", across, pp=hosts, tp=local, micro_batch=size)
    yield _layout("mixed", summed, dp=hosts, tp=local, micro_batch=work.global_batch // hosts)


def _layout(kind: str, least_bytes: float, overlap: dict[str, Any] | None = None, **layout: Any) -> Setting:
    said = {**layout, **(overlap or {})}
    knobs = ", ".join(f"{key} {value}" for key, value in said.items() if value not in (None, kind))
    make = partial(Myriad, layout=layout, overlap=overlap)
    return Setting(f"{OURS}, {kind}", kind, knobs.replace("_", " "), make, least_bytes)


def _torch_data(work: Work, machines: Machines) -> Iterator[Setting]:
    moved = data_bytes(work, machines.num_hosts)
    for size in (1, 4, 25):
        yield Setting("DDP", "data", f"buckets of {size} MiB", partial(data_parallel, bucket_mib=size), moved)
    for reshard in (False, True):
        words = "reshard after forward" if reshard else "keep after forward"
        yield Setting("FSDP2", "data", words, partial(data_parallel, reshard=reshard), moved)


def _torch_tensor(work: Work, machines: Machines) -> Iterator[Setting]:
    moved = tensor_bytes(work, machines.world, machines.num_hosts)
    for sequence in (False, True):
        words = "sequence parallel" if sequence else "whole stream"
        yield Setting("DTensor", "tensor", words, partial(tensor_parallel, sequence=sequence), moved)


def _torch_pipelines(work: Work, machines: Machines) -> Iterator[Setting]:
    world = machines.world
    rings = {v: [stage % world for stage in range(world * v)] for v in (1, 2)}
    valley = [*range(world), *reversed(range(world))]
    for contender, schedule, stages in (
        ("torch 1F1B", "1f1b", rings[1]),
        ("torch interleaved", "interleaved", rings[2]),
        ("torch zero-bubble", "interleaved-zero-bubble", rings[2]),
        ("torch zero-bubble", "zbv", valley),
    ):
        moved = pipeline_bytes(work, stages, machines.ranks_per_host)
        virtual_stages = len(stages) // world
        for size in _micro_batches(work, 1, (1, 2)):
            make = partial(pipeline, schedule=schedule, virtual_stages=virtual_stages, micro_batch=size)
            yield Setting(contender, "pipeline", f"{schedule}, micro batch {size}", make, moved)


def _deepspeed(work: Work, machines: Machines) -> Iterator[Setting]:
    moved = data_bytes(work, machines.num_hosts)
    for zero in (1, 2, 3):
        yield Setting(f"DeepSpeed ZeRO-{zero}", "data", "", partial(DeepSpeed, zero=zero), moved)
    moved = pipeline_bytes(work, range(machines.world), machines.ranks_per_host)
    for size in _micro_batches(work, 1, (1, 2)):
        make = partial(DeepSpeed, micro_batch=size)
        yield Setting("DeepSpeed pipeline", "pipeline", f"micro batch {size}", make, moved)
