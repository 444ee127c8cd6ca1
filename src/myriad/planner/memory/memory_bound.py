"""A lower bound of a layout's peak memory, for which no program is built.

A layout above a capacity by this bound never fits. The bound is the largest, over pipeline ranks, of the sum
of

    always         values, master values, gradients and moments that the rank never frees
    the larger of
    one compute    a micro-batch's bytes at the higher peak of its forward and backward in one stage, with the
                   stage's parameters (ZeRO 3) and gradients (ZeRO 2 and 3)
    one update     a stage's optimizer state, if it is in host memory before and after

so it leaves out messages, further micro-batches in flight, receive buffers and the margin. `rank_memory`
counts all of them.
"""

from collections.abc import Sequence

from myriad.planner.cost.stage_layers import stage_layers
from myriad.planner.memory.stage_memory import StageMemory
from myriad.planner.workload import Workload
from myriad.program.build import count_chunks
from myriad.program.partition import cut_ranges, num_recomputed
from myriad.program.schedules import stage_owners

__all__ = ["least_bytes"]


def least_bytes(workload: Workload, *, on_cpu: bool) -> float:
    """Return a lower bound of the fullest rank's bytes at its peak."""
    layout = workload.layout
    layers_of_stage = stage_layers(workload)
    num_chunks = count_chunks(layout, workload.overlap, layers_of_stage)
    model = StageMemory(workload, cut_ranges(layers_of_stage, num_chunks), on_cpu)
    stages_of: list[list[int]] = [[] for _ in range(layout.pp)]
    for stage, rank in enumerate(stage_owners(layout.schedule_name, layout.pp, layout.virtual_stages)):
        stages_of[rank] += range(stage * num_chunks, (stage + 1) * num_chunks)
    captures = workload.profile.cuda_graphs and not on_cpu
    count = num_recomputed(num_chunks, layout.offload_optimizer_ratio) if layout.offload_optimizer else 0

    def passing(stage: int) -> float:
        compute = 0.0 if captures else _one_compute(model, stage)
        return max(compute, _state(model, stage) if stage % num_chunks < count else 0.0)

    return max(_always_held(model, stages) + max(map(passing, stages)) for stages in stages_of)


def _always_held(model: StageMemory, stages: Sequence[int]) -> float:
    """Return the bytes of values, master values, gradients and moments that are never freed."""
    workload, zero = model.workload, model.workload.layout.zero
    elements, experts = sum(map(model.chunk, stages)), sum(map(model.expert_chunk, stages))
    if {0, len(model.layers) - 1} & {*stages}:
        elements += model.padded(model.table)
    part = elements / workload.layout.num_shards + experts / workload.layout.num_expert_shards
    elements += experts
    values = elements * workload.value_bytes if zero < 3 else 0.0
    master = 0.0 if workload.value_bytes == 4 and zero < 3 else 4 * part
    if workload.offloads_master:
        master = workload.value_bytes * part if zero == 3 else 0.0
    moments = 0.0 if workload.layout.offload_optimizer else 4 * part * (1 if workload.orthogonalizes else 2)
    frees = workload.overlap.updates_early and zero < 2
    each = workload.profile.memory.gradient_buffer_bytes
    return values + master + moments + (0.0 if frees else each * (part if zero >= 2 else elements))


def _state(model: StageMemory, stage: int) -> float:
    """Return the least bytes of a stage's optimizer state that rests in host memory."""
    workload = model.workload
    part = model.chunk(stage) / workload.layout.num_shards
    part += model.expert_chunk(stage) / workload.layout.num_expert_shards
    return 4 * part * (int(workload.offloads_master) + (1 if workload.orthogonalizes else 2))


def _one_compute(model: StageMemory, stage: int) -> float:
    """Return the bytes of one micro-batch at the higher peak of its forward and backward in a stage, and of
    temporary parameters and gradients."""
    zero, elements = model.workload.layout.zero, model.chunk(stage) + model.expert_chunk(stage)
    every = [model.held(stage, turns=turns) for turns in (False, True)]
    values = elements * model.workload.value_bytes if zero == 3 else 0.0
    backward = [
        one.kept + one.head_bytes + min(one.in_backward[0], one.in_split_backward[0]) for one in every
    ]
    forward = min(one.in_forward[0] for one in every)
    each = model.workload.profile.memory.gradient_buffer_bytes
    return values + max(forward, min(backward) + (each * elements if zero >= 2 else 0.0))
