"""The least recomputation, and offloading, with which a rank fits a memory budget.

    none          no recomputation
    selective     outputs of norms and activation functions: a few passes over memory
    full, 1/n     all of a layer but its input, for the first layer of each stage, then for two, ...

The search starts at the layout's own setting and takes the first one whose peak (`rank_memory`) is within the
budget. Each setting needs less memory and more compute than those before it.

If the job allows it, optimizer state may be in host memory. The first setting that fits with that of all
chunks is taken, with that of as few chunks as make it fit: state crosses the link to the host twice a step,
while every micro-batch is computed again.
"""

from collections.abc import Iterator
from dataclasses import replace

from myriad.comm.layout import Layout
from myriad.errors import BadInputError
from myriad.planner.cost.stage_layers import stage_layers
from myriad.planner.memory.rank_memory import memory_of_ranks
from myriad.planner.workload import Workload
from myriad.program.build import count_chunks
from myriad.units import format_bytes

__all__ = ["check_budget", "layout_within", "needed_bytes"]


def needed_bytes(workload: Workload, *, on_cpu: bool, node_size: int | None = None) -> float:
    """Return the peak bytes of the rank that needs most. The arguments are those of `memory_of_ranks`."""
    return max(
        float(memory.total) for memory in memory_of_ranks(workload, on_cpu=on_cpu, node_size=node_size)
    )


def check_budget(
    workload: Workload, budget_bytes: float, device: str, precision: str, *, offloads: bool = False
) -> None:
    """Check a budget before "auto" is resolved to a device and type. Raises `BadInputError` when no setting
    fits on any possible combination."""
    refused = None
    for on_cpu in {"cpu": (True,), "cuda": (False,)}.get(device, (False, True)):
        for value_bytes in {"float32": (4,), "bfloat16": (2,), "float16": (2,)}.get(precision, (2, 4)):
            try:
                work = replace(workload, value_bytes=value_bytes)
                layout_within(work, budget_bytes, on_cpu=on_cpu, offloads=offloads)
                return
            except BadInputError as error:
                refused = refused or error
    assert refused is not None
    raise refused


def layout_within(
    workload: Workload,
    budget_bytes: float,
    *,
    on_cpu: bool,
    node_size: int | None = None,
    offloads: bool = False,
) -> Layout:
    """Return the workload's layout with the recomputation that fits, and with ``offloads`` the state of as
    few chunks in host memory. Raises `BadInputError` when none does."""
    needed = 0.0

    def fits(layout: Layout) -> bool:
        nonlocal needed
        changed = replace(workload, layout=layout)
        needed = needed_bytes(changed, on_cpu=on_cpu, node_size=node_size)
        return needed <= budget_bytes

    for layout in _steps(workload):
        *fewer, most = _offloaded(replace(workload, layout=layout)) if offloads else [layout]
        if fits(most):
            return next(filter(fits, fewer), most)
    allowed = f"at least {format_bytes(int(needed))} here, with every layer computed again"
    raise BadInputError("train.memory_budget", format_bytes(int(budget_bytes)), allowed)


def _steps(workload: Workload) -> Iterator[Layout]:
    """Yield the layout as it is, then with more and more recomputation."""
    layout = workload.layout
    yield layout
    if layout.recompute == "none":
        yield layout.model_copy(update={"recompute": "selective"})
    most = max(len(stage) for stage in stage_layers(workload))
    done = layout.recompute_ratio * most if layout.recompute == "full" else 0
    for count in range(int(done) + 1, most + 1):
        yield layout.model_copy(update={"recompute": "full", "recompute_ratio": count / most})


def _offloaded(workload: Workload) -> Iterator[Layout]:
    """Yield the layout as it is, then with the optimizer state of more and more chunks in host memory."""
    layout = workload.layout
    yield layout
    all_states = layout.model_copy(update={"offload_optimizer": True, "offload_optimizer_ratio": 1.0})
    chunks = count_chunks(all_states, workload.overlap, stage_layers(workload))
    done = layout.offload_optimizer_ratio * chunks if layout.offload_optimizer else 0
    for count in range(int(done) + 1, chunks + 1):
        yield all_states.model_copy(update={"offload_optimizer_ratio": count / chunks})
