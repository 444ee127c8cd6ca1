"""Iterations of ranks that take turns on a few cores, as when one machine rehearses a cluster.

Where `Cluster.shared_cores` is given, rank r computes on core r modulo their number. Ranks of one core that
compute at the same time share it evenly; what a transfer takes of a core (`Link.busy_ratio`) is shared like
compute, and the rest of its time the core is another rank's. So two ranks on a core hide each other's
waiting, and an overlap gains less there.

    core 0   rank 0  F0 ........ F1        alone: 1 s each
             rank 2  F0 ................   beside another: 2 s
                     ^ both at half speed

Time goes from event to event: a lane (a pipeline rank of one replica, all its tensor-parallel ranks
together) begins to compute, ends, or gets what it waits for. Between two events nobody's speed changes.
"""

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from myriad.planner.collectives import tensor_group
from myriad.planner.costs import Costs
from myriad.planner.simulator import Prediction, Run, programs_of, simulate
from myriad.program.actions import COMPUTE, Action, Kind, Program

__all__ = ["predict"]

_NOBODY = -1


def predict(costs: Costs, *, spans: bool = True) -> Prediction:
    """One iteration; of ranks that share cores where the cluster says so."""
    cores = costs.cluster.shared_cores
    if cores is None:
        return simulate(costs, spans=spans)
    run = _SharingRun(programs_of(costs), costs, cores)
    first = run.iterate()
    run.keep = spans
    second = run.iterate()
    return Prediction(max(second) - max(first), run.program, tuple(run.spans))


@dataclass
class _Job:
    """An action under way on a lane."""

    action: Action
    begin: float
    left: float
    """Seconds of it that need the core, alone on it."""
    idle: float
    """Seconds after that in which the core is free."""


@dataclass(frozen=True)
class _Transfer:
    begin: float
    end: float
    lanes: tuple[int, ...]
    busy_ratio: float


class _SharingRun(Run):
    """All ranks of all replicas, in the order of time."""

    def __init__(self, programs: Sequence[Program], costs: Costs, num_cores: int) -> None:
        super().__init__(programs, costs, list(range(costs.work.layout.dp)), {}, 0.0, 1)
        tp = costs.work.layout.tp
        self.ranks_on = [
            Counter((lane * tp + index) % num_cores for index in range(tp)) for lane in range(len(self.lanes))
        ]
        self.core_speeds = costs.cluster.core_speeds or (1.0,) * num_cores
        tensor = tensor_group(costs.cluster, float(tp))
        self.tensor_busy_ratio = min(1.0, float(tensor.busy_ratio))
        self.jobs: dict[int, _Job] = {}
        self.transfers: list[_Transfer] = []
        self.events: list[tuple[float, int]] = []
        """When something may change, and the lane that goes on then; nobody: a transfer begins or ends."""
        self.asleep: set[int] = set()

    def iterate(self) -> list[float]:
        self._begin()
        self.movable.clear()
        self.events = [(self.clock[lane], lane) for lane in range(len(self.lanes))]
        self.asleep = set(range(len(self.lanes)))
        heapq.heapify(self.events)
        now = self.events[0][0]
        while self.events or self.jobs:
            now = self._step(now)
        assert self._all_done(), "the checker proved that nobody waits for ever"
        return list(self.clock)

    def _step(self, now: float) -> float:
        """To the next event; its time."""
        speeds = self._speeds(now)
        ends = [now + job.left / speeds[lane] for lane, job in self.jobs.items()]
        time = max(now, min([*ends, *(event[0] for event in self.events[:1])]))
        for lane, job in list(self.jobs.items()):
            job.left -= (time - now) * speeds[lane]
            if job.left <= 1e-12:
                self._computed(lane, self.jobs.pop(lane), time)
        while self.events and self.events[0][0] <= time:
            lane = heapq.heappop(self.events)[1]
            if lane != _NOBODY:
                self.asleep.discard(lane)
                self.movable.append(lane)
        while self.movable:
            self._move(self.movable.popleft(), time)
        return time

    def _speeds(self, now: float) -> dict[int, float]:
        """Of each lane that computes: the slowest of its ranks."""
        load: Counter[int] = Counter()
        for lane in self.jobs:
            load.update(self.ranks_on[lane])
        self.transfers = [transfer for transfer in self.transfers if transfer.end > now]
        num_transfers: Counter[int] = Counter()
        busy: dict[int, float] = dict.fromkeys(load, 0.0)
        for transfer in self.transfers:
            for lane in transfer.lanes if transfer.begin <= now else ():
                for core, count in self.ranks_on[lane].items():
                    num_transfers[core] += count
                    busy[core] = busy.get(core, 0.0) + count * transfer.busy_ratio
        return {
            lane: min(
                self.core_speeds[core] * self._speed(load[core], num_transfers[core], busy[core])
                for core in self.ranks_on[lane]
            )
            for lane in self.jobs
        }

    def _speed(self, num_ranks: int, num_transfers: int, busy: float) -> float:
        """Of each of the ranks that compute on a core. What transfers want of it they get before them, up to
        their fair share, as threads do that mostly sleep."""
        turns = 1 + self.costs.cluster.turns_ratio if num_ranks > 1 else 1.0
        taken = min(busy, num_transfers / (num_transfers + num_ranks))
        return (1 - taken) / (num_ranks * turns)

    def _computed(self, lane: int, job: _Job, now: float) -> None:
        self._finish(lane, job.action, job.begin, now + job.idle)
        self._sleep(lane, now + job.idle)

    def _sleep(self, lane: int, until: float) -> None:
        self.asleep.add(lane)
        heapq.heappush(self.events, (until, lane))

    def _move(self, lane: int, now: float) -> None:
        """Does what takes no time, up to the next compute or wait."""
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
                self.jobs[lane] = _Job(action, now, cost - idle, idle)
            else:
                self._finish(lane, action, now, now)

    def _idle_seconds(self, action: Action) -> float:
        """Of a compute, in which its ranks wait for each other's messages."""
        if action.kind not in COMPUTE or self.costs.work.layout.tp == 1:
            return 0.0
        times = self.costs.stages[action.stage].times
        inputs, weights = times.backward_input.tensor, times.backward_weight.tensor
        tensor = {
            Kind.FORWARD: times.forward.tensor,
            Kind.BACKWARD: inputs + weights,
            Kind.BACKWARD_INPUT: inputs,
            Kind.BACKWARD_WEIGHT: weights,
        }[action.kind]
        return float(tensor) * (1 - self.tensor_busy_ratio)

    def _travel(self, begin: float, seconds: float, busy_ratio: float, lanes: Sequence[int]) -> float:
        """Longer where ranks of one core need more of it than there is."""
        needed: Counter[int] = Counter()
        for lane in lanes:
            needed.update(self.ranks_on[lane])
        seconds *= max(1.0, busy_ratio * max(needed.values()))
        share = busy_ratio / max(1.0, busy_ratio * max(needed.values()))
        self.transfers.append(_Transfer(begin, begin + seconds, tuple(lanes), share))
        heapq.heappush(self.events, (begin, _NOBODY))
        heapq.heappush(self.events, (begin + seconds, _NOBODY))
        return seconds
