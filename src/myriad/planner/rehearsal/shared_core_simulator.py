"""Iterations of ranks that share a few cores, as when one machine rehearses a cluster.

Where `Cluster.shared_cores` is set, rank r computes on core r modulo their number. Ranks of one core that
compute at the same time share it evenly, and slow each other down through its caches
(`Cluster.turns_slowdown`). Transfers use the core as well (`Link.busy_ratio`). A transfer gets its share of
the core, takes longer where that is too little, and slows compute by what it uses. So two ranks on a core
fill each other's waiting, and overlap gains less there.

    core 0   rank 0  F0 ........ F1        alone: 1 s each
             rank 2  F0 ................   beside another: 2 s
                     ^ both at half speed

Time advances from event to event. A lane is one pipeline rank of one replica, with all its tensor-parallel
ranks. An event is a lane that starts or ends compute or receives its input, or a transfer that begins or
ends. Between two events all speeds are constant.
"""

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from myriad.planner.cost.collective_costs import tensor_group
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.simulation.rank_clocks import Place
from myriad.planner.simulation.simulator import CostModelRun, Prediction, replica_programs, simulate
from myriad.program.actions import COMPUTE, Action, Collective, Program

__all__ = ["predict_iteration"]

_LEAST_SPEED = 0.05
"""Lowest speed of compute while transfers want all of a core."""


def predict_iteration(costs: Costs, *, spans: bool = True) -> Prediction:
    """Simulate one iteration, with shared cores where the cluster has them."""
    cores = costs.cluster.shared_cores
    if cores is None:
        return simulate(costs, spans=spans)
    run = _SharingRun(replica_programs(costs), costs, cores)
    first = run.iterate()
    run.keep = spans
    second = run.iterate()
    return Prediction(max(second) - max(first), run.program, tuple(run.spans))


@dataclass
class _RunningAction:
    """An action in progress on a lane."""

    action: Action
    begin: float
    left: float
    """Remaining seconds of compute at full speed of the core."""
    idle: float
    """Seconds after the compute in which the core is free."""


@dataclass(eq=False)
class _InFlightTransfer:
    """A transfer among lanes. The transfers of one stream run one after the other."""

    lanes: Sequence[int]
    left: float
    """Remaining seconds at full speed of its cores."""
    busy_ratio: float
    streams: Sequence[Hashable]
    land: Callable[[float], None]
    """Called with the second at which the transfer ends."""


@dataclass(frozen=True)
class _CoreShare:
    """The current split of one core between compute and transfers."""

    compute_speed: float
    """Speed of each rank that computes."""
    transfer_speed: float


