"""Slowdown of jobs by a fabric: how much longer their transfers take, by the seeds of its hashes.

The model assumes that all transfers of one axis, of all jobs, are in flight at the same time: the rings of
all pipeline ranks, the messages between all pipeline neighbours, the tensor-parallel rings that leave a node.
Their rates are max-min fair, and all transfers of a ring have one rate (`network.rank_transfers`). A
transfer's *slowdown* is the ratio of its rate on ports alone to its rate on the fabric. It multiplies the
cost model's seconds of the transferred bytes, so all slowdowns are 1 in the plain prediction. A rank's
collective waits for the slowest ring of its tensor-parallel peers. The pipeline runs at the rate of the
slowest replica. An exchange of tokens with experts, or of positions, ends with its slowest message.

Rings travel behind forwards and backwards, whose exchanges of tokens use the same ports and cables. So rates
are also shared out with both in flight. Exchanges have that lower rate while a ring travels, and a ring has
its own for a share of its time: the share of rings that is behind compute x the share of compute in which
tokens travel between nodes. Messages between stages, and what tensor-parallel ranks or ranks that share a
sequence send to other nodes, meet neither.

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
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.fabric.fabric_costs import FabricCosts, TransferSlowdown
from myriad.planner.fabric.job_flows import Axis, TransferPhase, transfer_phases
from myriad.planner.simulation.simulator import simulate
from myriad.program.actions import SEMANTICS, Collective
from myriad.program.schedules import stage_owners

__all__ = [
    "FabricJob",
    "HashDraw",
    "JobExposure",
    "JobTraffic",
    "Routing",
    "RoutingCache",
    "fabric_costs",
]

Routing = Literal["ecmp", "adaptive"]
_AXES: tuple[Axis, ...] = ("dp", "pp", "tp", "edp", "ep", "cp")
_RINGS: tuple[Axis, ...] = ("dp", "edp")
"""Axes whose collectives may be in flight while tokens travel."""
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Part:
    """The transfers from one pipeline rank to another, or those of one pipeline rank among all replicas."""

    rank: int
    peer: int
    exchange: RankTransfers
    """The transfers with the bytes of a whole iteration."""


@dataclass(frozen=True, eq=False)
class JobTraffic:
    """What the ranks of a job send in an iteration, by an iteration at the rates of ports."""

    phases: list[TransferPhase]
    hidden_rings: tuple[float, ...]
    """Share of the seconds of gathers and reductions that is behind compute, by pipeline rank."""

    @classmethod
    def of(cls, costs: Costs) -> "JobTraffic":
        """Return the traffic of a simulated iteration."""
        prediction = simulate(costs)
        num_replicas = len({span.replica for span in prediction.spans})
        exposed, every = ([0.0] * prediction.program.num_ranks for _ in range(2))
        for span in prediction.spans:
            does = SEMANTICS[span.action.kind]
            if {does.starts, does.ends} & {Collective.GATHER, Collective.REDUCE}:
                exposed[span.rank] += span.waited / num_replicas
            if does.starts in (Collective.GATHER, Collective.REDUCE):
                stage = costs.stages[span.action.stage]
                seconds = stage.gather if does.starts is Collective.GATHER else stage.reduce
                every[span.rank] += seconds / num_replicas
        pairs = zip(exposed, every, strict=True)
        hidden = tuple(max(0.0, 1 - part / whole) if whole else 0.0 for part, whole in pairs)
        return cls(transfer_phases(costs, prediction), hidden)


class FabricJob:
    """One job and the placement of its ranks."""

    def __init__(self, costs: Costs, mapping: RankMapping, traffic: JobTraffic | None = None) -> None:
        """Place a job. ``traffic``: what its ranks send, where that is known."""
        self.costs, self.mapping = costs, mapping
        self.traffic = JobTraffic.of(costs) if traffic is None else traffic
        self.phases = self.traffic.phases
        layout = costs.workload.layout
        owners = stage_owners(layout.schedule_name, layout.pp, layout.virtual_stages)
        self.owners = [owners[i // costs.num_chunks] for i in range(costs.num_chunks * len(owners))]

    def at(self, mapping: RankMapping) -> "FabricJob":
        """Return the same job at another placement."""
        return FabricJob(self.costs, mapping, self.traffic)

    @cached_property
    def parts(self) -> dict[Axis, list[_Part]]:
        """The transfers by axis that may be in flight at once, with each pair of ranks once."""
        found: defaultdict[Axis, dict[tuple[int, int, int, bool, int], _Part]] = defaultdict(dict)
        for phase in self.phases:
            if phase.kind == "tied" or not len(phase.exchange):
                continue
            rank = self.owners[phase.stage]
            step = {"activation": 1, "gradient": -1}.get(phase.kind, 0)
            peer = self.owners[phase.stage + step] if step else rank
            others = phase.kind == "reduce-across", len(phase.exchange)  # other pairs of the same ranks
            key = rank, peer, int(phase.exchange.source[0]), *others
            sizes = phase.exchange.num_bytes * len(phase.start_seconds)
            if key in found[phase.axis]:
                sizes = sizes + found[phase.axis][key].exchange.num_bytes
            exchange = replace(phase.exchange, num_bytes=sizes)
            found[phase.axis][key] = _Part(rank, peer, exchange)
        return {axis: list(found[axis].values()) for axis in _AXES}

    def slowdown(
        self, slower: dict[Axis, Numbers], beside: dict[Axis, Numbers], exchange_seconds: Numbers
    ) -> TransferSlowdown:
        """Return the job's slowdown. ``slower``: for each axis, the slowdown of every rate group, in the
        order of the axis's parts. ``beside``: that of rings and of exchanges of tokens while both are in
        flight. ``exchange_seconds``: seconds of the exchanges of an iteration on ports alone."""
        data, tensor, expert_data, exchanges, context = (
            self._by_rank(axis, slower[axis]) for axis in ("dp", "tp", "edp", "ep", "cp")
        )
        messages = self._messages(slower["pp"])
        if not self.parts["ep"]:
            return TransferSlowdown(data, tensor, messages, expert_data, context=context)
        shares = self._shares_beside(exchanges, self._by_rank("ep", exchange_seconds, least=0.0))
        alone = (*data, *expert_data)
        data = _mixed(data, self._by_rank("dp", beside["dp"]), shares)
        expert_data = _mixed(expert_data, self._by_rank("edp", beside["edp"]), shares)
        met = self._by_rank("ep", beside["ep"])
        return TransferSlowdown(data, tensor, messages, expert_data, exchanges, met, alone, context)

    def _shares_beside(self, slowdown: tuple[float, ...], seconds: tuple[float, ...]) -> list[float]:
        """Return the share of the rings' time in which tokens travel, by pipeline rank. ``seconds``: those of
        the exchanges of an iteration, at the rates of ports."""
        computing = [0.0] * len(seconds)
        for rank, stage in zip(self.owners, self.costs.stages, strict=True):
            computing[rank] += (stage.forward + stage.backward) * self.costs.workload.num_micro_batches
        ranks = zip(self.traffic.hidden_rings, seconds, slowdown, computing, strict=True)
        return [hidden * min(1.0, one * slower / whole) for hidden, one, slower, whole in ranks]

    def _by_rank(self, axis: Axis, values: Numbers, *, least: float = 1.0) -> tuple[float, ...]:
        """Return the largest value of a rate group of each pipeline rank."""
        found = [least] * self.costs.workload.layout.pp
        for part, own in self._by_part(axis, values):
            found[part.rank] = max(found[part.rank], float(own.max(initial=least)))
        return tuple(found)

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
    seed: int


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

    def _beside(self, routed: dict[Axis, tuple[Paths, Numbers]]) -> dict[Axis, Numbers]:
        """Return the rates of rings and of exchanges of tokens while both are in flight; that of exchanges
        beside the rings that slow them more."""
        found, tokens = {axis: reached for axis, (_, reached) in routed.items()}, self.at_once("ep")
        for axis in _RINGS:
            rings = self.at_once(axis)
            if not (len(rings.flows) and len(tokens.flows)):
                continue
            if self.is_drawn:
                paths = _joined(routed[axis][0], routed["ep"][0])
            else:
                paths = adaptive(self.routes, _together([rings.flows, tokens.flows]))
            groups = np.concatenate([rings.rate_group, tokens.rate_group + len(rings.paces)])
            reached = group_rates(self.routes.fabric.bytes_per_second, paths, groups, self.queue_pairs)
            found[axis] = reached[: len(rings.paces)]
            found["ep"] = np.minimum(found["ep"], reached[len(rings.paces) :])
        return found

    @cached_property
    def _exchange_seconds(self) -> list[Numbers]:
        """Seconds in which each rate group's tokens of an iteration travel on ports alone, by job."""
        here = self.at_once("ep")
        found = np.zeros(sum(here.counts))
        if len(here.flows):
            seconds = here.flows.num_bytes * self.queue_pairs / here.free[here.rate_group]
            np.maximum.at(found, here.paces[here.rate_group], seconds)
        return np.split(found, np.cumsum(here.counts)[:-1])

    def draw(self, seed: int, *, meets: bool = True) -> HashDraw:
        """Return the routes and slowdowns under one seed. ``meets``: whether rings and exchanges of tokens
        may be in flight at once."""
        routed = {axis: self._routed(axis, seed) for axis in _AXES}
        slower = {axis: self._slower(axis, reached) for axis, (_, reached) in routed.items()}
        rates = self._beside(routed) if meets else {axis: reached for axis, (_, reached) in routed.items()}
        beside = {axis: self._slower(axis, reached) for axis, reached in rates.items()}
        slowdowns = (
            job.slowdown(
                {axis: slower[axis][number] for axis in _AXES},
                {axis: beside[axis][number] for axis in _AXES},
                self._exchange_seconds[number],
            )
            for number, job in enumerate(self.jobs)
        )
        return HashDraw({axis: paths for axis, (paths, _) in routed.items()}, tuple(slowdowns), seed)

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


def _mixed(alone: Sequence[float], beside: Sequence[float], shares: Sequence[float]) -> tuple[float, ...]:
    """Return the slowdown of transfers that are slower for a share of their time."""
    ranks = zip(alone, beside, shares, strict=True)
    return tuple(1 / ((1 - share) / one + share / slower) for one, slower, share in ranks)


def _joined(first: Paths, second: Paths) -> Paths:
    """Return the paths of both, one after the other."""
    return Paths(
        np.concatenate([first.first, second.first[1:] + first.first[-1]]),
        np.concatenate([first.link, second.link]),
    )


def _together(flows: Sequence[Flows]) -> Flows:
    return Flows(
        *(
            np.concatenate([getattr(one, name) for one in flows])
            for name in ("source", "target", "num_bytes", "start_seconds", "entropy")
        )
    )
