"""A job's memory budget, turned into what its layout computes again: by the planner's formula, before
anything is built, so that every rank and every attempt finds the same."""

from myriad.job import Job, work_of
from myriad.planner.budget import layout_within
from myriad.units import format_bytes

__all__ = ["within_budget"]


def within_budget(job: Job, *, on_cpu: bool, value_bytes: int) -> tuple[Job, str]:
    """The job with its recomputation set, and a line about it; both as they were where there is no budget.
    Raises `BadInputError` when nothing fits."""
    budget = job.train.memory_budget
    if budget is None:
        return job, ""
    layout = layout_within(work_of(job, value_bytes), budget, on_cpu=on_cpu)
    share = f" of {layout.recompute_ratio:.0%} of the layers" if layout.recompute == "full" else ""
    line = f"recompute {layout.recompute}{share}, to hold at most {format_bytes(budget)}"
    return job.model_copy(update={"layout": layout}), line