class _SharingRun(CostModelRun):
    """A simulation of all ranks of all replicas, in the order of time."""

    def __init__(self, programs: Sequence[Program], costs: Costs, num_cores: int) -> None:
        super().__init__(programs, costs, list(range(costs.workload.layout.dp)), {}, 0.0, 1)
        tp = costs.workload.layout.tp
        self.ranks_on = [
            Counter((lane * tp + index) % num_cores for index in range(tp)) for lane in range(len(self.lanes))
        ]
        num_ranks = sum(self.ranks_on, Counter[int]())
        speeds = costs.cluster.core_speeds or (1.0,) * num_cores
        self.core_speeds = [
            speed / costs.cluster.turns_slowdown(num_ranks[core]) for core, speed in enumerate(speeds)
        ]
        tensor = tensor_group(costs.cluster, float(tp))
        self.tensor_busy_ratio = min(1.0, float(tensor.busy_ratio))
        self.jobs: dict[int, _RunningAction] = {}
        self.transfers: list[_InFlightTransfer] = []
        """Transfers that have begun and not arrived."""
        self.streams: defaultdict[Hashable, deque[_InFlightTransfer]] = defaultdict(deque)
        """Queue of transfers of each stream; the first one is in flight."""
        self.events: list[tuple[float, int]] = []
        """The seconds at which waiting lanes continue, as a heap."""
        self.asleep: set[int] = set()

    def iterate(self) -> list[float]:
        self._begin()
        self.runnable.clear()
        now = max(self.clock)
        self.clock = [now] * len(self.lanes)
        self.events = [(now, lane) for lane in range(len(self.lanes))]
        self.asleep = set(range(len(self.lanes)))
        while not self._all_done():
            now = self._step(now)
        return list(self.clock)

    def _step(self, now: float) -> float:
        """Advance to the next event and return its time."""
        cores = self._cores()
        computing = {lane: self._compute_speed(lane, cores) for lane in self.jobs}
        travelling = {transfer: self._transfer_speed(transfer, cores) for transfer in self.transfers}
        computed = {lane: now + job.left / computing[lane] for lane, job in self.jobs.items()}
        arrived = {transfer: now + transfer.left / travelling[transfer] for transfer in self.transfers}
        ends = [*computed.values(), *arrived.values(), *(event[0] for event in self.events[:1])]
        assert ends, "the checker proved that no rank waits forever"
        time = max(now, min(ends))
        for lane, end in computed.items():
            self.jobs[lane].left = (end - time) * computing[lane]
            if end <= time:
                self._computed(lane, self.jobs.pop(lane), time)
        for transfer, end in arrived.items():
            transfer.left = (end - time) * travelling[transfer]
            if end <= time:
                self._arrived(transfer, time)
        while self.events and self.events[0][0] <= time:
            lane = heapq.heappop(self.events)[1]
            self.asleep.discard(lane)
            self.runnable.append(lane)
        while self.runnable:
            self._move(self.runnable.popleft(), time)
        return time

    # Sharing of the cores.

    def _cores(self) -> Mapping[int, _CoreShare]:
        num_ranks: Counter[int] = Counter()
        for lane in self.jobs:
            num_ranks.update(self.ranks_on[lane])
        num_transfers: Counter[int] = Counter()
        needed: defaultdict[int, float] = defaultdict(float)
        missed: defaultdict[int, float] = defaultdict(float)
        for transfer in self.transfers:
            for lane in transfer.lanes:
                for core, count in self.ranks_on[lane].items():
                    num_transfers[core] += count
                    needed[core] += count * min(1.0, transfer.busy_ratio)
                    missed[core] += count * transfer.busy_ratio
        return {
            core: _share(num_ranks[core], num_transfers[core], needed[core], missed[core])
            for core in num_ranks.keys() | num_transfers.keys()
        }

    def _compute_speed(self, lane: int, cores: Mapping[int, _CoreShare]) -> float:
        """Return the compute speed of the slowest of the lane's ranks."""
        return min(self.core_speeds[core] * cores[core].compute_speed for core in self.ranks_on[lane])

    def _transfer_speed(self, transfer: _InFlightTransfer, cores: Mapping[int, _CoreShare]) -> float:
        return min(cores[core].transfer_speed for lane in transfer.lanes for core in self.ranks_on[lane])

    def _computed(self, lane: int, job: _RunningAction, now: float) -> None:
        self._finish(lane, job.action, job.begin, now + job.idle)
        self._sleep(lane, now + job.idle)

    def _sleep(self, lane: int, until: float) -> None:
        self.asleep.add(lane)
        heapq.heappush(self.events, (until, lane))

    def _move(self, lane: int, now: float) -> None:
        """Run the lane's actions that take no time, up to the next compute action or wait."""
        rank = self.lanes[lane][1]
        actions = self.actions[lane]
        while lane not in self.jobs and lane not in self.asleep and self.next[lane] < len(actions):
            action = actions[self.next[lane]]
            ready = self._ready(lane, rank, action)
            if ready is None:
                return
            cost = self._cost(lane, rank, action)
            if ready > now:
                self._sleep(lane, ready)
            elif cost > 0:
                idle = self._idle_seconds(action)
                self.jobs[lane] = _RunningAction(action, now, cost - idle, idle)
            else:
                self._finish(lane, action, now, now)

    def _idle_seconds(self, action: Action) -> float:
        """Return the seconds of a compute action in which its ranks wait for each other's messages."""
        layout = self.costs.workload.layout
        if action.kind not in COMPUTE or layout.tp * layout.ep * layout.cp == 1:
            return 0.0
        parts = self.costs.stages[action.stage].parts_of(action.kind)
        return float(parts.tensor + parts.experts + parts.context) * (1 - self.tensor_busy_ratio)

    # Transfers.

    def _carry_chunk(self, place: Place, group: Sequence[int], seconds: float, earliest: float = 0.0) -> None:
        def land(now: float) -> None:
            self.done[place] = now
            self._start_across()
            self.runnable.extend(group)

        ring, streams = self.costs.data, list[Hashable](group)
        if place[0] == Collective.REDUCE_ACROSS:
            assert self.costs.across_groups is not None, "the program has such sums"
            ring, streams = self.costs.across_groups.ring, [("across", lane) for lane in group]
        self._set_off(_InFlightTransfer(group, seconds, float(ring.busy_ratio), streams, land))

    def _carry_message(
        self, place: tuple[int, int], way: tuple[int, int], posted: float, seconds: float
    ) -> None:
        def land(now: float) -> None:
            self.arrived[place] = now
            self.runnable.extend(way)

        self._set_off(_InFlightTransfer(way, seconds, float(self.costs.pipeline.busy_ratio), [way], land))

    def _set_off(self, transfer: _InFlightTransfer) -> None:
        """Start a transfer, or queue it behind the earlier transfers of its streams."""
        for stream in transfer.streams:
            self.streams[stream].append(transfer)
        self._begin_if_first(transfer)

    def _begin_if_first(self, transfer: _InFlightTransfer) -> None:
        if all(self.streams[stream][0] is transfer for stream in transfer.streams):
            self.transfers.append(transfer)

    def _arrived(self, transfer: _InFlightTransfer, now: float) -> None:
        self.transfers.remove(transfer)
        followers = []
        for stream in transfer.streams:
            self.streams[stream].popleft()
            followers += list(self.streams[stream])[:1]
        for follower in dict.fromkeys(followers):
            self._begin_if_first(follower)
        transfer.land(now)


def _share(num_ranks: int, num_transfers: int, needed: float, missed: float) -> _CoreShare:
    """Return the split of a core between ``num_ranks`` computing ranks and transfers that need ``needed`` of
    its time. Transfers get at most their fair share. Compute loses ``missed / needed`` times that share,
    because transfers also use the caches."""
    if needed == 0:
        return _CoreShare(1 / max(1, num_ranks), 1.0)
    fair = num_transfers / (num_transfers + num_ranks)
    taken = min(needed, fair)
    left = max(_LEAST_SPEED, 1 - taken * missed / needed)
    return _CoreShare(left / max(1, num_ranks), min(1.0, taken / needed))
