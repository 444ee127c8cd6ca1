"""As little recomputation as makes a rank fit a memory budget.

    none          nothing is computed again
    selective     outputs of norms and activation functions: a few passes over memory
    full, 1/n     all of a layer but its input, for the first layer of each stage, then for two, ...

Of these, from the one that the layout says on, the first whose highest moment (`rank_memory`) is within the
budget is taken: each holds less than those before it and computes more.
"""

from collections.abc import Iterator
from dataclasses import replace

from myriad.comm.layout import Layout
from myriad.errors import BadInputError
from myriad.planner.costs import stage_layers
from myriad.planner.rank_memory import memory_of_ranks
from myriad.planner.work import Work
from myriad.units import format_bytes

__all__ = ["check_budget", "layout_within", "needed_bytes"]


def needed_bytes(work: Work, *, on_cpu: bool) -> float:
    """Of the rank that needs most, at its highest moment."""
    return max(float(memory.total) for memory in memory_of_ranks(work, on_cpu=on_cpu))


def check_budget(work: Work, budget_bytes: float, device: str, precision: str) -> None:
    """Before it is known which device and type "auto" is: raises `BadInputError` when nothing fits on any
    that it may be."""
    refused = None
    for on_cpu in {"cpu": (True,), "cuda": (False,)}.get(device, (False, True)):
        for value_bytes in {"float32": (4,), "bfloat16": (2,), "float16": (2,)}.get(precision, (2, 4)):
            try:
                layout_within(replace(work, value_bytes=value_bytes), budget_bytes, on_cpu=on_cpu)
                return
            except BadInputError as error:
                refused = refused or error
    assert refused is not None
    raise refused


def layout_within(work: Work, budget_bytes: float, *, on_cpu: bool) -> Layout:
    """The work's layout with its recomputation set. Raises `BadInputError` when nothing fits."""
    needed = 0.0
    for layout in _steps(work):
        changed = replace(work, layout=layout)
        needed = needed_bytes(changed, on_cpu=on_cpu)
        if needed <= budget_bytes:
            return layout
    allowed = f"at least {format_bytes(int(needed))} here, with every layer computed again"
    raise BadInputError("train.memory_budget", format_bytes(int(budget_bytes)), allowed)


def _steps(work: Work) -> Iterator[Layout]:
    """From what the layout says to all of it."""
    layout = work.layout
    yield layout
    if layout.recompute == "none":
        yield layout.model_copy(update={"recompute": "selective"})
    most = max(len(stage) for stage in stage_layers(work))
    done = layout.recompute_ratio * most if layout.recompute == "full" else 0
    for count in range(int(done) + 1, most + 1):
        yield layout.model_copy(update={"recompute": "full", "recompute_ratio": count / most})
