"""A prediction as a distribution: one iteration under many draws of a fabric's hashes.

The plain prediction has every transfer at the rate of its ports. On a fabric, which flows share a link is
drawn when switches and source ports are; so p50 is what half of all starts of a job get, and p95 what one in
twenty gets at best.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from myriad.network.fabric import Numbers
from myriad.network.routing import Routes
from myriad.planner.cluster import Cluster
from myriad.planner.cluster_fabric import fabric_of
from myriad.planner.costs import Costs
from myriad.planner.exposure import JobExposure, Known, Tenant
from myriad.planner.fabric_placement import num_slots, optimised_order, seats_of
from myriad.planner.placement import Placement

__all__ = ["FabricOutlook", "OnFabric"]

_SEEDS = 20


@dataclass(frozen=True, eq=False)
class FabricOutlook:
    """Of one layout and order of nodes."""

    seconds: Numbers
    """(draws) Of an iteration."""
    slowest_ring: Numbers
    """(draws) Its rate, for that of its ports."""

    @property
    def p50(self) -> float:
        """Median."""
        return float(np.percentile(self.seconds, 50))

    @property
    def p95(self) -> float:
        """One draw in twenty is slower."""
        return float(np.percentile(self.seconds, 95))

    @property
    def ring(self) -> float:
        """The slowest one's median."""
        return float(np.median(self.slowest_ring))

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        told = {"p50_seconds": self.p50, "p95_seconds": self.p95, "slowest_ring_p50_ratio": self.ring}
        return {**told, "draws": len(self.seconds)}


class OnFabric:
    """A cluster's fabric, for the layouts of one job after the other."""

    def __init__(self, cluster: Cluster, judge: Callable[[Costs], float], *, first_seed: int = 0) -> None:
        """``judge``: the simulator's word on costs. Raises `BadInputError` where there is no fabric."""
        self.routes, self.judge = Routes(fabric_of(cluster)), judge
        self.seeds = range(first_seed, first_seed + _SEEDS)
        self._known: Known = {}

    def tenant(self, costs: Costs) -> Tenant:
        """On nodes as they are numbered."""
        return Tenant(costs, seats_of(costs, self.routes, range(num_slots(costs))))

    def outlook(
        self,
        tenant: Tenant,
        nodes: Sequence[int] | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> FabricOutlook:
        """``nodes``: slot by slot; off: where the job is. ``progress(done, total)`` is called after each
        draw."""
        if nodes is not None:
            tenant = tenant.at(seats_of(tenant.costs, self.routes, nodes))
        exposure = JobExposure(self.routes, [tenant], known=self._known)
        seconds, rings = [], []
        for number, draw in enumerate(exposure.draws(self.seeds), 1):
            seconds += exposure.judged(self.judge, draw)
            rings.append(1 / draw.stretches[0].slowest_ring)
            if progress:
                progress(number, len(self.seeds))
        return FabricOutlook(np.array(seconds), np.array(rings))

    def placed(self, tenant: Tenant, slower: dict[int, float]) -> Placement:
        """The best order of nodes that is found, with the mean of iterations; where none is better, as they
        are numbered. ``slower``: factor on the compute of single nodes."""
        nodes = list(range(num_slots(tenant.costs)))
        order = optimised_order(tenant, nodes, self.routes, self.judge, slower=slower, known=self._known)
        plain = float(self.outlook(tenant).seconds.mean())
        seconds = plain if order == nodes else float(self.outlook(tenant, order).seconds.mean())
        return Placement(tuple(order if seconds < plain else nodes), min(seconds, plain), plain)
