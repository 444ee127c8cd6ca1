"""A cluster of thousands of nodes for weeks, as the driver sees it, under a virtual clock.

    faults ──► VirtualCluster ──NodeJoined, Beat, RankExited, StopAsked──► Decider (the real one)
                    ▲  └──► RunProgress: training done, and the ledger       │
                    └──────StartAttempt, RestartAtStep, StopRanks, Evict, EndRun─┘

The decisions are the run's own code with its own deadlines. Their actions take the seconds of `PolicyTimes`.
To simulate weeks in a moment:

- Time jumps from event to event. A healthy cluster sends no heartbeats and has nothing due: the tests of the
  decisions promise that they do nothing in hours of a healthy run. Every event starts with a heartbeat of all
  nodes. While a fault is open, all nodes send heartbeats at 1 Hz, each followed by the actions that are due.
  Heartbeats carry digests and compute times of ranks (`Symptoms`), so the decisions also find replicas that
  differ and slow nodes.
- A few nodes, with one rank each, represent all: the faults are those of the whole cluster, and each hits one
  of the few. All nodes are alike to the decisions; spares count one by one (a test shows that more nodes give
  the same ledger).
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import inf
from typing import Literal

from myriad.forecasts.fleet.fault_mix import DrawnFault, FaultKindShare
from myriad.forecasts.fleet.node_symptoms import Symptoms, hung_row, starting_row, training_row
from myriad.forecasts.fleet.policy_times import PolicyTimes
from myriad.forecasts.fleet.simulated_progress import RunProgress
from myriad.supervise.accounting.ledger import Kind as Doing
from myriad.supervise.accounting.ledger import Ledger
from myriad.supervise.messages import Beat, NodeJoined, StopAsked
from myriad.supervise.observations import Cause, RankExited, RankStatus
from myriad.supervise.policy.decisions import Decider
from myriad.supervise.policy.policy_actions import (
    EndRun,
    Evict,
    PolicyAction,
    RestartAtStep,
    StartAttempt,
    StopRanks,
)
from myriad.supervise.policy.run_state import RunPlan
from myriad.telemetry.progress.progress_page import TURNED_CODE

__all__ = ["VirtualCluster"]

_BEAT_SECONDS = 1.0
_LATER_SECONDS = 10.0
"""Delay of an event that needs a training run and finds none, after the next one trains."""
_GATHER_SECONDS = 301.0
_COMPARED_SECONDS = 150.0
"""Time for which ranks are compared because one may be slow; nothing new shows after that."""
_CODES = {"killed": -9, "host memory": -9, "crash": -11}


@dataclass(frozen=True)
class _Hang:
    since: float
    named: int
    """The node whose rank did not enter."""
    phase: Literal["step", "starting"]


class VirtualCluster:
    """Simulates one run: nodes, faults and the real recovery policy, under a virtual clock."""

    def __init__(
        self,
        times: PolicyTimes,
        faults: Sequence[DrawnFault],
        *,
        spares: int,
        patience: float = 1.0,
        nodes: int = 16,
    ) -> None:
        """``nodes`` is the number of nodes that represent the cluster."""
        self._times, self._patience, self._num_nodes = times, patience, nodes
        self._clock, self._work = Clock(), RunProgress(times)
        self._alive: set[int] = set()
        self._broken: dict[int, FaultKindShare] = {}
        self._silent: dict[int, float] = {}
        self._placement: dict[int, int] = {}
        self._symptoms = Symptoms(times, nodes)
        self._shown: set[int] = set()
        """Nodes whose wrong numbers make replicas differ."""
        self._slow_until = 0.0
        """Until this time a rank may be found slow."""
        self._nan_step = -1
        """Step in which a broken node computes a NaN, every time."""
        self._parted = False
        """Whether the ranks ended after a step as requested, without losing it."""
        self._hang: _Hang | None = None
        self._epoch, self._next_node = 0, nodes + spares
        self._cold, self._wanted, self._looks = True, False, False
        self._started_at, self._ready_at = 0.0, 0.0
        self._after_end: Callable[[], None] | None = None
        self._later: list[Callable[[], None]] = []
        self._alive.update(range(nodes + spares))
        self._begin_run()
        for fault in faults:
            self._clock.after(fault.at, partial(self._fault, fault))

    def run(self, seconds: float) -> Ledger:
        """Simulate ``seconds`` and return the ledger."""
        self._clock.run(seconds)
        self._pass()
        return self._work.ledger

    # Time

    @property
    def _now(self) -> float:
        return self._clock.now

    def _pass(self) -> None:
        self._work.until(self._now, len(self._alive - set(self._placement)))

    def _do(self, doing: Doing) -> None:
        self._pass()
        self._work.doing = doing

    @property
    def _is_up(self) -> bool:
        """Whether the attempt has trained."""
        return self._ready_at > self._started_at

    # What the driver hears

    def _on_rank_exit(self, node: int, code: int, cause: Cause, error: str) -> None:
        if node in self._alive and node not in self._silent and node in self._placement:
            rank, step = self._placement[node], self._work.step if self._is_up else -1
            ended = RankExited(node, self._epoch, rank, code, cause, step, error, "")
            self._act(self._decider.handle(ended, self._now))

    def _join(self, node: int) -> None:
        joined = NodeJoined(node, 0, f"node-{node}", 1, 1, 1, (), (), False)
        self._act(self._decider.handle(joined, self._now))

    def _row(self, node: int) -> RankStatus:
        """Return the progress row of a node's rank."""
        rank, step, hang = self._placement[node], self._work.step, self._hang
        training = self._is_up
        stepped = training and self._now - self._ready_at >= self._times.step_seconds
        step_seconds = self._times.step_seconds if stepped else 0.0
        if hang is not None:
            return hung_row(rank, step, hang.phase, step_seconds, self._now - hang.since, hang.named == node)
        if not training:
            return starting_row(rank, self._now - self._started_at)
        idle = self._now - min(self._silent.values(), default=self._now)
        symptoms = self._symptoms
        details = symptoms.busy_seconds(node, rank), symptoms.digests(node, step)
        return training_row(rank, step, step_seconds, idle, *details)

    def _beat(self) -> None:
        """Send heartbeats of all live nodes, then let the driver do what is due."""
        self._pass()
        for node in sorted(self._alive - set(self._silent)):
            ranks = (self._row(node),) if node in self._placement else ()
            self._act(self._decider.handle(Beat(node, self._epoch, 1, ranks), self._now))
        self._act(self._decider.due(self._now))

    def _look(self) -> None:
        """Send heartbeats for the driver's next seconds."""
        self._looks = False
        self._beat()
        if self._silent or (self._decider.state.phase == "running" and self._is_amiss):
            at_once = self._silent or self._hang is not None  # what else is seen is seen in steps
            self._look_again(_BEAT_SECONDS if at_once else max(_BEAT_SECONDS, self._times.step_seconds / 2))

    @property
    def _is_amiss(self) -> bool:
        """Whether a fault of the current attempt is about to be detected or cleared."""
        if not self._is_up:
            return self._hang is not None
        compared = self._now < self._slow_until or self._decider.state.trial is not None
        return self._hang is not None or compared or self._symptoms.is_seen(self._placement)

    def _look_again(self, seconds: float) -> None:
        if not self._looks:
            self._looks = True
            self._clock.after(seconds, self._look)

    # What is done about it

    def _act(self, actions: Sequence[PolicyAction]) -> None:
        for action in actions:
            if isinstance(action, StartAttempt):
                self._start(action)
            elif isinstance(action, StopRanks):
                self._do("restarting" if self._work.doing != "planned" else "planned")
                self._hang = None
                self._clock.after(self._times.end_seconds, partial(self._end_ranks, action.epoch, -9))
            elif isinstance(action, RestartAtStep):
                self._clock.after(self._work.until_step_end(), partial(self._turn, action.epoch))
            elif isinstance(action, Evict):
                self._repair(action.node)
            elif isinstance(action, EndRun):
                self._over()

    def _start(self, action: StartAttempt) -> None:
        replaced = set(self._placement) - set(action.placement)
        if self._work.doing == "planned":
            self._do("planned")
        else:
            self._do("starting" if self._cold else "restarting")
        times, work = self._times, self._work
        if action.newest_step is not None:
            trusted = action.newest_step * times.step_seconds
            work.roll_back(work.durable(trusted) if replaced else trusted)  # copies on other nodes are newer
        elif not self._cold and not self._parted:
            every, trained = times.copies_every if replaced else times.memory_every, self._is_up
            work.roll_back(work.in_memory(every, trained=trained))
        self._parted = False
        self._symptoms.heal()  # all replicas load the same: what differed is in all of them now, or in none
        self._symptoms.begin(work.step, action.layout.shares)
        self._epoch = work.ledger.attempt = action.epoch
        self._placement = {node: ranks[0] for node, ranks in action.placement.items()}
        self._hang, self._started_at, self._ready_at = None, self._now, 0.0
        seconds = times.cold_start_seconds if self._cold else times.restart_seconds
        self._clock.after(seconds, partial(self._ready, action.epoch))

    def _ready(self, epoch: int) -> None:
        """All ranks have started, unless one cannot."""
        if epoch != self._epoch or self._decider.state.phase != "running" or self._silent:
            return
        self._beat()
        broken = [(node, kind) for node, kind in self._broken.items() if node in self._placement]
        for node, kind in broken:
            if kind.shows in ("exit", "hang"):
                self._fail(node, kind, node)
                return
        self._do("training")
        self._cold = False
        self._ready_at, self._work.slower_ratio = self._now, self._symptoms.slower_ratio(self._placement)
        for node, kind in broken:
            self._break_again(node, kind)
        self._beat()
        self._look_again(_BEAT_SECONDS)
        for what in self._later:
            self._clock.after(_LATER_SECONDS, what)
        self._later = []

    def _break_again(self, node: int, kind: FaultKindShare) -> None:
        """A broken node is used again; its fault shows only in steps."""
        if kind.shows == "nan" and self._nan_step >= self._work.step:
            seconds = (self._nan_step - self._work.step + 0.5) * self._times.step_seconds
            self._clock.after(seconds, partial(self._nan_again, self._epoch, node, kind))
        elif kind.shows == "corrupt" and node in self._shown:
            self._symptoms.differ(node, self._work.step)
        elif kind.shows == "slow" and self._slow_until >= self._started_at:  # not yet looked at to the end
            self._slow_until = self._now + _COMPARED_SECONDS

    def _nan_again(self, epoch: int, node: int, kind: FaultKindShare) -> None:
        if epoch == self._epoch and self._work.doing == "training":
            self._fail(node, kind, node)

    def _turn(self, epoch: int) -> None:
        """End the attempt after the step."""
        state = self._decider.state
        if epoch == self._epoch == state.epoch and state.phase == "running" and state.turning:
            self._do("restarting")
            self._parted = True
            for node in list(self._placement):
                self._on_rank_exit(node, TURNED_CODE, "turned", "")

    def _end_ranks(self, epoch: int, code: int) -> None:
        for node in list(self._placement):
            if epoch == self._epoch == self._decider.state.epoch:
                self._on_rank_exit(node, code, "killed" if code else "done", "")
        if self._decider.state.phase == "gathering":
            self._do("waiting")
            self._look_again(_GATHER_SECONDS * self._patience)

    def _repair(self, node: int) -> None:
        """The repaired node joins as a spare."""
        self._pass()
        self._alive.discard(node)
        self._silent.pop(node, None)
        self._broken.pop(node, None)
        self._symptoms.drop(node)
        self._shown.discard(node)
        self._clock.after(self._times.repair_seconds, self._come_back)

    def _come_back(self) -> None:
        self._pass()
        if self._decider.state.phase == "gathering":
            self._beat()
        node, self._next_node = self._next_node, self._next_node + 1
        self._alive.add(node)
        if self._wanted:
            self._begin_run()
        elif self._decider.state.phase != "over":
            self._join(node)

    # Persons

    def _over(self) -> None:
        """The run has ended: on request, after too many faults, or with too few nodes."""
        then, self._after_end = self._after_end, None
        if then is not None:
            then()
        elif self._work.doing == "waiting":
            self._work.roll_back(self._work.durable(self._work.done))
            self._wanted = True
        else:
            self._do("person")
            self._clock.after(self._times.person_seconds, partial(self._begin_again, inf))

    def _begin_again(self, most_done: float) -> None:
        """A person has removed what is broken and starts the run again."""
        for node in {*self._silent, *(set(self._broken) & set(self._placement))}:
            self._repair(node)
        self._work.roll_back(self._work.durable(min(most_done, self._work.done)))
        self._begin_run()

    def _begin_run(self) -> None:
        for node in list(self._silent):
            self._repair(node)
        self._wanted = len(self._alive) < self._num_nodes
        if self._wanted:
            self._do("waiting")
            return
        self._cold, self._hang = True, None
        plan = RunPlan(
            self._num_nodes,
            self._num_nodes,
            self._epoch + 1,
            patience=self._patience,
            replicas=self._symptoms.replicas,
            work=self._symptoms.work,
        )
        self._decider = Decider(plan, self._now)
        for node in sorted(self._alive):
            self._join(node)

    def _stop(self, doing: Doing, pause: float, then: Callable[[], None]) -> None:
        """A person stops the run, which saves, and resumes it later."""
        if self._work.doing != "training":
            self._later.append(partial(self._stop, doing, pause, then))
            return
        self._do(doing)
        self._after_end = partial(self._clock.after, pause, then)
        self._act(self._decider.handle(StopAsked(next(iter(self._placement))), self._now))
        self._clock.after(self._times.save_seconds, partial(self._end_ranks, self._epoch, 0))

    # Faults

    def _fault(self, fault: DrawnFault) -> None:
        self._pass()
        kind, running = fault.kind, self._decider.state.phase == "running"
        comes_always = kind.shows in ("exit", "silent") and running
        if self._work.doing != "training" and not comes_always:
            self._later.append(partial(self._fault, fault))
            return
        nodes = sorted(self._placement)
        place = int(fault.place * len(nodes))
        node, neighbour = nodes[place], nodes[place - 1]
        self._beat()
        if kind.stays:
            self._broken[node] = kind
        if kind.shows in ("exit", "hang", "silent", "nan"):
            self._nan_step = self._work.step if kind.shows == "nan" else self._nan_step
            wrong = fault.draw < self._times.culprit_wrong_ratio
            self._fail(node, kind, neighbour if wrong else node)
        elif kind.shows == "planned":
            self._stop("planned", 0.0, self._begin_run)
        else:
            self._continue_with(node, kind, fault.draw)

    def _fail(self, node: int, kind: FaultKindShare, named: int) -> None:
        """A fault stops all ranks."""
        self._do("detecting" if self._work.doing in ("training", "detecting") else self._work.doing)
        if kind.shows in ("exit", "nan"):
            cause: Cause = "nan" if kind.shows == "nan" else kind.cause
            seconds = self._times.device_seen_seconds if cause == "device" else self._times.crash_seen_seconds
            exits = partial(self._exit, self._epoch, node, _CODES.get(cause, 1), cause)
            self._clock.after(seconds, exits)
        elif kind.shows == "hang":
            training = self._is_up
            since = self._now if training else self._started_at
            self._do("detecting")
            self._hang = _Hang(since, named, "step" if training else "starting")
            self._look_again(_BEAT_SECONDS)
        else:
            self._silent[node] = self._now
            self._look_again(_BEAT_SECONDS)

    def _exit(self, epoch: int, node: int, code: int, cause: Cause) -> None:
        if epoch == self._epoch and node in self._placement:
            step, rank = self._work.step, self._placement[node]
            is_nan = cause == "nan"
            error = f"step {step}: loss is nan; first bad tensor is the loss, on rank {rank}"
            self._on_rank_exit(node, code, cause, error if is_nan else cause)

    def _continue_with(self, node: int, kind: FaultKindShare, draw: float) -> None:
        """A silent fault: training continues. The decisions detect it by what ranks report, if that is
        possible; else a person notices it much later and stops the run."""
        times, good_until, seconds = self._times, inf, self._times.unseen_seconds
        if kind.shows == "slow":
            self._pass()
            self._symptoms.slow.add(node)
            self._work.slower_ratio = self._symptoms.slower_ratio(self._placement)
            self._slow_until = self._now + _COMPARED_SECONDS
            self._look_again(_BEAT_SECONDS)
            seconds += times.person_seconds  # who is slow can be found out while the run goes on
        elif self._symptoms.replicas and draw < times.corrupt_shown_ratio:
            self._shown.add(node)
            self._symptoms.differ(node, self._work.step)
            self._look_again(_BEAT_SECONDS)
            return
        else:
            good_until = self._work.done
        self._clock.after(seconds, partial(self._seen_by_person, node, kind, good_until))

    def _seen_by_person(self, node: int, kind: FaultKindShare, good_until: float) -> None:
        then = partial(self._begin_again, good_until)
        if kind.shows == "corrupt":
            self._stop("diagnosing", self._times.person_seconds, then)
        elif node in self._placement:  # it may have gone for another reason
            self._stop("diagnosing", 0.0, then)


class Clock:
    """Runs actions in the order of their times, then of their requests."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        """Call ``what`` when the virtual clock has advanced by ``seconds``."""
        heapq.heappush(self._due, (self.now + seconds, next(self._order), what))

    def run(self, until: float) -> None:
        """Run all actions that are due before ``until``."""
        while self._due and self._due[0][0] < until:
            self.now, _, what = heapq.heappop(self._due)
            what()
        self.now = until
