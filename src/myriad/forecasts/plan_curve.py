"""Plans on several numbers of accelerators: a curve over a range, and the fewest that meet a deadline."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from myriad.errors import BadInputError
from myriad.forecasts.plan_figures import plan_figures
from myriad.forecasts.plan_request import PlanProblem
from myriad.forecasts.planned_job import planned_steps
from myriad.planner import (
    LayoutProblem,
    SimulatedPlan,
    SimulationCache,
    best_plan,
    fewest_accelerators,
    find_plans,
    scale_cluster,
)
from myriad.planner.search.planning import cluster_sizes
from myriad.planner.validation.published_tables import CurvePoint, curve_points

__all__ = ["PlanCurve", "fewest_for_days", "plan_curve"]

_Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class PlanCurve:
    """The best plan on each number of accelerators."""

    rows: Sequence[tuple[LayoutProblem, SimulatedPlan | None]]
    """Problem and plan for each number of accelerators; the plan is ``None`` where no layout fits."""
    points: Sequence[CurvePoint]
    """Published measurements of the same model."""
    steps: int

    @property
    def cheapest(self) -> dict[str, Any] | None:
        """The row with the fewest dollars; ``None`` where no price is known."""
        return min((row for row in self._rows() if row.get("dollars")), key=_dollars, default=None)

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {
                "accelerators": problem.cluster.world,
                **(plan_figures(problem, plan, self.steps).as_json() if plan else {}),
            }
            for problem, plan in self.rows
        ]

    def as_json(self) -> dict[str, Any]:
        """Return plain values for ``--json``."""
        sizes = {problem.cluster.world for problem, _ in self.rows}
        published = [vars(point) for point in self.points if point.accelerators in sizes]
        return {"curve": self._rows(), "published": published, "cheapest": self.cheapest}


def _dollars(row: dict[str, Any]) -> float:
    return float(row["dollars"])


def plan_curve(question: PlanProblem, progress: _Progress) -> PlanCurve:
    """Plan on each number of accelerators of the range. Raises `BadInputError` where nothing fits on any."""
    points = curve_points(question.job.model)
    also = [point.accelerators for point in points]
    first, last = question.sizes[0], question.sizes[-1]
    sizes = cluster_sizes(first, last, question.cluster.accelerators_per_node, also)
    simulations = SimulationCache()
    rows: list[tuple[LayoutProblem, SimulatedPlan | None]] = []
    for number, size in enumerate(sizes):
        progress(f"{size} accelerators", number, len(sizes))
        problem = question.layouts_on(scale_cluster(question.cluster, size))
        rows.append((problem, best_plan(problem, simulations)))
    if all(found is None for _, found in rows):
        try:
            find_plans(rows[-1][0], count=1, simulations=simulations)
        except BadInputError as error:
            reason = f"also on {sizes[-1]}: {error.allowed}"
            raise BadInputError("--gpus", f"{sizes[0]}..{sizes[-1]}", reason) from None
    return PlanCurve(rows, points, planned_steps(question.job))


def fewest_for_days(
    question: PlanProblem, days: float, progress: _Progress
) -> tuple[LayoutProblem, SimulatedPlan]:
    """Return the smallest number of accelerators that finishes in ``days``. Raises `BadInputError`."""
    try:
        return fewest_accelerators(
            lambda size: question.layouts_on(scale_cluster(question.cluster, size)),
            question.cluster,
            days * 86400 / planned_steps(question.job),
            SimulationCache(),
            progress,
        )
    except BadInputError as error:
        raise BadInputError("--days", days, error.allowed) from None
