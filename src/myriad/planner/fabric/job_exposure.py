"""Slowdown of jobs by a fabric: how much longer their transfers take, by the seeds of its hashes.

The model assumes that all transfers of one axis, of all jobs, are in flight at the same time: the rings of
all pipeline ranks, the messages between all pipeline neighbours, the tensor-parallel rings that leave a node.
Their rates are max-min fair, and all transfers of a ring have one rate (`network.rank_transfers`). A
transfer's *slowdown* is the ratio of its rate on ports alone to its rate on the fabric. It multiplies the
cost model's seconds of the transferred bytes, so all slowdowns are 1 in the plain prediction. A rank's
collective waits for the slowest ring of its tensor-parallel peers. The pipeline runs at the rate of the
slowest replica.

Under another seed of the hashes, other flows share a link. One seed is one draw, and the prediction becomes a
distribution.

Layouts that differ in schedules, sizes or shards often have the same flows between the same ports. Their
draws are the same, and `RoutingCache` keeps them.

Arrays: E transfers, P pipeline ranks, D replicas.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from typing import Literal

import numpy as np
import numpy.typing as npt

from myriad.network.fabric import Flows, Numbers, Paths
from myriad.network.rank_transfers import (
    RankMapping,
    RankTransfers,
    group_rates,
    inter_node_flows,
    merge_transfers,
    port_limited_group_rates,
)
from myriad.network.routing import Routes, adaptive, ecmp
from myriad.planner.cluster_config import Cluster
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.cost.stage_costs import StageCosts
from myriad.planner.fabric.job_flows import Axis, TransferPhase, transfer_phases
from myriad.planner.workload import Workload
from myriad.program.schedules import stage_owners

__all__ = [
    "FabricCosts",
    "FabricJob",
    "HashDraw",
    "JobExposure",
    "Routing",
    "RoutingCache",
    "TransferSlowdown",
    "fabric_costs",
    "without_spine",
]

Routing = Literal["ecmp", "adaptive"]
_AXES: tuple[Axis, ...] = ("dp", "pp", "tp")
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TransferSlowdown:
    """Slowdown of one job's transfers under one seed; 1 is the rate on ports alone."""

    data: tuple[float, ...]
    """Slowdown of the data-parallel rings, by pipeline rank."""
    tensor: tuple[float, ...]
    messages: dict[tuple[int, int], float]
    """Slowdown of the messages between two pipeline ranks, in the replica with the slowest messages."""

    @property
    def slowest_ring(self) -> float:
        """Largest slowdown of a data-parallel ring."""
        return max(self.data, default=1.0)


