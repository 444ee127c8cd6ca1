"""One iteration of a program under a cost model: the spans of every rank.

The program is the one that the runtime executes; `myriad.planner.simulation.rank_clocks` computes the
waiting. Replicas that cannot differ are simulated once: without stragglers one pipeline represents 12,288
ranks. Communication behind compute slows the compute (`busy_ratio` of a link). Two iterations are run and the
second is reported, so that gathers issued behind the optimizer are in flight as in a long run.

`predicted_spans` returns the iteration as spans of a run, with the same names, by rank number, from the
iteration's start. Replicas that were simulated as one appear once, as the first of them. Tensor-parallel
ranks run the same actions and appear as the first of them.
"""

import random
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from myriad.comm.layout import Layout
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.simulation.expert_waits import ExpertWaits, ExpertWindow, replicas_that_share
from myriad.planner.simulation.rank_clocks import RankClocks, SimulatedSpan
from myriad.planner.simulation.spans_in_layers import SpansInLayers
from myriad.program.actions import COMPUTE, SEMANTICS, Action, Kind, Program, chunk_of
from myriad.program.build import Lowered, build_program
from myriad.telemetry.spans import Span

if TYPE_CHECKING:
    from myriad.planner.simulation.simulated_events import NetworkEvents

__all__ = [
    "CostModelRun",
    "Prediction",
    "SimulatedSpan",
    "iteration_program",
    "predicted_spans",
    "replica_programs",
    "simulate",
]


@dataclass(frozen=True)
class Prediction:
    """One simulated iteration: its seconds, its program and the spans of each rank."""

    seconds: float
    program: Program
    spans: tuple[SimulatedSpan, ...]


def simulate(
    costs: Costs,
    *,
    slower: Mapping[tuple[int, int], float] | None = None,
    jitter: float = 0.0,
    seed: int = 1,
    program: Program | None = None,
    spans: bool = True,
    every_replica: bool = False,
    network: "NetworkEvents | None" = None,
) -> Prediction:
    """Simulate one iteration. ``slower``: factor on the compute of (replica, pipeline rank). ``jitter``:
    standard deviation of the factor on each compute action; with it, or with ``every_replica``, every replica
    is simulated. ``program``: a result of `iteration_program` for a layout of the same shape, with any number
    of micro-batches, used for all replicas; off: built here, with the job's micro-batches per replica.
    ``network``: network events in the iteration."""
    dp = costs.workload.layout.dp
    programs = [program] * dp if program else replica_programs(costs)
    replicas = list(range(dp))
    if not (every_replica or jitter):
        touched = {replica for replica, _ in slower or {}} | (network.replicas if network else set())
        replicas = _representative_replicas(programs, _that_wait_for(touched, costs.workload.layout))
    run = CostModelRun(
        [programs[replica] for replica in replicas], costs, replicas, dict(slower or {}), jitter, seed
    )
    first = run.iterate()
    if network is not None:
        network.begin_seconds, run.network = max(first), network
    run.keep = spans
    second = run.iterate()
    seconds = max(second) - max(first)
    return Prediction(seconds, run.program, tuple(run.spans))


