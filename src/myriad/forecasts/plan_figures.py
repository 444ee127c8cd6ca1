"""The figures of one plan: seconds, MFU, memory, days, dollars and energy for a number of steps."""

from dataclasses import asdict, dataclass
from typing import Any

from myriad.planner import LayoutProblem, SimulatedPlan, describe_layout
from myriad.planner.validation.prediction_interval import interval_ratio

__all__ = ["PlanFigures", "plan_figures"]


@dataclass(frozen=True)
class PlanFigures:
    """The figures of a plan over a job's steps."""

    layout: str
    accelerators: int
    seconds: float
    """Seconds of one iteration."""
    mfu: float
    memory_bytes: float
    fits_probability: float
    tokens_per_second: float
    days: float
    dollars: float | None
    megawatt_hours: float | None
    """Energy of all accelerators at the cluster's power for each; ``None``: unknown."""
    interval_ratio: float | None
    """Half width of the interval that contains nine of ten measured times, as a ratio of ``seconds``;
    ``None``: unknown."""

    def as_json(self) -> dict[str, Any]:
        """Return plain values for ``--json``."""
        return asdict(self)


def plan_figures(problem: LayoutProblem, plan: SimulatedPlan, steps: int) -> PlanFigures:
    """Return the figures of a plan for a number of steps."""
    candidate, world = plan.candidate, plan.candidate.layout.world
    hours, cluster = plan.seconds * steps / 3600, problem.cluster
    price, watts = cluster.price, cluster.power
    tokens = problem.global_batch * problem.model.sequence
    return PlanFigures(
        layout=describe_layout(candidate),
        accelerators=world,
        seconds=plan.seconds,
        mfu=plan.mfu,
        memory_bytes=candidate.memory_bytes,
        fits_probability=candidate.fit_probability,
        tokens_per_second=tokens / plan.seconds,
        days=hours / 24,
        dollars=None if price is None else price * world * hours,
        megawatt_hours=None if watts is None else watts * world * hours / 1e6,
        interval_ratio=interval_ratio(
            cluster, problem.framework, has_experts=problem.model.experts is not None
        ),
    )
