"""A prediction as a distribution: one iteration under many draws of a fabric's hashes.

The plain prediction runs every transfer at the rate of its ports. On a fabric, hashes of switches and source
ports decide which flows share a link. So half of all starts of a job reach p50 or better, and one in twenty
is slower than p95.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from myriad.network.fabric import Numbers
from myriad.network.routing import Routes
from myriad.planner.cluster_config import Cluster
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.fabric.cluster_fabric import fabric_of
from myriad.planner.fabric.fabric_placement import num_slots, optimised_order, rank_mapping
from myriad.planner.fabric.job_exposure import FabricJob, JobExposure, RoutingCache
from myriad.planner.fabric.placement_search import PlacementResult

__all__ = ["FabricDistribution", "FabricForecaster"]

_SEEDS = 20


@dataclass(frozen=True, eq=False)
class FabricDistribution:
    """Seconds of one layout and node order, by draw of the hashes."""

    seconds: Numbers
    """Seconds of an iteration, shape (draws)."""
    slowest_ring: Numbers
    """Rate of the slowest ring relative to the rate of its ports, shape (draws)."""
    slowest_exchange: Numbers | None = None
    """The same of the tokens that travel to experts; ``None``: none travel."""
    meeting_seconds: Numbers | None = None
    """Seconds of each draw that are lost because rings and tokens travel at once."""

    @property
    def p50(self) -> float:
        """Median of the seconds."""
        return float(np.percentile(self.seconds, 50))

    @property
    def p95(self) -> float:
        """95th percentile of the seconds: one draw in twenty is slower."""
        return float(np.percentile(self.seconds, 95))

    @property
    def ring(self) -> float:
        """Median relative rate of the slowest ring."""
        return float(np.median(self.slowest_ring))

    def as_json(self) -> dict[str, Any]:
        """Return the distribution as plain values."""
        found = {"p50_seconds": self.p50, "p95_seconds": self.p95, "slowest_ring_p50_ratio": self.ring}
        if self.slowest_exchange is not None and self.meeting_seconds is not None:
            found["slowest_exchange_p50_ratio"] = float(np.median(self.slowest_exchange))
            found["meeting_p50_seconds"] = float(np.median(self.meeting_seconds))
        return {**found, "draws": len(self.seconds)}


class FabricForecaster:
    """Forecasts on a cluster's fabric for several layouts."""

    def __init__(
        self, cluster: Cluster, iteration_seconds: Callable[[Costs], float], *, first_seed: int = 0
    ) -> None:
        """Prepare forecasts. ``iteration_seconds``: simulates costs and returns seconds. Raises
        `BadInputError` where there is no fabric."""
        self.routes, self.iteration_seconds = Routes(fabric_of(cluster)), iteration_seconds
        self.seeds = range(first_seed, first_seed + _SEEDS)
        self._known: RoutingCache = {}

    def job(self, costs: Costs) -> FabricJob:
        """Return the job on the first nodes, in the order of their numbers."""
        return FabricJob(costs, rank_mapping(costs, self.routes, range(num_slots(costs))))

    def outlook(
        self,
        job: FabricJob,
        nodes: Sequence[int] | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> FabricDistribution:
        """Return the distribution of one job. ``nodes``: its nodes, slot by slot; off: the job's placement.
        ``progress(done, total)`` is called after each draw."""
        if nodes is not None:
            job = job.at(rank_mapping(job.costs, self.routes, nodes))
        exposure = JobExposure(self.routes, [job], known=self._known)
        seconds, apart = list[float](), list[float]()
        rings, exchanges = list[float](), list[float]()
        for number, draw in enumerate(exposure.draws(self.seeds), 1):
            seconds += exposure.simulated(self.iteration_seconds, draw)
            rings.append(1 / draw.slowdowns[0].slowest_ring)
            if job.parts["ep"]:
                exchanges.append(1 / draw.slowdowns[0].slowest_exchange)
                without = exposure.draw(draw.seed, meets=False)
                apart += exposure.simulated(self.iteration_seconds, without)
            if progress:
                progress(number, len(self.seeds))
        found = FabricDistribution(np.array(seconds), np.array(rings))
        if not apart:
            return found
        lost = np.array(seconds) - np.array(apart)
        return replace(found, slowest_exchange=np.array(exchanges), meeting_seconds=lost)

    def best_placement(self, job: FabricJob, slower: dict[int, float]) -> PlacementResult:
        """Return the best node order found, by the mean seconds of an iteration, or the nodes in the order of
        their numbers where none is better. ``slower``: factor on the compute of single nodes."""
        nodes = list(range(num_slots(job.costs)))
        order = optimised_order(
            job, nodes, self.routes, self.iteration_seconds, slower=slower, known=self._known
        )
        plain = float(self.outlook(job).seconds.mean())
        seconds = plain if order == nodes else float(self.outlook(job, order).seconds.mean())
        return PlacementResult(tuple(order if seconds < plain else nodes), min(seconds, plain), plain)