class FabricCosts(Costs):
    """A layout's costs with slowed transfers. The fabric replaces `links.spine`."""

    def __init__(self, workload: Workload, cluster: Cluster, slowdown: TransferSlowdown) -> None:
        super().__init__(workload, without_spine(cluster))
        self.slowdown = slowdown

    @cached_property
    def stages(self) -> list[StageCosts]:
        layout, plain = self.workload.layout, super().stages
        owners = stage_owners(layout.schedule_name, layout.pp, layout.virtual_stages)
        return [self._slower(one, owners[i // self.num_chunks]) for i, one in enumerate(plain)]

    def _slower(self, stage: StageCosts, rank: int) -> StageCosts:
        data, tensor = self.slowdown.data[rank] - 1, self.slowdown.tensor[rank] - 1
        sums, begun = self.dp_collectives, 0.0
        if data and (stage.gather or stage.reduce):
            begun = float(sums.all_gather_seconds(0.0))
        whole = begun if self.workload.layout.zero else float(sums.all_reduce_seconds(0.0)) if data else 0.0
        across = self.across_groups
        begun_across = float(across.all_reduce_seconds(0.0)) if across is not None else 0.0
        times = stage.times
        return replace(
            stage,
            gather=stage.gather + data * max(0.0, stage.gather - begun),
            reduce=stage.reduce + data * max(0.0, stage.reduce - whole),
            reduce_across=stage.reduce_across + data * max(0.0, stage.reduce_across - begun_across),
            forward=stage.forward + tensor * float(times.forward.tensor),
            backward_input=stage.backward_input
            + tensor * float(times.backward_input.tensor + stage.again.tensor),
        )

    def message_between(self, source: int, target: int) -> float:
        latency = float(self.pipeline.latency_seconds)
        return latency + (self.message - latency) * self.slowdown.messages.get((source, target), 1.0)


def without_spine(cluster: Cluster) -> Cluster:
    """Return the cluster without its spine link: the fabric models the uplinks instead."""
    return cluster.model_copy(update={"links": cluster.links.model_copy(update={"spine": None})})


@dataclass(frozen=True)
class _Part:
    """The transfers from one pipeline rank to another, or those of one pipeline rank among all replicas."""

    rank: int
    peer: int
    exchange: RankTransfers
    """The transfers with the bytes of a whole iteration."""


class FabricJob:
    """One job and the placement of its ranks."""

    def __init__(
        self, costs: Costs, mapping: RankMapping, phases: Sequence[TransferPhase] | None = None
    ) -> None:
        """Place a job. ``phases``: its transfer phases, where they are known."""
        self.costs, self.mapping = costs, mapping
        self.phases = transfer_phases(costs) if phases is None else phases
        layout = costs.workload.layout
        owners = stage_owners(layout.schedule_name, layout.pp, layout.virtual_stages)
        self.owners = [owners[i // costs.num_chunks] for i in range(costs.num_chunks * len(owners))]

    def at(self, mapping: RankMapping) -> "FabricJob":
        """Return the same job at another placement."""
        return FabricJob(self.costs, mapping, self.phases)

    @cached_property
    def parts(self) -> dict[Axis, list[_Part]]:
        """The transfers by axis that may be in flight at once, with each pair of ranks once."""
        found: defaultdict[Axis, dict[tuple[int, int, int, bool], _Part]] = defaultdict(dict)
        for phase in self.phases:
            if phase.kind == "tied" or not len(phase.exchange):
                continue
            rank = self.owners[phase.stage]
            step = {"activation": 1, "gradient": -1}.get(phase.kind, 0)
            peer = self.owners[phase.stage + step] if step else rank
            across = phase.kind == "reduce-across"
            key, sizes = (rank, peer, int(phase.exchange.source[0]), across), phase.exchange.num_bytes
            sizes = sizes * len(phase.start_seconds)
            if key in found[phase.axis]:
                sizes = sizes + found[phase.axis][key].exchange.num_bytes
            exchange = replace(phase.exchange, num_bytes=sizes)
            found[phase.axis][key] = _Part(rank, peer, exchange)
        return {axis: list(found[axis].values()) for axis in _AXES}

    def slowdown(self, slower: dict[Axis, Numbers]) -> TransferSlowdown:
        """Return the job's slowdown. ``slower``: for each axis, the slowdown of every rate group, in the
        order of the axis's parts."""
        layout = self.costs.workload.layout
        ranks: dict[Axis, list[float]] = {axis: [1.0] * layout.pp for axis in ("dp", "tp")}
        for axis, found in ranks.items():
            for part, own in self._by_part(axis, slower[axis]):
                found[part.rank] = max(found[part.rank], float(own.max(initial=1.0)))
        return TransferSlowdown(tuple(ranks["dp"]), tuple(ranks["tp"]), self._messages(slower["pp"]))

    def _by_part(self, axis: Axis, slower: Numbers) -> list[tuple[_Part, Numbers]]:
        parts = self.parts[axis]
        cuts = np.cumsum([part.exchange.num_rate_groups for part in parts])[:-1]
        return list(zip(parts, np.split(slower, cuts), strict=True)) if parts else []

    def _messages(self, slower: Numbers) -> dict[tuple[int, int], float]:
        """Return the slowdowns in the replica with the slowest messages in total; its ranks share a
        pipeline's rate."""
        layout = self.costs.workload.layout
        pairs: defaultdict[tuple[int, int], Numbers] = defaultdict(lambda: np.ones(layout.dp))
        width = layout.pp * layout.tp * layout.cp
        for part, own in self._by_part("pp", slower):
            replicas = part.exchange.source // width
            np.maximum.at(pairs[part.rank, part.peer], replicas, own)
        if not pairs:
            return {}
        every = np.array(list(pairs.values()))
        slowest = int(np.argmax(every.sum(0) + (every.max(0) - 1) * len(every)))
        return {ends: float(found[slowest]) for ends, found in pairs.items()}


@dataclass(frozen=True)
class _AtOnce:
    """All transfers of one axis between nodes, of all jobs."""

    flows: Flows
    rate_group: _Ints
    """Index of each flow's rate group without gaps, shape (F)."""
    paces: _Ints
    """Numbers of these rate groups among all rate groups."""
    counts: tuple[int, ...]
    """Number of rate groups of each job."""
    free: Numbers
    """Rates of the rate groups on ports alone."""

    @cached_property
    def digest(self) -> bytes:
        """Hash of everything that routes and rates depend on."""
        flows = self.flows
        every = (flows.source, flows.target, flows.entropy, self.rate_group)
        return sha256(b"".join(one.tobytes() for one in every)).digest()


@dataclass(frozen=True)
class HashDraw:
    """The routes and slowdowns under one seed of the hashes."""

    paths: dict[Axis, Paths]
    slowdowns: tuple[TransferSlowdown, ...]
    """Slowdown of each job."""


RoutingCache = dict[tuple[bytes, int], tuple[Paths, Numbers]]
"""Routes of the flows and rates of their rate groups, by flows and seed."""


class JobExposure:
    """The exposure of jobs on a fabric to hash collisions."""

    def __init__(
        self,
        routes: Routes,
        jobs: Sequence[FabricJob],
        *,
        queue_pairs: int = 1,
        routing: Routing = "ecmp",
        known: RoutingCache | None = None,
    ) -> None:
        """Prepare the jobs. ``queue_pairs``: number over which each transfer is spread
        (NCCL_IB_QPS_PER_CONNECTION). ``known``: a cache for the same fabric, queue pairs and routing."""
        self.routes, self.jobs = routes, tuple(jobs)
        self.queue_pairs, self.routing = queue_pairs, routing
        self.known = known

    @property
    def is_drawn(self) -> bool:
        """Whether the routing depends on seeds."""
        return self.routing == "ecmp"

    def _routed(self, axis: Axis, seed: int) -> tuple[Paths, Numbers]:
        """Return the routes of an axis and the rates of its rate groups."""
        here, known = self.at_once(axis), self.known
        key = here.digest, seed
        if known is not None and key in known:
            return known[key]
        flows, rates = here.flows, self.routes.fabric.bytes_per_second
        paths = ecmp(self.routes, flows, seed) if self.is_drawn else adaptive(self.routes, flows)
        found = paths, group_rates(rates, paths, here.rate_group, self.queue_pairs)
        if known is not None:
            known[key] = found
        return found

    def at_once(self, axis: Axis) -> _AtOnce:
        """Return the flows of an axis."""
        return self._at_once[axis]

    @cached_property
    def _at_once(self) -> dict[Axis, _AtOnce]:
        return {axis: self._gathered(axis) for axis in _AXES}

    def _gathered(self, axis: Axis) -> _AtOnce:
        flows, paces, counts = list[Flows](), list[_Ints](), list[int]()
        for job in self.jobs:
            exchange = merge_transfers([part.exchange for part in job.parts[axis]])
            own, of = inter_node_flows(exchange, job.mapping, queue_pairs=self.queue_pairs)
            flows.append(own)
            paces.append(exchange.rate_group[of] + sum(counts))
            counts.append(exchange.num_rate_groups)
        both = _together(flows)
        numbers, rate_group = np.unique(np.concatenate(paces), return_inverse=True)
        free = np.empty(0)
        if len(both):
            free = port_limited_group_rates(self.routes.fabric, both, rate_group, self.queue_pairs)
        return _AtOnce(both, rate_group, numbers, tuple(counts), free)

    def _slower(self, axis: Axis, reached: Numbers) -> list[Numbers]:
        """Return the slowdown of every rate group of an axis, by job; 1 where no transfer leaves a node."""
        here = self.at_once(axis)
        found = np.ones(sum(here.counts))
        if len(here.flows):
            found[here.paces] = np.maximum(1.0, here.free / reached)
        return np.split(found, np.cumsum(here.counts)[:-1])

    def draw(self, seed: int) -> HashDraw:
        """Return the routes and slowdowns under one seed."""
        routed = {axis: self._routed(axis, seed) for axis in _AXES}
        slower = {axis: self._slower(axis, reached) for axis, (_, reached) in routed.items()}
        slowdowns = (
            job.slowdown({axis: slower[axis][number] for axis in _AXES})
            for number, job in enumerate(self.jobs)
        )
        return HashDraw({axis: paths for axis, (paths, _) in routed.items()}, tuple(slowdowns))

    def draws(self, seeds: Sequence[int]) -> Iterator[HashDraw]:
        """Return one draw for each seed, or a single one where the routing is deterministic."""
        return map(self.draw, seeds if self.is_drawn else seeds[:1])

    def seconds(self, iteration_seconds: Callable[[Costs], float], seeds: Sequence[int]) -> Numbers:
        """Return the seconds of an iteration, ``[seed, job]``. ``iteration_seconds``: simulates costs and
        returns seconds."""
        return np.array([self.simulated(iteration_seconds, draw) for draw in self.draws(seeds)])

    def simulated(self, iteration_seconds: Callable[[Costs], float], draw: HashDraw) -> list[float]:
        """Return the seconds of an iteration of each job under one draw."""
        pairs = zip(self.jobs, draw.slowdowns, strict=True)
        return [iteration_seconds(fabric_costs(job, slowdown)) for job, slowdown in pairs]


def fabric_costs(job: FabricJob, slowdown: TransferSlowdown) -> FabricCosts:
    """Return a job's costs under one draw."""
    return FabricCosts(job.costs.workload, job.costs.cluster, slowdown)


def _together(flows: Sequence[Flows]) -> Flows:
    return Flows(
        *(
            np.concatenate([getattr(one, name) for one in flows])
            for name in ("source", "target", "num_bytes", "start_seconds", "entropy")
        )
    )
