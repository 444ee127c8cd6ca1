"""Node orders for a job on a fabric: the candidates and their scores.

The one search for orders (`myriad.planner.fabric.placement_search`) uses fluid sharing. It models slow nodes,
unequal links and narrow uplinks, but no hashes. Where all links are alike it cannot distinguish orders,
although each flow above a first-tier switch may collide with another one. So this module scores the block
orders (a replicas by b parts, block by block) and the search's order again, by the simulated iteration under
a few seeds of the hashes. A block order is simulated only if no other one has both fewer ring bytes and fewer
message bytes above the first tier.

`JobsOnFabric` compares arrangements of jobs on a fabric: bytes by tier, conflicts, rings, iterations.

    as numbered   each job on the next nodes, slot after slot
    as given      on the given nodes, in that order
    random        any nodes in any order: what a scheduler without switch information gives in the end
    optimised     jobs packed under few switches (`network.node_placement.pack_jobs`), each in the order of
                  nodes that `optimised_order` finds

The score of each arrangement includes the hash conflicts of all jobs at once
(`myriad.planner.fabric.job_exposure`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from myriad.errors import BadInputError
from myriad.network.fabric import Numbers
from myriad.network.node_placement import TopologyDomains, pack_jobs, shared_ratio, tier_bytes
from myriad.network.rank_transfers import RankMapping, RankTransfers, inter_node_flows, merge_transfers
from myriad.network.routing import Routes, ecmp
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.fabric.job_exposure import FabricJob, JobExposure, Routing, RoutingCache
from myriad.planner.fabric.placement_cost import PlacementCost, fills_nodes, shares_elsewhere, traffic_of
from myriad.planner.fabric.placement_search import block_orders, place_nodes

__all__ = [
    "ArrangementResult",
    "JobArrangement",
    "JobsOnFabric",
    "num_slots",
    "optimised_order",
    "rank_mapping",
]

_Ints = npt.NDArray[np.int64]
_MOST_SIMULATED = 8
_SEEDS = 4
"""Number of hash draws that compare orders."""


def num_slots(costs: Costs) -> int:
    """Return the number of nodes that a job needs."""
    return -(-costs.workload.layout.world // costs.cluster.accelerators_per_node)


def rank_mapping(costs: Costs, routes: Routes, nodes: Sequence[int] | _Ints) -> RankMapping:
    """Return the mapping of the job's ranks. ``nodes``: its nodes, slot by slot."""
    ports = routes.fabric.ports_per_node
    return RankMapping(np.asarray(nodes, dtype=np.int64), costs.cluster.accelerators_per_node, ports)


def optimised_order(
    job: FabricJob,
    nodes: Sequence[int],
    routes: Routes,
    iteration_seconds: Callable[[Costs], float],
    *,
    queue_pairs: int = 1,
    routing: Routing = "ecmp",
    slower: dict[int, float] | None = None,
    known: RoutingCache | None = None,
) -> list[int]:
    """Return the best order of a job's nodes, slot by slot, or the given order where no candidate is better.
    ``known``: the routing cache of `JobExposure`."""
    costs, own = job.costs, np.asarray(nodes, dtype=np.int64)
    layout, cluster = costs.workload.layout, costs.cluster
    per_node = cluster.accelerators_per_node
    if layout.world % per_node or not fills_nodes(layout, per_node):
        return list(nodes)

    def seconds(order: _Ints) -> float:
        own_tenant = [job.at(rank_mapping(costs, routes, order))]
        moved = JobExposure(routes, own_tenant, queue_pairs=queue_pairs, routing=routing, known=known)
        return float(np.mean(moved.seconds(iteration_seconds, range(_SEEDS))))

    tried = [own, *_blocks(costs, own, routes)]
    best_placement = place_nodes(cluster, traffic_of(costs), slower, list(nodes))
    if not best_placement.is_plain:
        tried.append(own[list(best_placement.order)])
    found = [seconds(order) for order in tried]
    best = int(np.argmin(found))
    return [int(node) for node in (tried[best] if found[best] < found[0] * (1 - 1e-6) else own)]


