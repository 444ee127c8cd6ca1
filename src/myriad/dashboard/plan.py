"""What was predicted for a run on its cluster, beside what is measured: one step, and where its time goes.

Replicas are alike in a prediction: each rank stands for those at its place in all of them.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from myriad.dashboard.insight.losses import Losses
from myriad.dashboard.insight.predicted import predicted_losses, predicted_records
from myriad.planner.simulator import simulate
from myriad.telemetry.records import Records

if TYPE_CHECKING:
    from myriad.planner.costs import Costs

__all__ = ["Plan"]


@dataclass(frozen=True)
class Plan:
    """Of one job on one cluster; worked out once."""

    costs: "Costs"

    @cached_property
    def losses(self) -> Losses:
        """From the peak down to the predicted MFU."""
        return predicted_losses(self.costs)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of predicted spans."""
        return self._step[1]

    @cached_property
    def _step(self) -> tuple[Records, tuple[str, ...]]:
        return predicted_records(simulate(self.costs), self.costs)

    @cached_property
    def _first_replica(self) -> Records:
        records, within = self._step[0], self._within
        replica = records["rank"] // within
        found: Records = records[replica == replica.min()]
        found["rank"] %= within
        return found

    @property
    def _within(self) -> int:
        """Ranks of a replica."""
        layout = self.costs.work.layout
        return layout.world // layout.dp

    def spans_of(self, rank: int, begin_ns: int) -> Records:
        """Of one rank's step that begins then."""
        records = self._first_replica
        found: Records = records[records["rank"] == rank % self._within]
        found["start_ns"] += begin_ns
        found["rank"] = rank
        return found
