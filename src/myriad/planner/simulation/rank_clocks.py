"""The clocks of every rank through an iteration: the order and the waiting, without the cost of an action.

Each rank of each replica is a list of actions and a few clocks:

    compute     does one action after the other
    data        gathers and reductions, in the order in which they were posted; each begins when all replicas
                have posted it (per-collective arrival)
    across      sums across groups of replicas, which use other links, likewise; each begins when the
                reduction that it follows has ended
    host link   copies to host memory in the order in which they were started; those back have another clock
    channel     what one rank sends to another, in order; a message begins when both sides have posted it

A subclass gives the seconds of an action: a cost model (`myriad.planner.simulation.simulator`), or
measurements (`myriad.dashboard.insight.what_if`). A `CommCosts` gives the seconds of messages and
collectives.
"""

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Protocol

from myriad.program.actions import SEMANTICS, Action, Collective, Copy, Payload, PipelineTransfer, Program

if TYPE_CHECKING:
    from myriad.planner.simulation.simulated_events import NetworkEvents

__all__ = ["CommCosts", "Place", "RankClocks", "SimulatedSpan", "StageCommCosts"]


@dataclass(frozen=True, slots=True)
class SimulatedSpan:
    """One action of one pipeline rank of one replica. Times count from the start of the iteration, and
    durations include waiting."""

    replica: int
    rank: int
    action: Action
    start: float
    duration: float
    waited: float
    """Part of the duration in which the rank was idle."""


class StageCommCosts(Protocol):
    """Data-parallel communication costs of one stage's parameters."""

    @property
    def own_parameters(self) -> float:
        """Number of the stage's parameters whose gradients a rank reduces."""

    @property
    def gather(self) -> float:
        """Seconds of the gather."""

    @property
    def reduce(self) -> float:
        """Seconds of the reduction."""

    @property
    def reduce_across(self) -> float:
        """Seconds of the sum across groups of replicas."""

    @property
    def gather_momentum(self) -> float:
        """Seconds in which matrices' momentum comes to the ranks that orthogonalize it."""

    @property
    def scatter_update(self) -> float:
        """Seconds in which orthogonalized updates return."""

    def copy_seconds(self, copy: Copy) -> float:
        """Return the seconds of a copy between device and host."""


class CommCosts(Protocol):
    """Seconds of the communication between ranks."""

    @property
    def stages(self) -> Sequence[StageCommCosts]:
        """Costs of all stages of the pipeline."""

    @property
    def tied(self) -> float:
        """Seconds to sum the gradients of the parameters that the first and the last stage share."""

    @property
    def copies_block(self) -> bool:
        """Whether a rank waits for each copy between device and host where it starts."""

    def message_between(self, source: int, target: int) -> float:
        """Return the seconds of a micro-batch's activations or gradients between two pipeline ranks."""

    def clip(self, own: float) -> float:
        """Seconds to compute the global gradient norm, for a rank with so many gradients."""


@dataclass
class _Channel:
    sends: deque[tuple[int, float]] = field(default_factory=deque)
    receives: deque[tuple[int, float]] = field(default_factory=deque)
    free: float = 0.0


Place = tuple[str, int, int, int]
"""A collective: its name, stage, count in that stage, and the number of the group that runs it."""