def _blocks(costs: Costs, own: _Ints, routes: Routes) -> list[_Ints]:
    """Return the block orders on the Pareto front of message bytes and of all other bytes (rings, tokens that
    travel to experts) above the first tier."""
    traffic, set_of = traffic_of(costs), TopologyDomains(routes.fabric).set_of[own]
    orders = np.unique(
        np.array(list(block_orders(PlacementCost(costs.cluster, traffic, {}, list(own))))), axis=0
    )
    shape = (len(orders), traffic.replicas, traffic.parts, traffic.width)
    sets = set_of[orders].reshape(shape)
    rings = (sets != np.roll(sets, -1, axis=1)).sum((1, 3)) @ np.array(traffic.ring_bytes)
    if traffic.exchange_bytes:
        away = shares_elsewhere(sets, traffic.sharers).sum((1, 3))
        rings = rings + traffic.num_micro_batches * (away @ np.array(traffic.exchange_bytes))
    messages = np.zeros(len(orders))
    for one in traffic.messages:
        messages += one.num_bytes * (sets[:, :, one.source] != sets[:, :, one.target]).sum((1, 2))
    chosen, least = [], np.inf
    for number in np.lexsort((messages, rings)):
        if messages[number] < least:
            chosen.append(number)
            least = messages[number]
    step = max(1, -(-len(chosen) // _MOST_SIMULATED))
    return [own[orders[number]] for number in chosen[::step]]


ArrangementName = Literal["as numbered", "as given", "random", "optimised"]
_RANDOM_ORDERS = 4


@dataclass(frozen=True)
class JobArrangement:
    """The nodes of each job, slot by slot; a random arrangement has several draws."""

    name: ArrangementName
    draws: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """Nodes of each job in the first draw."""
        return self.draws[0]


@dataclass(frozen=True, eq=False)
class ArrangementResult:
    """The effect of an arrangement on one job."""

    arrangement: JobArrangement
    job: int
    tier_bytes: Numbers
    """Bytes of an iteration by tier: inside nodes, within a first-tier switch (or set), within a pod, above
    pods."""
    seconds: Numbers
    """Seconds of an iteration, shape (seeds)."""
    slowest_ring: Numbers
    """Rate of the slowest data-parallel ring relative to the rate of its ports, shape (seeds)."""
    slowest_exchange: Numbers
    """The same of the tokens that travel to experts; 1 where none leave a node."""
    shared_ratio: float
    """Mean share of the ring flows above a first-tier switch (of all jobs) that share an oversubscribed link
    with other flows."""


class JobsOnFabric:
    """Jobs that run at the same time on one fabric."""

    def __init__(
        self,
        jobs: Sequence[Costs],
        routes: Routes,
        iteration_seconds: Callable[[Costs], float],
        *,
        nodes: Sequence[Sequence[int]] | None = None,
        queue_pairs: int = 1,
        routing: Routing = "ecmp",
    ) -> None:
        """Prepare the jobs. ``nodes``: the nodes of each job; off: any. Raises `BadInputError` where there
        are too few nodes."""
        self.routes, self.iteration_seconds, self.nodes = routes, iteration_seconds, nodes
        self.queue_pairs, self.routing = queue_pairs, routing
        self.sizes = [num_slots(costs) for costs in jobs]
        if sum(self.sizes) > routes.fabric.num_nodes:
            allowed = f"at most {routes.fabric.num_nodes}, all of the cluster's"
            raise BadInputError("JOB", f"{sum(self.sizes)} nodes", allowed)
        for costs, size, own in zip(jobs, self.sizes, nodes or (), strict=False):
            if len(own) != size:
                allowed = f"{size}: {costs.workload.layout.world} ranks, "
                allowed += f"{costs.cluster.accelerators_per_node} to a node"
                raise BadInputError("--nodes", f"{len(own)} nodes", allowed)
        first = rank_mapping(jobs[0], routes, range(routes.fabric.num_nodes))
        self.jobs = [FabricJob(costs, first) for costs in jobs]

    def numbered(self) -> JobArrangement:
        """Return the arrangement on the given nodes, or on nodes in the order of their numbers."""
        if self.nodes is not None:
            return JobArrangement("as given", (tuple(tuple(own) for own in self.nodes),))
        ends = np.cumsum([0, *self.sizes]).tolist()
        return JobArrangement("as numbered", (tuple(tuple(range(*pair)) for pair in pairwise(ends)),))

    def random(self, seed: int) -> JobArrangement:
        """Return an arrangement with several random orders."""
        draw, draws = np.random.default_rng(seed), []
        for _ in range(_RANDOM_ORDERS):
            if self.nodes is not None:
                mixed = [draw.permutation(np.array(own)) for own in self.nodes]
            else:
                every = draw.permutation(self.routes.fabric.num_nodes)
                mixed = np.split(every[: sum(self.sizes)], np.cumsum(self.sizes)[:-1])
            draws.append(tuple(tuple(map(int, own)) for own in mixed))
        return JobArrangement("random", tuple(draws))

    def optimised(self) -> JobArrangement:
        """Return the arrangement with jobs packed and each job in its best order."""
        near = TopologyDomains(self.routes.fabric)
        given = self.nodes if self.nodes is not None else pack_jobs(self.sizes, near.set_of, near.pod_of)
        orders = (
            optimised_order(
                job,
                own,
                self.routes,
                self.iteration_seconds,
                queue_pairs=self.queue_pairs,
                routing=self.routing,
            )
            for job, own in zip(self.jobs, given, strict=True)
        )
        return JobArrangement("optimised", (tuple(map(tuple, orders)),))

    def evaluate(self, arrangement: JobArrangement, seeds: Sequence[int]) -> list[ArrangementResult]:
        """Return the result of each job while all jobs run at once."""
        rows: list[list[float]] = []
        rings: list[list[float]] = []
        exchanges: list[list[float]] = []
        shared, share = [], -(-len(seeds) // len(arrangement.draws))
        for number, nodes in enumerate(arrangement.draws):
            exposure = self._exposure(nodes)
            for draw in exposure.draws(seeds[number * share : (number + 1) * share]):
                rows.append(exposure.simulated(self.iteration_seconds, draw))
                rings.append([1 / one.slowest_ring for one in draw.slowdowns])
                exchanges.append([1 / one.slowest_exchange for one in draw.slowdowns])
                shared.append(shared_ratio(self.routes.fabric, draw.paths["dp"], self.queue_pairs))
        moved = self._exposure(arrangement.nodes).jobs
        return [
            ArrangementResult(
                arrangement,
                number,
                self._tier_bytes(job),
                np.array(rows)[:, number],
                np.array(rings)[:, number],
                np.array(exchanges)[:, number],
                float(np.mean(shared)),
            )
            for number, job in enumerate(moved)
        ]

    def _exposure(self, nodes: Sequence[Sequence[int]]) -> JobExposure:
        moved = [
            job.at(rank_mapping(job.costs, self.routes, own))
            for job, own in zip(self.jobs, nodes, strict=True)
        ]
        return JobExposure(self.routes, moved, queue_pairs=self.queue_pairs, routing=self.routing)

    def _tier_bytes(self, job: FabricJob) -> Numbers:
        """Return the bytes by tier of all transfers between a job's ranks in an iteration."""
        every = _everything(job)
        flows, _ = inter_node_flows(every, job.mapping)
        found = tier_bytes(self.routes.fabric, flows, ecmp(self.routes, flows, 0))
        found[0] = every.num_bytes.sum() - flows.num_bytes.sum()
        return found


def _everything(job: FabricJob) -> RankTransfers:
    parts = [part.exchange for parts in job.parts.values() for part in parts]
    return merge_transfers([*parts, *(phase.exchange for phase in job.phases if phase.kind == "tied")])
