"""What a fabric does to jobs that run on it: how much longer transfers take, by the seeds of its hashes.

All transfers of one axis are taken to be under way at the same time, of all jobs: the rings of all pipeline
ranks, the messages between all pipeline neighbours, the tensor-parallel rings that leave a node. Their rates
are max-min fair, a ring goes at one pace (`myriad.network.exchange`), and a transfer's *stretch* is how much
slower that is than on ports alone. It multiplies the seconds of bytes that the cost model has for the same
transfer, so the plain prediction is the one with all stretches 1. A rank's collective waits for the slowest
of its tensor-parallel peers' rings; its pipeline is the slowest replica's.

With hashes that fall otherwise, other flows share a link: one seed is one draw, and the prediction becomes a
distribution.

Layouts that differ in schedules, sizes or shards often have the same flows between the same ports, and their
draws are the same: `Known` keeps them.

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

from myriad.network.exchange import Exchange, Seats, flows_of, joined, pace_rates, port_rates
from myriad.network.fabric import Numbers
from myriad.network.flows import Flows, Paths
from myriad.network.routing import Routes, adaptive, ecmp
from myriad.planner.cluster import Cluster
from myriad.planner.costs import Costs, StageCosts
from myriad.planner.job_flows import Axis, Phase, phases_of
from myriad.planner.work import Work
from myriad.program.schedules import stage_owners

__all__ = [
    "Draw",
    "FabricCosts",
    "JobExposure",
    "Known",
    "Routing",
    "Stretch",
    "Tenant",
    "fabric_costs",
    "without_spine",
]

Routing = Literal["ecmp", "adaptive"]
_AXES: tuple[Axis, ...] = ("dp", "pp", "tp")
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Stretch:
    """Of one job under one seed; 1 is as on ports alone."""

    data: tuple[float, ...]
    """By pipeline rank."""
    tensor: tuple[float, ...]
    messages: dict[tuple[int, int], float]
    """Between pipeline ranks, in the replica that is slowest by them."""

    @property
    def slowest_ring(self) -> float:
        """Of the data-parallel ones."""
        return max(self.data, default=1.0)


class FabricCosts(Costs):
    """A layout's costs where transfers are stretched. What `links.spine` says is left to the fabric."""

    def __init__(self, work: Work, cluster: Cluster, stretch: Stretch) -> None:
        super().__init__(work, without_spine(cluster))
        self.stretch = stretch

    @cached_property
    def stages(self) -> list[StageCosts]:
        layout, plain = self.work.layout, super().stages
        owners = stage_owners(layout.schedule_name, layout.pp, layout.virtual_stages)
        return [self._slower(one, owners[i // self.num_chunks]) for i, one in enumerate(plain)]

    def _slower(self, stage: StageCosts, rank: int) -> StageCosts:
        data, tensor = self.stretch.data[rank] - 1, self.stretch.tensor[rank] - 1
        sums, begun = self.data_sums, 0.0
        if data and (stage.gather or stage.reduce):
            begun = float(sums.half_seconds(0.0))
        whole = begun if self.work.layout.zero else float(sums.whole_seconds(0.0)) if data else 0.0
        times = stage.times
        return replace(
            stage,
            gather=stage.gather + data * max(0.0, stage.gather - begun),
            reduce=stage.reduce + data * max(0.0, stage.reduce - whole),
            forward=stage.forward + tensor * float(times.forward.tensor),
            backward_input=stage.backward_input
            + tensor * float(times.backward_input.tensor + stage.again.tensor),
        )

    def message_between(self, source: int, target: int) -> float:
        latency = float(self.pipeline.latency_seconds)
        return latency + (self.message - latency) * self.stretch.messages.get((source, target), 1.0)


def without_spine(cluster: Cluster) -> Cluster:
    """As the cost model sees it beside a fabric, which knows how wide the ways up are."""
    return cluster.model_copy(update={"links": cluster.links.model_copy(update={"spine": None})})


@dataclass(frozen=True)
class _Part:
    """Transfers of one pipeline rank to another, or among the same of all replicas."""

    rank: int
    peer: int
    exchange: Exchange
    """With the bytes of an iteration."""


class Tenant:
    """One job and where its ranks sit."""

    def __init__(self, costs: Costs, seats: Seats, phases: Sequence[Phase] | None = None) -> None:
        """``phases``: of the job, where they are known."""
        self.costs, self.seats = costs, seats
        self.phases = phases_of(costs) if phases is None else phases
        layout = costs.work.layout
        owners = stage_owners(layout.schedule_name, layout.pp, layout.virtual_stages)
        self.owners = [owners[i // costs.num_chunks] for i in range(costs.num_chunks * len(owners))]

    def at(self, seats: Seats) -> "Tenant":
        """The same job elsewhere."""
        return Tenant(self.costs, seats, self.phases)

    @cached_property
    def parts(self) -> dict[Axis, list[_Part]]:
        """By axis: what may be under way at once, each pair of ranks once."""
        found: defaultdict[Axis, dict[tuple[int, int, int], _Part]] = defaultdict(dict)
        for phase in self.phases:
            if phase.kind == "tied" or not len(phase.exchange):
                continue
            rank = self.owners[phase.stage]
            step = {"activation": 1, "gradient": -1}.get(phase.kind, 0)
            peer = self.owners[phase.stage + step] if step else rank
            key, sizes = (rank, peer, int(phase.exchange.source[0])), phase.exchange.num_bytes
            sizes = sizes * len(phase.start_seconds)
            if key in found[phase.axis]:
                sizes = sizes + found[phase.axis][key].exchange.num_bytes
            exchange = replace(phase.exchange, num_bytes=sizes)
            found[phase.axis][key] = _Part(rank, peer, exchange)
        return {axis: list(found[axis].values()) for axis in _AXES}

    def stretch(self, slower: dict[Axis, Numbers]) -> Stretch:
        """From those of all paces of an axis, in the order of its parts."""
        layout = self.costs.work.layout
        ranks: dict[Axis, list[float]] = {axis: [1.0] * layout.pp for axis in ("dp", "tp")}
        for axis, found in ranks.items():
            for part, own in self._by_part(axis, slower[axis]):
                found[part.rank] = max(found[part.rank], float(own.max(initial=1.0)))
        return Stretch(tuple(ranks["dp"]), tuple(ranks["tp"]), self._messages(slower["pp"]))

    def _by_part(self, axis: Axis, slower: Numbers) -> list[tuple[_Part, Numbers]]:
        parts = self.parts[axis]
        cuts = np.cumsum([part.exchange.num_paces for part in parts])[:-1]
        return list(zip(parts, np.split(slower, cuts), strict=True)) if parts else []

    def _messages(self, slower: Numbers) -> dict[tuple[int, int], float]:
        """Of the replica whose messages take longest in all; its ranks share a pipeline's pace."""
        layout = self.costs.work.layout
        pairs: defaultdict[tuple[int, int], Numbers] = defaultdict(lambda: np.ones(layout.dp))
        width = layout.pp * layout.tp * layout.cp * layout.ep
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
    """All transfers of an axis that leave nodes, of all jobs."""

    flows: Flows
    pace: _Ints
    """(F) Numbers without gaps."""
    paces: _Ints
    """Which of all they are."""
    counts: tuple[int, ...]
    """Paces of each job."""
    free: Numbers
    """Rates of the paces on ports alone."""

    @cached_property
    def digest(self) -> bytes:
        """Of all that routes and rates depend on."""
        flows = self.flows
        every = (flows.source, flows.target, flows.entropy, self.pace)
        return sha256(b"".join(one.tobytes() for one in every)).digest()


@dataclass(frozen=True)
class Draw:
    """One way in which hashes fall."""

    paths: dict[Axis, Paths]
    stretches: tuple[Stretch, ...]
    """Of each job."""


Known = dict[tuple[bytes, int], tuple[Paths, Numbers]]
"""By flows and seed: how they were routed, and the rates of their paces."""


class JobExposure:
    """Jobs on a fabric."""

    def __init__(
        self,
        routes: Routes,
        tenants: Sequence[Tenant],
        *,
        queue_pairs: int = 1,
        routing: Routing = "ecmp",
        known: Known | None = None,
    ) -> None:
        """``queue_pairs``: that each transfer is spread over (NCCL_IB_QPS_PER_CONNECTION). ``known``: what is
        kept of the same fabric, queue pairs and routing."""
        self.routes, self.tenants = routes, tuple(tenants)
        self.queue_pairs, self.routing = queue_pairs, routing
        self.known = known

    @property
    def is_drawn(self) -> bool:
        """Whether seeds matter."""
        return self.routing == "ecmp"

    def _routed(self, axis: Axis, seed: int) -> tuple[Paths, Numbers]:
        """As the fabric routes an axis, and rates of its paces."""
        here, known = self.at_once(axis), self.known
        key = here.digest, seed
        if known is not None and key in known:
            return known[key]
        flows, rates = here.flows, self.routes.fabric.bytes_per_second
        paths = ecmp(self.routes, flows, seed) if self.is_drawn else adaptive(self.routes, flows)
        found = paths, pace_rates(rates, paths, here.pace, self.queue_pairs)
        if known is not None:
            known[key] = found
        return found

    def at_once(self, axis: Axis) -> _AtOnce:
        """Flows of an axis."""
        return self._at_once[axis]

    @cached_property
    def _at_once(self) -> dict[Axis, _AtOnce]:
        return {axis: self._gathered(axis) for axis in _AXES}

    def _gathered(self, axis: Axis) -> _AtOnce:
        flows, paces, counts = list[Flows](), list[_Ints](), list[int]()
        for tenant in self.tenants:
            exchange = joined([part.exchange for part in tenant.parts[axis]])
            own, of = flows_of(exchange, tenant.seats, queue_pairs=self.queue_pairs)
            flows.append(own)
            paces.append(exchange.pace[of] + sum(counts))
            counts.append(exchange.num_paces)
        both = _together(flows)
        numbers, pace = np.unique(np.concatenate(paces), return_inverse=True)
        free = np.empty(0)
        if len(both):
            free = port_rates(self.routes.fabric, both, pace, self.queue_pairs)
        return _AtOnce(both, pace, numbers, tuple(counts), free)

    def _slower(self, axis: Axis, reached: Numbers) -> list[Numbers]:
        """Stretch of every pace of an axis, by job; 1 where nothing leaves a node."""
        here = self.at_once(axis)
        found = np.ones(sum(here.counts))
        if len(here.flows):
            found[here.paces] = np.maximum(1.0, here.free / reached)
        return np.split(found, np.cumsum(here.counts)[:-1])

    def draw(self, seed: int) -> Draw:
        """Under one seed."""
        routed = {axis: self._routed(axis, seed) for axis in _AXES}
        slower = {axis: self._slower(axis, reached) for axis, (_, reached) in routed.items()}
        stretches = (
            tenant.stretch({axis: slower[axis][number] for axis in _AXES})
            for number, tenant in enumerate(self.tenants)
        )
        return Draw({axis: paths for axis, (paths, _) in routed.items()}, tuple(stretches))

    def draws(self, seeds: Sequence[int]) -> Iterator[Draw]:
        """Under each; where nothing is drawn, once."""
        return map(self.draw, seeds if self.is_drawn else seeds[:1])

    def seconds(self, judge: Callable[[Costs], float], seeds: Sequence[int]) -> Numbers:
        """``[seed, job]`` of an iteration; ``judge``: the simulator's word on costs."""
        return np.array([self.judged(judge, draw) for draw in self.draws(seeds)])

    def judged(self, judge: Callable[[Costs], float], draw: Draw) -> list[float]:
        """Of an iteration of each job."""
        pairs = zip(self.tenants, draw.stretches, strict=True)
        return [judge(fabric_costs(tenant, stretch)) for tenant, stretch in pairs]


def fabric_costs(tenant: Tenant, stretch: Stretch) -> FabricCosts:
    """A job's costs under one draw."""
    return FabricCosts(tenant.costs.work, tenant.costs.cluster, stretch)


def _together(flows: Sequence[Flows]) -> Flows:
    return Flows(
        *(
            np.concatenate([getattr(one, name) for one in flows])
            for name in ("source", "target", "num_bytes", "start_seconds", "entropy")
        )
    )
