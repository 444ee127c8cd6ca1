"""A cluster of thousands of nodes for weeks, as the driver hears of it, under a virtual clock.

    faults ──► VirtualCluster ──NodeJoined, Beat, RankExited, StopAsked──► Decider (the real one)
                    ▲  └──► Work: what is done, and the ledger               │
                    └──────────StartAttempt, StopRanks, Evict, EndRun────────┘

The decisions are the run's own code with its own deadlines. What they ask for takes the seconds of `Times`.
So that weeks take a moment:

- time jumps from event to event. While all is well nobody beats and nothing is due: that the decisions do
  nothing in hours of a healthy run is what their tests promise. Whatever happens begins with a beat of all;
  while something is amiss all beat at 1 Hz, each beat followed by what is due;
- a few nodes, with one rank each, stand for all: the faults are those of the whole cluster, each hits one of
  the few. All nodes are alike to the decisions, and spares count one by one (tested: more of them give the
  same ledger).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Literal

from myriad.resilience.actions import Action, EndRun, Evict, StartAttempt, StopRanks
from myriad.resilience.decisions import Decider
from myriad.resilience.facts import Beat, Cause, NodeJoined, RankExited, RankSeen, StopAsked
from myriad.resilience.ledger import Kind as Doing
from myriad.resilience.ledger import Ledger
from myriad.resilience.state import Plan
from myriad.resilience.weeks.clock import Clock
from myriad.resilience.weeks.faults import Fault, Kind
from myriad.resilience.weeks.rows import hung_row, starting_row, training_row
from myriad.resilience.weeks.times import Times
from myriad.resilience.weeks.work import Work

__all__ = ["VirtualCluster"]

_BEAT_SECONDS = 1.0
_LATER_SECONDS = 10.0
"""What needs a run that trains, and finds none, comes so much later than the next one."""
_GATHER_SECONDS = 301.0
_CODES = {"killed": -9, "host memory": -9, "crash": -11}


@dataclass(frozen=True)
class _Hang:
    since: float
    named: int
    """The node whose rank did not enter."""
    phase: Literal["step", "starting"]


class VirtualCluster:
    """One run on it."""

    def __init__(
        self, times: Times, faults: Sequence[Fault], *, spares: int, patience: float = 1.0, nodes: int = 16
    ) -> None:
        """``nodes``: those that stand for all."""
        self._times, self._patience, self._num_nodes = times, patience, nodes
        self._clock, self._work = Clock(), Work(times)
        self._alive: set[int] = set()
        self._broken: dict[int, Kind] = {}
        self._silent: dict[int, float] = {}
        self._placement: dict[int, int] = {}
        self._hang: _Hang | None = None
        self._epoch, self._next_node = 0, nodes + spares
        self._cold, self._wanted, self._looks = True, False, False
        self._started_at, self._ready_at = 0.0, 0.0
        self._good_until = inf
        """What was done after that is wrong."""
        self._after_end: Callable[[], None] | None = None
        self._later: list[Callable[[], None]] = []
        self._alive.update(range(nodes + spares))
        self._begin_run()
        for fault in faults:
            self._clock.after(fault.at, partial(self._fault, fault))

    def run(self, seconds: float) -> Ledger:
        """So long."""
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
        """The attempt has trained."""
        return self._ready_at > self._started_at

    # What the driver hears

    def _hear_exit(self, node: int, code: int, cause: Cause, error: str) -> None:
        if node in self._alive and node not in self._silent and node in self._placement:
            rank, step = self._placement[node], self._work.step
            ended = RankExited(node, self._epoch, rank, code, cause, step, error, "")
            self._act(self._decider.hear(ended, self._now))

    def _join(self, node: int) -> None:
        joined = NodeJoined(node, 0, f"node-{node}", 1, 1, 1, (), (), False)
        self._act(self._decider.hear(joined, self._now))

    def _row(self, node: int) -> RankSeen:
        """What its ranks show."""
        rank, step, hang = self._placement[node], self._work.step, self._hang
        training = self._is_up
        stepped = training and self._now - self._ready_at >= self._times.step_seconds
        step_seconds = self._times.step_seconds if stepped else 0.0
        if hang is not None:
            return hung_row(rank, step, hang.phase, step_seconds, self._now - hang.since, hang.named == node)
        if not training:
            return starting_row(rank, step, self._now - self._started_at)
        idle = self._now - min(self._silent.values(), default=self._now)
        return training_row(rank, step, step_seconds, idle)

    def _beat(self) -> None:
        """All that live, and then the driver asks what is due."""
        for node in sorted(self._alive - set(self._silent)):
            ranks = (self._row(node),) if node in self._placement else ()
            self._act(self._decider.hear(Beat(node, self._epoch, 1, ranks), self._now))
        self._act(self._decider.due(self._now))

    def _look(self) -> None:
        """The driver's next seconds are of interest."""
        self._looks = False
        self._beat()
        if self._silent or (self._hang is not None and self._decider.state.phase == "running"):
            self._look_again(_BEAT_SECONDS)

    def _look_again(self, seconds: float) -> None:
        if not self._looks:
            self._looks = True
            self._clock.after(seconds, self._look)

    # What is done about it

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, StartAttempt):
                self._start(action)
            elif isinstance(action, StopRanks):
                self._do("restarting" if self._work.doing != "planned" else "planned")
                self._hang = None
                self._clock.after(self._times.end_seconds, partial(self._end_ranks, action.epoch, -9))
            elif isinstance(action, Evict):
                self._repair(action.node)
            elif isinstance(action, EndRun):
                self._over()

    def _start(self, action: StartAttempt) -> None:
        replaced = set(self._placement) - set(action.placement)
        self._do("planned" if self._work.doing == "planned" else "restarting")
        times, work = self._times, self._work
        if self._good_until < work.done:
            work.go_back(work.durable(self._good_until))
            self._good_until = inf
        elif not self._cold:
            every, trained = times.copies_every if replaced else times.memory_every, self._is_up
            work.go_back(work.in_memory(every, trained=trained))
        self._epoch = work.ledger.attempt = action.epoch
        self._placement = {node: ranks[0] for node, ranks in action.placement.items()}
        self._hang, self._started_at, self._ready_at = None, self._now, 0.0
        seconds = times.cold_start_seconds if self._cold else times.restart_seconds
        self._clock.after(seconds, partial(self._ready, action.epoch))

    def _ready(self, epoch: int) -> None:
        """All ranks have come up; unless one cannot."""
        if epoch != self._epoch or self._decider.state.phase != "running" or self._silent:
            return
        self._beat()
        broken = [(node, kind) for node, kind in self._broken.items() if node in self._placement]
        for node, kind in broken:
            if kind.shows in ("exit", "hang"):
                self._fail(node, kind, node)
                return
        slow = any(kind.shows == "slow" for _, kind in broken)
        self._do("training")
        self._cold = False
        self._ready_at, self._work.slower_ratio = self._now, self._times.slower_ratio if slow else 0.0
        self._beat()
        for what in self._later:
            self._clock.after(_LATER_SECONDS, what)
        self._later = []

    def _end_ranks(self, epoch: int, code: int) -> None:
        for node in list(self._placement):
            if epoch == self._epoch == self._decider.state.epoch:
                self._hear_exit(node, code, "killed" if code else "done", "")
        if self._decider.state.phase == "gathering":
            self._do("waiting")
            self._look_again(_GATHER_SECONDS * self._patience)

    def _repair(self, node: int) -> None:
        """It comes back, as a spare."""
        self._pass()
        self._alive.discard(node)
        self._silent.pop(node, None)
        self._broken.pop(node, None)
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
        """Asked for, or because of too many faults, or of too few nodes."""
        then, self._after_end = self._after_end, None
        if then is not None:
            then()
        elif self._work.doing == "waiting":
            self._work.go_back(self._work.durable(self._work.done))
            self._wanted = True
        else:
            self._do("person")
            self._clock.after(self._times.person_seconds, partial(self._begin_again, inf))

    def _begin_again(self, most_done: float) -> None:
        """A person has sent away what is broken."""
        for node in {*self._silent, *(set(self._broken) & set(self._placement))}:
            self._repair(node)
        self._work.go_back(self._work.durable(min(most_done, self._work.done)))
        self._begin_run()

    def _begin_run(self) -> None:
        for node in list(self._silent):
            self._repair(node)
        self._wanted = len(self._alive) < self._num_nodes
        if self._wanted:
            self._do("waiting")
            return
        self._cold, self._hang = True, None
        plan = Plan(self._num_nodes, self._num_nodes, self._epoch + 1, patience=self._patience)
        self._decider = Decider(plan, self._now)
        for node in sorted(self._alive):
            self._join(node)

    def _stop(self, doing: Doing, pause: float, then: Callable[[], None]) -> None:
        """A person stops the run, which saves, and goes on later."""
        if self._work.doing != "training":
            self._later.append(partial(self._stop, doing, pause, then))
            return
        self._do(doing)
        self._after_end = partial(self._clock.after, pause, then)
        self._act(self._decider.hear(StopAsked(next(iter(self._placement))), self._now))
        self._clock.after(self._times.save_seconds, partial(self._end_ranks, self._epoch, 0))

    # Faults

    def _fault(self, fault: Fault) -> None:
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
        if kind.shows in ("exit", "hang", "silent"):
            wrong = fault.luck < self._times.culprit_wrong_ratio
            self._fail(node, kind, neighbour if wrong else node)
        elif kind.shows == "planned":
            self._stop("planned", 0.0, self._begin_run)
        else:
            self._go_unseen(node, kind)

    def _fail(self, node: int, kind: Kind, named: int) -> None:
        """Nobody can go on."""
        self._do("detecting" if self._work.doing in ("training", "detecting") else self._work.doing)
        if kind.shows == "exit":
            code = _CODES.get(kind.cause, 1)
            exits = partial(self._exit, self._epoch, node, code, kind.cause)
            self._clock.after(self._times.crash_seen_seconds, exits)
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
        if epoch == self._epoch:
            self._hear_exit(node, code, cause, cause)

    def _go_unseen(self, node: int, kind: Kind) -> None:
        """Training goes on, and the decisions hear of it from a detector, if there is one: else a person sees
        it much later, and stops the run."""
        times, good_until = self._times, self._work.done if kind.shows == "corrupt" else inf
        found_seconds = times.corrupt_found_seconds
        if kind.shows == "slow":
            self._pass()
            self._work.slower_ratio, found_seconds = times.slower_ratio, times.slow_found_seconds
        if found_seconds:
            self._clock.after(found_seconds, partial(self._found, node, kind, good_until))
        else:
            self._clock.after(times.unseen_seconds, partial(self._seen_by_person, node, kind, good_until))

    def _found(self, node: int, kind: Kind, good_until: float) -> None:
        """A detector ends the rank."""
        if self._is_past(node, kind):
            return
        if self._work.doing != "training":
            self._later.append(partial(self._found, node, kind, good_until))
            return
        self._beat()
        self._good_until = good_until
        there = node if node in self._placement else next(iter(self._placement))
        self._do("detecting")
        self._hear_exit(there, 1, "device", kind.shows)

    def _seen_by_person(self, node: int, kind: Kind, good_until: float) -> None:
        if not self._is_past(node, kind):
            then = partial(self._begin_again, good_until)
            self._stop("diagnosing", self._times.person_seconds, then)

    def _is_past(self, node: int, kind: Kind) -> bool:
        """The slow node has gone for another reason."""
        return kind.shows == "slow" and node not in self._placement
