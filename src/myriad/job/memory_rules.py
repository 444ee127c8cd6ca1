"""Rules of what a rank recomputes or keeps in host memory, each a function.

They raise `BadInputError`. `myriad.job.job_rules` calls them among its own.
"""

from collections.abc import Callable

from myriad.comm.layout import lacks_for_offload
from myriad.errors import need
from myriad.job.job_values import JobValues, work_of

__all__ = ["MEMORY_RULES", "check_offload"]


def _check_recompute_ratio(job: JobValues) -> None:
    layout, allowed = job.layout, "1.0, unless layout.recompute = full"
    needs = layout.recompute != "full" and layout.recompute_ratio != 1.0
    need(not needs, "layout.recompute_ratio", layout.recompute_ratio, allowed)


def check_offload(job: JobValues) -> None:
    """Refuse moments in host memory that cannot be there, and keys about them that say nothing."""
    layout, budget, asked = job.layout, job.train.memory_budget, job.train.memory_offload
    lacks = lacks_for_offload(layout, job.overlap, job.optimizer.name)
    need(not lacks, "layout.offload_optimizer", True, f"needs {lacks}")
    ratio, allowed = layout.offload_optimizer_ratio, "1.0, unless layout.offload_optimizer = true"
    need(layout.offload_optimizer or ratio == 1.0, "layout.offload_optimizer_ratio", ratio, allowed)
    if asked is None:
        return
    need(budget is not None, "train.memory_offload", asked, "needs train.memory_budget, or off")
    offloaded = layout.model_copy(update={"offload_optimizer": True})
    lacks = lacks_for_offload(offloaded, job.overlap, job.optimizer.name)
    need(not lacks, "train.memory_offload", asked, f"needs {lacks}")


def _check_memory_budget(job: JobValues) -> None:
    budget, offloads = job.train.memory_budget, job.train.memory_offload == "auto"
    if budget is None:
        return
    from myriad.planner.memory.recompute_budget import check_budget

    check_budget(work_of(job), budget, job.train.device, job.train.precision, offloads=offloads)


MEMORY_RULES: tuple[Callable[[JobValues], None], ...] = (
    _check_recompute_ratio,
    _check_memory_budget,
)
