"""Ways to lay jobs out on a fabric, and what each comes to: bytes by tier, conflicts, rings, iterations.

    as numbered   each job on the next nodes, slot after slot
    as given      on nodes that are named, in that order
    random        any nodes in any order: what a scheduler that knows no switches gives in the end
    optimised     jobs packed under few switches (`myriad.network.placement.packed`), each in the order of
                  nodes that `myriad.planner.fabric_placement` finds

Each is judged by hash conflicts of all jobs at once (`myriad.planner.exposure`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from myriad.errors import BadInputError
from myriad.network.exchange import Exchange, flows_of, joined
from myriad.network.fabric import Numbers
from myriad.network.placement import Neighbourhoods, packed, shared_ratio, tier_bytes
from myriad.network.routing import Routes, ecmp
from myriad.planner.costs import Costs
from myriad.planner.exposure import JobExposure, Routing, Tenant
from myriad.planner.fabric_placement import num_slots, optimised_order, seats_of

__all__ = ["Arrangement", "ArrangementName", "JobsOnFabric", "Verdict"]

ArrangementName = Literal["as numbered", "as given", "random", "optimised"]
_RANDOM_ORDERS = 4


@dataclass(frozen=True)
class Arrangement:
    """Nodes of each job, slot by slot; of random ones several draws."""

    name: ArrangementName
    draws: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """By job; of the first draw."""
        return self.draws[0]


@dataclass(frozen=True, eq=False)
class Verdict:
    """What an arrangement does to one job."""

    arrangement: Arrangement
    job: int
    tier_bytes: Numbers
    """Of an iteration: inside nodes, within a first-tier switch (or set), a pod, above pods."""
    seconds: Numbers
    """(seeds) Of an iteration."""
    slowest_ring: Numbers
    """(seeds) Rate of the slowest data-parallel ring, for that of its ports."""
    shared_ratio: float
    """Of the rings' flows (of all jobs) that go above a first-tier switch, those that meet others on a link
    that is too narrow for them; on average."""


class JobsOnFabric:
    """Jobs that run at the same time, and where they may."""

    def __init__(
        self,
        jobs: Sequence[Costs],
        routes: Routes,
        judge: Callable[[Costs], float],
        *,
        nodes: Sequence[Sequence[int]] | None = None,
        queue_pairs: int = 1,
        routing: Routing = "ecmp",
    ) -> None:
        """``nodes``: of each job; off: any. Raises `BadInputError` where there is no room."""
        self.routes, self.judge, self.nodes = routes, judge, nodes
        self.queue_pairs, self.routing = queue_pairs, routing
        self.sizes = [num_slots(costs) for costs in jobs]
        if sum(self.sizes) > routes.fabric.num_nodes:
            allowed = f"at most {routes.fabric.num_nodes}, all of the cluster's"
            raise BadInputError("JOB", f"{sum(self.sizes)} nodes", allowed)
        for costs, size, own in zip(jobs, self.sizes, nodes or (), strict=False):
            if len(own) != size:
                allowed = f"{size}: {costs.work.layout.world} ranks, "
                allowed += f"{costs.cluster.accelerators_per_node} to a node"
                raise BadInputError("--nodes", f"{len(own)} nodes", allowed)
        first = seats_of(jobs[0], routes, range(routes.fabric.num_nodes))
        self.tenants = [Tenant(costs, first) for costs in jobs]

    def numbered(self) -> Arrangement:
        """Nodes as they come."""
        if self.nodes is not None:
            return Arrangement("as given", (tuple(tuple(own) for own in self.nodes),))
        ends = np.cumsum([0, *self.sizes]).tolist()
        return Arrangement("as numbered", (tuple(tuple(range(*pair)) for pair in pairwise(ends)),))

    def random(self, seed: int) -> Arrangement:
        """Several."""
        draw, draws = np.random.default_rng(seed), []
        for _ in range(_RANDOM_ORDERS):
            if self.nodes is not None:
                mixed = [draw.permutation(np.array(own)) for own in self.nodes]
            else:
                every = draw.permutation(self.routes.fabric.num_nodes)
                mixed = np.split(every[: sum(self.sizes)], np.cumsum(self.sizes)[:-1])
            draws.append(tuple(tuple(map(int, own)) for own in mixed))
        return Arrangement("random", tuple(draws))

    def optimised(self) -> Arrangement:
        """Packed, and each job in its best order."""
        near = Neighbourhoods(self.routes.fabric)
        given = self.nodes if self.nodes is not None else packed(self.sizes, near.set_of, near.pod_of)
        orders = (
            optimised_order(
                tenant, own, self.routes, self.judge, queue_pairs=self.queue_pairs, routing=self.routing
            )
            for tenant, own in zip(self.tenants, given, strict=True)
        )
        return Arrangement("optimised", (tuple(map(tuple, orders)),))

    def verdicts(self, arrangement: Arrangement, seeds: Sequence[int]) -> list[Verdict]:
        """Of each job, all being there at once."""
        rows: list[list[float]] = []
        rings: list[list[float]] = []
        shared, share = [], -(-len(seeds) // len(arrangement.draws))
        for number, nodes in enumerate(arrangement.draws):
            exposure = self._exposure(nodes)
            for draw in exposure.draws(seeds[number * share : (number + 1) * share]):
                rows.append(exposure.judged(self.judge, draw))
                rings.append([1 / one.slowest_ring for one in draw.stretches])
                shared.append(shared_ratio(self.routes.fabric, draw.paths["dp"], self.queue_pairs))
        moved = self._exposure(arrangement.nodes).tenants
        return [
            Verdict(
                arrangement,
                job,
                self._tier_bytes(tenant),
                np.array(rows)[:, job],
                np.array(rings)[:, job],
                float(np.mean(shared)),
            )
            for job, tenant in enumerate(moved)
        ]

    def _exposure(self, nodes: Sequence[Sequence[int]]) -> JobExposure:
        moved = [
            tenant.at(seats_of(tenant.costs, self.routes, own))
            for tenant, own in zip(self.tenants, nodes, strict=True)
        ]
        return JobExposure(self.routes, moved, queue_pairs=self.queue_pairs, routing=self.routing)

    def _tier_bytes(self, tenant: Tenant) -> Numbers:
        """Of all that a job's ranks send in an iteration."""
        every = _everything(tenant)
        flows, _ = flows_of(every, tenant.seats)
        found = tier_bytes(self.routes.fabric, flows, ecmp(self.routes, flows, 0))
        found[0] = every.num_bytes.sum() - flows.num_bytes.sum()
        return found


def _everything(tenant: Tenant) -> Exchange:
    parts = [part.exchange for parts in tenant.parts.values() for part in parts]
    return joined([*parts, *(phase.exchange for phase in tenant.phases if phase.kind == "tied")])
