"""One iteration of a program on a cost model: every rank's spans.

The program is the one that the runtime reads. Each rank of each replica is a list of actions and a few
clocks:

    compute     does one action after the other
    data        gathers and reductions, in the order in which they were posted; each begins when all replicas
                have posted it (per-collective arrival)
    channel     what one rank sends to another, in order; a message begins when both sides have posted it

Replicas that cannot differ are one: without stragglers one pipeline stands for 12,288 ranks. What hides
behind compute slows it (`busy_ratio` of a link). Two iterations are run and the second is reported, so that
parameters that travel behind the optimizer are there, or not, as they are in a long run.
"""

import random
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

from myriad.planner.costs import Costs
from myriad.program.actions import COMPUTE, Action, Kind, Payload, Program, Transfer
from myriad.program.build import Lowered, build_program

if TYPE_CHECKING:
    from myriad.planner.network_events import NetworkEvents

__all__ = ["Prediction", "Run", "SimulatedSpan", "program_of", "programs_of", "simulate"]

_COLLECTIVES = {
    Kind.GATHER: ("gather", True),
    Kind.REDUCE: ("reduce", True),
    Kind.START_GATHER: ("gather", False),
    Kind.START_REDUCE: ("reduce", False),
}
"""Their name, and whether the rank waits for them where they are posted."""
_AWAITED = {Kind.AWAIT_GATHER: "gather", Kind.AWAIT_REDUCE: "reduce"}


@dataclass(frozen=True, slots=True)
class SimulatedSpan:
    """Of one pipeline rank of one replica, from the start of the iteration, waiting included."""

    replica: int
    rank: int
    action: Action
    start: float
    duration: float
    waited: float
    """Of it, in which the rank did nothing."""


@dataclass(frozen=True)
class Prediction:
    """One iteration."""

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
    """``slower``: factor on the compute of (replica, pipeline rank); ``jitter``: standard deviation of each
    compute's factor, for which every replica is simulated, as ``every_replica`` asks in any case.
    ``program``: what `program_of` made of a layout of the same shape, of any number of
    micro-batches, for all replicas; off: made here, with the job's shares. ``network``: what happens to it in
    the iteration."""
    dp = costs.work.layout.dp
    programs = [program] * dp if program else programs_of(costs)
    replicas = list(range(dp))
    if not (every_replica or jitter):
        touched = {replica for replica, _ in slower or {}} | (network.replicas if network else set())
        replicas = _that_differ(programs, touched)
    run = Run([programs[replica] for replica in replicas], costs, replicas, dict(slower or {}), jitter, seed)
    first = run.iterate()
    if network is not None:
        network.begin_seconds, run.network = max(first), network
    run.keep = spans
    second = run.iterate()
    seconds = max(second) - max(first)
    return Prediction(seconds, run.program, tuple(run.spans))


def _that_differ(programs: Sequence[Program], slower: Collection[int]) -> list[int]:
    """Replicas that are slower, and one of each program that stands for all that are as planned; -1 where
    those are all alike."""
    replicas = sorted(slower)
    first: dict[int, int] = {}
    for replica, program in enumerate(programs):
        if replica not in replicas:
            first.setdefault(program.num_micro_batches, replica)
    alike = len({program.num_micro_batches for program in programs}) == 1
    return replicas + ([-1] if alike and first else list(first.values()))


def programs_of(costs: Costs) -> list[Program]:
    """What the ranks of each replica run in one iteration."""
    shares = costs.work.shares
    made = {count: program_of(costs, count, max(shares)) for count in set(shares)}
    return [made[count] for count in shares]


def program_of(
    costs: Costs, num_micro_batches: int, most_micro_batches: int = 0, lowered: Lowered | None = None
) -> Program:
    """What the ranks run in one iteration of so many micro-batches; ``most_micro_batches``: of any replica,
    where they differ. ``lowered``: what is kept between calls."""
    work = costs.work
    program = build_program(
        work.layout,
        work.overlap,
        num_micro_batches,
        tied=work.model.tied,
        training=True,
        num_chunks=costs.num_chunks,
        most_micro_batches=most_micro_batches,
        lowered=lowered,
    )
    if work.practice.at_the_ends:
        program = replace(program, ranks=tuple(map(_at_the_ends, program.ranks)))
    return program