def _that_wait_for(touched: Collection[int], layout: Layout) -> set[int]:
    """Return all replicas that share experts with one of the given ones, and those themselves."""
    sharers = replicas_that_share(layout)
    firsts = {replica // sharers * sharers for replica in touched}
    return {first + number for first in firsts for number in range(sharers)}


def _representative_replicas(programs: Sequence[Program], slower: Collection[int]) -> list[int]:
    """Return the slower replicas, and for each distinct program one replica that represents all others. That
    replica is -1 where those all run the same program."""
    replicas = sorted(slower)
    first: dict[int, int] = {}
    for replica, program in enumerate(programs):
        if replica not in replicas:
            first.setdefault(program.num_micro_batches, replica)
    alike = len({program.num_micro_batches for program in programs}) == 1
    return replicas + ([-1] if alike and first else list(first.values()))


def replica_programs(costs: Costs) -> list[Program]:
    """Return the program of each replica for one iteration."""
    shares = costs.workload.micro_batches_per_replica
    made = {count: iteration_program(costs, count, max(shares)) for count in set(shares)}
    return [made[count] for count in shares]


def iteration_program(
    costs: Costs,
    num_micro_batches: int,
    most_micro_batches: int = 0,
    lowered: Lowered | None = None,
    *,
    checks: bool = True,
) -> Program:
    """Return the program of one iteration with so many micro-batches. ``most_micro_batches``: the largest
    number of any replica, where they differ. ``lowered``: a cache between calls. ``checks``: whether the
    program is proved."""
    workload = costs.workload
    program = build_program(
        workload.layout,
        workload.overlap,
        num_micro_batches,
        tied=workload.model.shares_embedding and not workload.validates_later,
        training=True,
        num_chunks=costs.num_chunks,
        most_micro_batches=most_micro_batches,
        orthogonalizes=workload.orthogonalizes,
        lowered=lowered,
        checks=checks,
    )
    if workload.dp_comm_at_ends:
        program = replace(program, ranks=tuple(map(_at_the_ends, program.ranks)))
    if workload.validates_later:
        program = replace(program, ranks=tuple(map(_without_norm, program.ranks)))
    return program


def _at_the_ends(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Move gathers to the start and reductions to the end, where the ranks wait for them."""
    first = [action for action in actions if action.kind is Kind.GATHER]
    last = [action for action in actions if action.kind in (Kind.REDUCE, Kind.REDUCE_ACROSS)]
    ends = (Kind.GATHER, Kind.REDUCE, Kind.REDUCE_ACROSS)
    rest = [action for action in actions if action.kind not in ends]
    steps = next(i for i, action in enumerate(rest) if action.kind in (Kind.CLIP, Kind.STEP))
    return (*first, *rest[:steps], *last, *rest[steps:])


def _without_norm(actions: Sequence[Action]) -> tuple[Action, ...]:
    return tuple(action for action in actions if action.kind is not Kind.CLIP)


class CostModelRun(RankClocks):
    """Rank clocks whose seconds come from a cost model."""

    def __init__(
        self,
        programs: Sequence[Program],
        costs: Costs,
        replicas: Sequence[int],
        slower: Mapping[tuple[int, int], float],
        jitter: float,
        seed: int,
    ) -> None:
        """Prepare a run. ``programs``: one program for each of the replicas."""
        layout = costs.workload.layout
        apart = layout.reduces_across and len(replicas) == layout.dp
        super().__init__(programs, costs, replicas, layout.num_shards if apart else None)
        self.costs = costs
        self.slower = [slower.get(lane, 1.0) for lane in self.lanes]
        self.random, self.jitter = random.Random(seed), jitter
        disturbed = any(replica >= 0 for replica in replicas)
        self.expert_waits = ExpertWaits(costs, self.lanes) if layout.ep > 1 and disturbed else None
        """The waiting for ranks that share experts; ``None``: nothing makes them wait."""

    def _begin(self) -> None:
        super()._begin()
        if self.expert_waits is not None:
            self.expert_waits.begin()

    def _do_next(self, lane: int) -> bool:
        waits, place, actions = self.expert_waits, self.next[lane], self.actions[lane]
        if waits is not None and place < len(actions) and actions[place].kind in COMPUTE:
            window = waits.window(actions[place])
            if window is not None and len(waits.peers[lane]) > 1:
                return self._do_with_peers(waits, lane, actions[place], window)
        return super()._do_next(lane)

    def _do_with_peers(self, waits: ExpertWaits, lane: int, action: Action, window: ExpertWindow) -> bool:
        """Run a compute action in which the lane exchanges tokens with its peers, if all have begun it."""
        meeting, begin, exposed = waits.meeting(lane, action), self.clock[lane], window.exposed_seconds
        if lane not in meeting.arrived:
            seconds = self._seconds(lane, self.lanes[lane][1], action, begin)
            meeting.arrived[lane] = begin, seconds - exposed
            if len(meeting.arrived) == len(waits.peers[lane]):
                meeting.blocks_end = waits.blocks_end(lane, action, self.network)
                self.runnable.extend(peer for peer in waits.peers[lane] if peer != lane)
        if meeting.blocks_end is None:
            return False
        computing = meeting.arrived[lane][1]
        end = meeting.blocks_end + window.tail_ratio * computing
        self._finish(lane, action, end - computing - exposed, end)
        return True

    def _seconds(self, lane: int, rank: int, action: Action, begin: float) -> float:
        cost = self._cost(lane, rank, action)
        return cost + self._slowed(lane, action, begin, cost) if action.kind in COMPUTE else cost

    def _slowed(self, lane: int, action: Action, begin: float, cost: float) -> float:
        """Return the seconds that gathers and reductions in flight add to a compute action."""
        end, across = begin + cost, self.costs.across_groups
        hidden = min(self.stream[lane], end) - max(begin, self.hidden_from[lane])
        more = 0.0
        if hidden > 0:
            more = self.costs.busy_ratio_of(action.stage, action.kind) * hidden
        if across is not None:
            hidden = min(self.across[lane], end) - max(begin, self.across_from[lane])
            more += float(across.ring.busy_ratio) * max(0.0, hidden)
        return more

    def _exchanged(self, action: Action) -> float:
        """Return the seconds of a compute action that a slow rank does not lengthen: the exchanges of tokens
        with experts."""
        window = self.expert_waits.window(action) if self.expert_waits is not None else None
        return 0.0 if window is None else window.exposed_seconds

    def _cost(self, lane: int, rank: int, action: Action) -> float:
        kind, costs = action.kind, self.costs
        if kind in COMPUTE:
            seconds = costs.stages[action.stage].seconds_of(kind)
            noise = max(0.5, self.random.gauss(1.0, self.jitter)) if self.jitter else 1.0
            exchanged = self._exchanged(action)
            computing = seconds * costs.cluster.expected_slowdown - exchanged
            return computing * self.slower[lane] * noise + exchanged
        if kind is Kind.UPDATE:
            return costs.stages[action.stage].update
        if kind is Kind.ORTHOGONALIZE:
            return costs.stages[action.stage].orthogonalize
        if kind is Kind.STEP:
            return sum(costs.stages[s].whole_update for s in self._stages_of(rank))
        if kind is Kind.LOAD:
            return costs.load
        if (copy := SEMANTICS[kind].starts_copy) and costs.copies_block:
            slowdown = costs.cluster.expected_slowdown * self.slower[lane]
            return costs.stages[action.stage].copy_seconds(copy) * slowdown
        if kind is Kind.EXCHANGE:
            return costs.workload.exchange_seconds
        return 0.0


def predicted_spans(prediction: Prediction, costs: Costs) -> Mapping[int, list[Span]]:
    """Return the spans of each rank in order, by rank number. A span that starts before the previous
    iteration has ended everywhere has a negative start."""
    layout, in_layers = costs.workload.layout, SpansInLayers(costs)
    start = max(span.start + span.duration for span in prediction.spans) - prediction.seconds
    taken = {span.replica for span in prediction.spans}
    first = next(replica for replica in range(layout.dp + 1) if replica not in taken)
    found: defaultdict[int, list[Span]] = defaultdict(list)
    for span in prediction.spans:
        replica = first if span.replica < 0 else span.replica
        rank = (replica * layout.pp + span.rank) * layout.cp * layout.tp
        action, begin = span.action, span.start - start
        chunk = chunk_of(action, prediction.program.num_stages)
        found[rank].append(
            Span(str(action.kind), action.stage, action.micro_batch, begin, span.duration, chunk)
        )
        if span.waited and action.kind in COMPUTE:  # for the slowest of the ranks that share experts
            found[rank].append(Span("expert_comm", action.stage, -1, begin, span.waited))
        found[rank] += (
            Span(one.name, action.stage, -1, one.start, one.seconds, one.step)
            for one in in_layers.of(action, begin + span.waited, span.duration - span.waited)
        )
    return dict(sorted(found.items()))
