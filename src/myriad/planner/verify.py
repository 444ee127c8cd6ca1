"""The first plans once more, with memory read off the program that each would run.

`memory` judges millions of layouts by formulas: half of them within 1 % of their program's memory, some short
schedules as far as 20 % away. What is proposed must fit, so the few that are shown are counted action by
action (`rank_memory`), but for the longest programs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from myriad.planner.costs import Costs
from myriad.planner.judge import FITS
from myriad.planner.memory import fits_probability
from myriad.planner.rescore import Plan, Simulations
from myriad.planner.space import Problem

__all__ = ["verified"]

_FIRST = 12
"""That are counted."""
_MOST_COMPUTES = 12_000
"""Of a program that is counted so: longer ones keep the formulas' bytes."""


def verified(problem: Problem, plans: Sequence[Plan], simulations: Simulations) -> Iterator[Plan]:
    """In the same order, without those that do not fit after all; beyond the first few as they are."""
    num_counted = 0
    for plan in plans:
        if num_counted < _FIRST:
            plan = _counted(problem, plan, simulations)
            if plan.candidate.fits < FITS:
                continue
            num_counted += 1
        yield plan


def _counted(problem: Problem, plan: Plan, simulations: Simulations) -> Plan:
    cluster, work = problem.cluster, plan.candidate.work(problem)
    costs = Costs(work, cluster)
    layout, count = work.layout, work.num_micro_batches
    if count * layout.num_stages * costs.num_chunks > _MOST_COMPUTES:
        return plan
    ranks = simulations.memory(costs)
    fullest = max(ranks, key=lambda memory: float(memory.total))
    fits = min(float(fits_probability(memory, cluster.accelerator.memory_bytes)) for memory in ranks)
    candidate = replace(plan.candidate, memory_bytes=float(fullest.total), fits=fits)
    return replace(plan, candidate=candidate)