class RankClocks(ABC):
    """The clocks and action lists of all ranks. A lane is one pipeline rank of one replica."""

    def __init__(
        self,
        programs: Sequence[Program],
        travel: CommCosts,
        replicas: Sequence[int],
        num_shards: int | None = None,
    ) -> None:
        """Set all clocks to zero. ``programs``: one program for each of the replicas. ``num_shards``:
        replicas of a group, if all replicas are simulated in groups; ``None``: every
        collective is among all replicas."""
        self.num_shards = num_shards
        self.program = max(programs, key=lambda program: program.num_micro_batches)
        self.travel, self.replicas = travel, replicas
        self.num_ranks = self.program.num_ranks
        self.lanes = [(replica, rank) for replica in replicas for rank in range(self.num_ranks)]
        self.actions = [actions for program in programs for actions in program.ranks]
        """Actions of each lane."""
        self.network: NetworkEvents | None = None
        self.clock = [0.0] * len(self.lanes)
        self.stream = [0.0] * len(self.lanes)
        self.hidden_from = [0.0] * len(self.lanes)
        self.across = [0.0] * len(self.lanes)
        self.across_from = [0.0] * len(self.lanes)
        self.issued_across: list[tuple[Place, Sequence[int], float]] = []
        """Sums across groups that wait for the reductions before them."""
        self.host_links = [[0.0, 0.0] for _ in self.lanes]
        """Clocks of the copies from and to host memory."""
        self.copied: dict[tuple[Copy, int, int, int], float] = {}
        """Second at which a copy ends: its kind, lane, stage and micro-batch."""
        self.keep = False
        self.spans: list[SimulatedSpan] = []
        self.num_iterations = 0
        self.channels: defaultdict[tuple[int, int], _Channel] = defaultdict(_Channel)
        self.arrived: dict[tuple[int, int], float] = {}
        self.joined: defaultdict[Place, dict[int, float]] = defaultdict(dict)
        self.done: dict[Place, float] = {}
        self.counts: defaultdict[tuple[str, int, int], int] = defaultdict(int)
        self.last: dict[tuple[str, int, int], Place] = {}
        """The collective that each lane issued last; ``done`` has its end."""
        self.ahead: set[tuple[str, int, int]] = set()
        self.updated: set[tuple[int, int]] = set()
        self.own_parameters = [stage.own_parameters for stage in travel.stages]

    def iterate(self) -> list[float]:
        """Run the program once more, and return the clock of each lane at its end."""
        self._begin()
        if len(self.replicas) > 1:
            self._move_in_order()
        while self.runnable:
            lane = self.runnable.popleft()
            while self._do_next(lane):
                pass
        assert self._all_done(), "the checker proved that no rank waits forever"
        return list(self.clock)

    def _begin(self) -> None:
        self.next = [0] * len(self.lanes)
        self.posted = [False] * len(self.lanes)
        self.channels.clear()
        self.arrived.clear()
        self.joined.clear()
        self.updated.clear()
        self.num_iterations += 1
        self.runnable = deque(range(len(self.lanes)))

    def _all_done(self) -> bool:
        return all(self.next[lane] == len(actions) for lane, actions in enumerate(self.actions))

    def _move_in_order(self) -> None:
        """Advance the earliest lane first, so that every collective issued before an action is known when it
        runs."""
        order, waiting = count(), set(range(len(self.lanes)))
        heap: list[tuple[float, int, int]] = []
        while heap or self.runnable:
            while self.runnable:
                if (woken := self.runnable.popleft()) in waiting:
                    waiting.discard(woken)
                    heappush(heap, (self.clock[woken], next(order), woken))
            if not heap:
                return
            lane = heappop(heap)[2]
            waiting.add(lane)
            if self._do_next(lane):
                self.runnable.append(lane)

    def _do_next(self, lane: int) -> bool:
        """Run the lane's next action, and return whether it could run."""
        rank = self.lanes[lane][1]
        actions = self.actions[lane]
        if self.next[lane] == len(actions):
            return False
        action = actions[self.next[lane]]
        ready = self._ready(lane, rank, action)
        if ready is None:
            return False
        begin = max(self.clock[lane], ready)
        self._finish(lane, action, begin, begin + self._seconds(lane, rank, action, begin))
        return True

    def _finish(self, lane: int, action: Action, begin: float, end: float) -> None:
        """Record an action of the lane that waited until ``begin`` and ran until ``end``."""
        start, (replica, rank) = self.clock[lane], self.lanes[lane]
        self.clock[lane] = end
        self.posted[lane] = False
        self.next[lane] += 1
        if SEMANTICS[action.kind].updates:
            self.updated.add((lane, action.stage))
        if self.keep:
            self.spans.append(SimulatedSpan(replica, rank, action, start, end - start, begin - start))

    @abstractmethod
    def _seconds(self, lane: int, rank: int, action: Action, begin: float) -> float:
        """Return the seconds for which the action occupies its rank once its inputs are there."""

    def _stages_of(self, rank: int) -> list[int]:
        return [stage for stage, owner in enumerate(self.program.stage_rank) if owner == rank]

    def _ready(self, lane: int, rank: int, action: Action) -> float | None:
        """Return the second at which the action may begin; ``None``: not known yet."""
        does = SEMANTICS[action.kind]
        if does.posts and not self.posted[lane]:
            self.posted[lane] = True
            for transfer in action.transfers:
                self._post(lane, rank, transfer)
        if does.waits:
            return self._all_arrived(lane, action)
        if does.starts_copy is not None:
            return self._start_copy(lane, action, does.starts_copy)
        if does.ends_copy is not None:
            return self.copied[does.ends_copy, lane, action.stage, action.micro_batch]
        if does.starts is not None:
            waits = does.ends is not None
            when = self._collective(lane, action, does.starts, waits=waits)
            return when if waits else 0.0
        if does.ends is not None:
            return self.done.get(self.last[does.ends, lane, action.stage])
        if does.joins == "world":
            key = ("clip", -1, self.num_iterations, 0)
            return self._join(lane, key, range(len(self.lanes)), self._clip_seconds)
        if does.joins == "ends":
            replica = lane // self.num_ranks
            ends = {self.program.stage_rank[0], self.program.stage_rank[-1]}
            group = [replica * self.num_ranks + owner for owner in ends]
            key = ("tied", replica, self.num_iterations, 0)
            return self._join(lane, key, group, self.travel.tied)
        return 0.0

    def _start_copy(self, lane: int, action: Action, copy: Copy) -> float:
        """Issue a copy on the host link. Return the second at which the rank continues."""
        begin = self.clock[lane]
        key = copy, lane, action.stage, action.micro_batch
        if self.travel.copies_block:
            self.copied[key] = begin
        else:
            link = self.host_links[lane]
            seconds = self.travel.stages[action.stage].copy_seconds(copy)
            link[copy.is_to_host] = max(begin, link[copy.is_to_host]) + seconds
            self.copied[key] = link[copy.is_to_host]
        return begin

    @cached_property
    def _clip_seconds(self) -> float:
        """Seconds of the norm on the rank with the most gradients: all ranks wait for it."""
        held = (sum(self.own_parameters[s] for s in self._stages_of(r)) for r in range(self.num_ranks))
        return max(map(self.travel.clip, held))

    def _join(self, lane: int, key: Place, lanes: Sequence[int], seconds: float) -> float | None:
        """Synchronize some lanes: return the second at which all continue, or ``None`` until all have
        arrived."""
        here = self.joined[key]
        if lane not in here:
            here[lane] = self.clock[lane]
            if len(here) == len(lanes):
                begin = max(here.values())
                self.done[key] = begin + self._met(begin, seconds, lanes)
                self.runnable.extend(one for one in lanes if one != lane)
        return self.done.get(key)

    def _collective(self, lane: int, action: Action, name: Collective, *, waits: bool) -> float | None:
        """Issue a gather or reduction among the replicas' lanes of one rank. Return the second at which it
        ends, or ``None`` where that is not known yet."""
        key = (name, lane, action.stage)
        if not self.posted[lane]:
            if name is Collective.GATHER and not waits and key in self.ahead:
                self.ahead.discard(key)  # The previous iteration posted it behind its optimizer.
                return 0.0
            self.posted[lane] = waits
            self.counts[key] += 1
            group, number = self._group(lane, name)
            self.last[key] = (name, action.stage, self.counts[key], number)
            if name is Collective.GATHER and (lane, action.stage) in self.updated:
                self.ahead.add(key)
            self._arrive(lane, self.last[key], group)
        return self.done.get(self.last[key])

    def _group(self, lane: int, name: Collective) -> tuple[list[int], int]:
        """Return the lanes that run a collective with this one, and the number of their group."""
        (own, rank), num_replicas = divmod(lane, self.num_ranks), len(self.replicas)
        replicas, number, size = range(num_replicas), 0, self.num_shards
        if size is not None and name is Collective.REDUCE_ACROSS:
            number = own % size
            replicas = range(number, num_replicas, size)
        elif size is not None and name in (Collective.GATHER, Collective.REDUCE):
            number = own // size
            replicas = range(number * size, (number + 1) * size)
        return [replica * self.num_ranks + rank for replica in replicas], number

    def _arrive(self, lane: int, place: Place, group: Sequence[int]) -> None:
        here = self.joined[place]
        here[lane] = self.clock[lane]
        if len(here) == len(group):
            costs = self.travel.stages[place[1]]
            seconds = {
                Collective.GATHER: costs.gather,
                Collective.REDUCE: costs.reduce,
                Collective.REDUCE_ACROSS: costs.reduce_across,
                Collective.GATHER_MOMENTUM: costs.gather_momentum,
                Collective.SCATTER_UPDATE: costs.scatter_update,
            }
            name = Collective(place[0])
            if name is Collective.REDUCE_ACROSS:
                self.issued_across.append((place, group, seconds[name]))
            else:
                self._carry_chunk(place, group, seconds[name])
            self._start_across()
            self.runnable.extend(one for one in group if one != lane)

    def _start_across(self) -> None:
        """Execute the sums across groups whose reductions have ended."""
        waiting, self.issued_across = self.issued_across, []
        for place, group, seconds in waiting:
            before = [self.done.get(self.last[Collective.REDUCE, lane, place[1]]) for lane in group]
            known = [end for end in before if end is not None]
            if len(known) < len(before):
                self.issued_across.append((place, group, seconds))
            else:
                self._carry_chunk(place, group, seconds, max(known))
                self.runnable.extend(group)

    def _carry_chunk(self, place: Place, group: Sequence[int], seconds: float, earliest: float = 0.0) -> None:
        """Execute a collective that all lanes of its group have issued, not before ``earliest``."""
        across = place[0] == Collective.REDUCE_ACROSS
        stream, hidden_from = (self.across, self.across_from) if across else (self.stream, self.hidden_from)
        begin = max(earliest, *self.joined[place].values(), *(stream[one] for one in group))
        end = begin + self._met(begin, seconds, group)
        for one in group:
            if stream[one] < self.clock[one]:
                hidden_from[one] = begin
            stream[one] = end
        self.done[place] = end

    def _met(self, begin: float, seconds: float, lanes: Sequence[int]) -> float:
        """Return the seconds of a transfer among lanes, including the network events during it."""
        if self.network is None:
            return seconds
        return self.network.travel(begin, seconds, [self.lanes[lane] for lane in lanes])

    # Transfers.

    def _code(self, transfer: PipelineTransfer) -> int:
        place = transfer.stage * self.program.num_micro_batches + transfer.micro_batch
        return place * 2 + (transfer.payload is Payload.GRADIENT)

    def _post(self, lane: int, rank: int, transfer: PipelineTransfer) -> None:
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
        self._carry_message(place, way, max(self.clock[lane], posted), self.travel.message_between(*ends))
        self.runnable.append(other)

    def _carry_message(
        self, place: tuple[int, int], way: tuple[int, int], posted: float, seconds: float
    ) -> None:
        """Send a message from one lane to another, once both have posted it."""
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