def _at_the_ends(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Gathers first and reductions last, where they are waited for."""
    first = [action for action in actions if action.kind is Kind.GATHER]
    last = [action for action in actions if action.kind is Kind.REDUCE]
    rest = [action for action in actions if action.kind not in (Kind.GATHER, Kind.REDUCE)]
    steps = next(i for i, action in enumerate(rest) if action.kind in (Kind.CLIP, Kind.STEP))
    return (*first, *rest[:steps], *last, *rest[steps:])


@dataclass
class _Channel:
    sends: deque[tuple[int, float]] = field(default_factory=deque)
    receives: deque[tuple[int, float]] = field(default_factory=deque)
    free: float = 0.0


class Run:
    """Clocks and lists of all ranks; a lane is a rank of a replica."""

    def __init__(
        self,
        programs: Sequence[Program],
        costs: Costs,
        replicas: Sequence[int],
        slower: Mapping[tuple[int, int], float],
        jitter: float,
        seed: int,
    ) -> None:
        """``programs``: one for each of the replicas."""
        self.program = max(programs, key=lambda program: program.num_micro_batches)
        self.costs, self.replicas = costs, replicas
        self.num_ranks = self.program.num_ranks
        self.lanes = [(replica, rank) for replica in replicas for rank in range(self.num_ranks)]
        self.actions = [actions for program in programs for actions in program.ranks]
        """Of each lane."""
        slowdown = costs.cluster.expected_slowdown
        self.factor = [slowdown * slower.get(lane, 1.0) for lane in self.lanes]
        self.random, self.jitter = random.Random(seed), jitter
        self.network: NetworkEvents | None = None
        self.clock = [0.0] * len(self.lanes)
        self.stream = [0.0] * len(self.lanes)
        self.hidden_from = [0.0] * len(self.lanes)
        self.keep = False
        self.spans: list[SimulatedSpan] = []
        self.num_iterations = 0
        self.channels: defaultdict[tuple[int, int], _Channel] = defaultdict(_Channel)
        self.arrived: dict[tuple[int, int], float] = {}
        self.joined: defaultdict[tuple[str, int, int], dict[int, float]] = defaultdict(dict)
        self.done: dict[tuple[str, int, int], float] = {}
        self.counts: defaultdict[tuple[str, int, int], int] = defaultdict(int)
        self.last: dict[tuple[str, int, int], tuple[str, int, int]] = {}
        """Of each lane's collectives the one posted last; ``done`` knows when it is."""
        self.ahead: set[tuple[str, int, int]] = set()
        self.updated: set[tuple[int, int]] = set()
        self.chunk_parameters = [stage.parameters for stage in costs.stages]

    def iterate(self) -> list[float]:
        """Runs the program once more; the lanes' clocks at its end."""
        self._begin()
        if len(self.replicas) > 1:
            self._move_in_order()
        while self.movable:
            lane = self.movable.popleft()
            while self._do_next(lane):
                pass
        assert self._all_done(), "the checker proved that nobody waits for ever"
        return list(self.clock)

    def _begin(self) -> None:
        self.next = [0] * len(self.lanes)
        self.posted = [False] * len(self.lanes)
        self.channels.clear()
        self.arrived.clear()
        self.joined.clear()
        self.updated.clear()
        self.num_iterations += 1
        self.movable = deque(range(len(self.lanes)))

    def _all_done(self) -> bool:
        return all(self.next[lane] == len(actions) for lane, actions in enumerate(self.actions))

    def _move_in_order(self) -> None:
        """The earliest lane does its next action: what replicas have posted is known before one computes."""
        order, waiting = count(), set(range(len(self.lanes)))
        heap: list[tuple[float, int, int]] = []
        while heap or self.movable:
            while self.movable:
                if (woken := self.movable.popleft()) in waiting:
                    waiting.discard(woken)
                    heappush(heap, (self.clock[woken], next(order), woken))
            if not heap:
                return
            lane = heappop(heap)[2]
            waiting.add(lane)
            if self._do_next(lane):
                self.movable.append(lane)

    def _do_next(self, lane: int) -> bool:
        """The lane's next action; whether it could be done."""
        rank = self.lanes[lane][1]
        actions = self.actions[lane]
        if self.next[lane] == len(actions):
            return False
        action = actions[self.next[lane]]
        ready = self._ready(lane, rank, action)
        if ready is None:
            return False
        begin = max(self.clock[lane], ready)
        cost = self._cost(lane, rank, action)
        if action.kind in COMPUTE:
            cost += self._slowed(lane, begin, cost)
        self._finish(lane, action, begin, begin + cost)
        return True

    def _finish(self, lane: int, action: Action, begin: float, end: float) -> None:
        """The lane has done an action, which it waited for until ``begin``."""
        start, (replica, rank) = self.clock[lane], self.lanes[lane]
        self.clock[lane] = end
        self.posted[lane] = False
        self.next[lane] += 1
        if action.kind is Kind.UPDATE:
            self.updated.add((lane, action.stage))
        if self.keep:
            self.spans.append(SimulatedSpan(replica, rank, action, start, end - start, begin - start))

    def _slowed(self, lane: int, begin: float, cost: float) -> float:
        """By gathers and reductions that are under way meanwhile."""
        return float(self.costs.data.busy_ratio) * max(
            0.0, min(self.stream[lane], begin + cost) - max(begin, self.hidden_from[lane])
        )

    def _cost(self, lane: int, rank: int, action: Action) -> float:
        kind, costs = action.kind, self.costs
        if kind in COMPUTE:
            stage = costs.stages[action.stage]
            seconds = {
                Kind.FORWARD: stage.forward,
                Kind.BACKWARD: stage.backward,
                Kind.BACKWARD_INPUT: stage.backward_input,
                Kind.BACKWARD_WEIGHT: stage.backward_weight,
            }[kind]
            noise = max(0.5, self.random.gauss(1.0, self.jitter)) if self.jitter else 1.0
            return seconds * self.factor[lane] * noise
        if kind is Kind.UPDATE:
            return costs.stages[action.stage].update
        if kind is Kind.STEP:
            return sum(costs.stages[s].update for s in self._stages_of(rank))
        if kind is Kind.LOAD:
            return costs.load
        if kind is Kind.EXCHANGE:
            return costs.work.practice.exchange_seconds
        return 0.0

    def _stages_of(self, rank: int) -> list[int]:
        return [stage for stage, owner in enumerate(self.program.stage_rank) if owner == rank]

    def _ready(self, lane: int, rank: int, action: Action) -> float | None:
        """When the action may begin; ``None``: not known yet."""
        kind = action.kind
        if kind in (Kind.EXCHANGE, Kind.SEND, Kind.RECEIVE):
            if not self.posted[lane]:
                self.posted[lane] = True
                for transfer in action.transfers:
                    self._post(lane, rank, transfer)
            return self._all_arrived(lane, action) if kind is Kind.EXCHANGE else 0.0
        if kind is Kind.WAIT:
            return self._all_arrived(lane, action)
        if kind in _COLLECTIVES:
            name, waits = _COLLECTIVES[kind]
            when = self._collective(lane, action, name, waits=waits)
            return when if waits else 0.0
        if kind in _AWAITED:
            return self.done.get(self.last[_AWAITED[kind], lane, action.stage])
        if kind in (Kind.CLIP, Kind.STEP):
            return self._join(
                lane,
                ("clip", -1, self.num_iterations),
                list(range(len(self.lanes))),
                self._clip_seconds,
            )
        if kind is Kind.SYNC_TIED:
            replica = lane // self.num_ranks
            ends = {self.program.stage_rank[0], self.program.stage_rank[-1]}
            group = [replica * self.num_ranks + owner for owner in ends]
            return self._join(lane, ("tied", replica, self.num_iterations), group, self.costs.tied)
        return 0.0

    @cached_property
    def _clip_seconds(self) -> float:
        """Of the rank with most gradients, for which all wait."""
        held = (sum(self.chunk_parameters[s] for s in self._stages_of(r)) for r in range(self.num_ranks))
        return max(map(self.costs.clip, held))

    def _join(self, lane: int, key: tuple[str, int, int], lanes: list[int], seconds: float) -> float | None:
        """All of some lanes wait for each other."""
        here = self.joined[key]
        if lane not in here:
            here[lane] = self.clock[lane]
            if len(here) == len(lanes):
                begin = max(here.values())
                self.done[key] = begin + self._met(begin, seconds, lanes)
                self.movable.extend(one for one in lanes if one != lane)
        return self.done.get(key)

    def _collective(self, lane: int, action: Action, name: str, *, waits: bool) -> float | None:
        """A gather or reduction among the replicas' lanes of one rank, when the lane comes to it; when it is
        done."""
        key = (name, lane, action.stage)
        if not self.posted[lane]:
            if name == "gather" and not waits and key in self.ahead:
                self.ahead.discard(key)  # the last iteration posted it behind its optimizer
                return 0.0
            self.posted[lane] = waits
            self.counts[key] += 1
            self.last[key] = (name, action.stage, self.counts[key])
            if name == "gather" and (lane, action.stage) in self.updated:
                self.ahead.add(key)
            self._arrive(lane, self.last[key])
        return self.done.get(self.last[key])

    def _arrive(self, lane: int, place: tuple[str, int, int]) -> None:
        rank, here = self.lanes[lane][1], self.joined[place]
        here[lane] = self.clock[lane]
        group = [replica * self.num_ranks + rank for replica in range(len(self.replicas))]
        if len(here) == len(group):
            costs = self.costs.stages[place[1]]
            self._carry_chunk(place, group, costs.gather if place[0] == "gather" else costs.reduce)
            self.movable.extend(one for one in group if one != lane)

    def _carry_chunk(self, place: tuple[str, int, int], group: Sequence[int], seconds: float) -> None:
        """A collective that all lanes of its group have come to."""
        begin = max(max(self.joined[place].values()), *(self.stream[one] for one in group))
        end = begin + self._met(begin, seconds, group)
        for one in group:
            if self.stream[one] < self.clock[one]:
                self.hidden_from[one] = begin
            self.stream[one] = end
        self.done[place] = end

    def _met(self, begin: float, seconds: float, lanes: Sequence[int]) -> float:
        """Seconds of a transfer among lanes, with what happens to the network meanwhile."""
        if self.network is None:
            return seconds
        return self.network.travel(begin, seconds, [self.lanes[lane] for lane in lanes])

    # transfers

    def _code(self, transfer: Transfer) -> int:
        place = transfer.stage * self.program.num_micro_batches + transfer.micro_batch
        return place * 2 + (transfer.payload is Payload.GRADIENT)

    def _post(self, lane: int, rank: int, transfer: Transfer) -> None:
        other = lane - rank + transfer.peer
        way = (lane, other) if transfer.sends else (other, lane)
        channel = self.channels[way]
        mine, others = (
            (channel.sends, channel.receives) if transfer.sends else (channel.receives, channel.sends)
        )
        if not others:
            mine.append((self._code(transfer), self.clock[lane]))
            return
        _, posted = others.popleft()
        ends = (rank, transfer.peer) if transfer.sends else (transfer.peer, rank)
        place = lane // self.num_ranks, self._code(transfer)
        self._carry_message(place, way, max(self.clock[lane], posted), self.costs.message_between(*ends))
        self.movable.append(other)

    def _carry_message(
        self, place: tuple[int, int], way: tuple[int, int], posted: float, seconds: float
    ) -> None:
        """From one lane to another, when both have posted it."""
        channel = self.channels[way]
        begin = max(posted, channel.free)
        channel.free = begin + self._met(begin, seconds, way)
        self.arrived[place] = channel.free

    def _all_arrived(self, lane: int, action: Action) -> float | None:
        latest, replica = 0.0, lane // self.num_ranks
        for transfer in action.transfers:
            time = self.arrived.get((replica, self._code(transfer)))
            if time is None:
                return None
            latest = max(latest, time)
        return latest
