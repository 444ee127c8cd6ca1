"""Watches whether the ranks of an attempt make progress: finds stopped ranks and hangs. Pure.

    heartbeats ──► rows of all ranks ──► a rank in state T at two polls      StuckAttempt, "stopped"
                                     ──► no row moves within its deadline    DumpStacks, then StuckAttempt

`Deadlines` learns from the run how long a rank may make no progress, for each phase of a rank's life:

    limit = timeout scale x max(least, 5 x median, 2 x p99)   if the run has been in the phase before
            timeout scale x first                             if not: a first evaluation, a first save; always
                                                              for phases that differ each time: starting,
                                                              loading, compilation

For steps it learns how long they take; an attempt's first step counts only until there are others. Where a
phase of the job gives each step at least twice the tokens, it learns again. For each other phase it learns
the longest time without progress.

`RankObservations` keeps the rows so that checking all of them is cheap. A deadline needs the least idle
time, the slowest step and the phases. A few rows of each node give the same as all, and a check ten times a
second does not read 12,288 rows:

    heartbeat of a node (8 ranks) ──► kept; of them, the rows that can matter for a deadline, 2 or 3 a
                                      node: the least idle, the slowest, one of each phase
"""

from collections import defaultdict, deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from myriad.supervise.messages import Beat
from myriad.supervise.observations import RankStatus
from myriad.supervise.policy.incidents import Incident
from myriad.supervise.policy.membership import Membership
from myriad.supervise.policy.policy_actions import DumpStacks
from myriad.supervise.policy.run_state import RunPlan, RunState
from myriad.supervise.policy.suspects import Seat, find_suspects
from myriad.units import format_ranks

__all__ = ["HangDetector", "StuckAttempt"]

_STOPPED_SECONDS = 1.25
_CALM_SECONDS = 2.0
_DUMP_SECONDS = 1.0
"""Time in which ranks write their stacks."""


@dataclass(frozen=True)
class StuckAttempt:
    """The reason to end an attempt."""

    incident: Incident
    evidence: dict[str, object]


class HangDetector:
    """Watches the ranks of a run; `begin` resets it for each attempt."""

    def __init__(self, plan: RunPlan, state: RunState, membership: Membership) -> None:
        self._plan, self._state, self._membership = plan, state, membership
        self._deadlines = Deadlines(plan.patience, plan.saving_seconds, plan.longer_steps)
        self._stopped_seconds = _STOPPED_SECONDS * plan.patience
        self.begin()

    def begin(self, *, other_replicas: bool = False) -> None:
        """Begin an attempt: keep only how long phases took in earlier ones."""
        if other_replicas:
            self._deadlines.forget_steps()
        self._observations = RankObservations()
        self._stopped_since: dict[int, float] = {}
        self._dumped_at: float | None = None

    def observe(self, beat: Beat, now: float) -> None:
        """Record the heartbeat of a node with ranks of this attempt."""
        self._observations.observe(beat.node, beat.ranks)
        for one in beat.ranks:
            if one.state == "T":
                self._stopped_since.setdefault(one.rank, now)
            elif self._stopped_since:
                self._stopped_since.pop(one.rank, None)

    def changed(self, node: int) -> None:
        """Record that a rank of the node has ended."""
        self._observations.changed(node)

    def drop(self, node: int) -> None:
        """Forget a node that is gone, or is back and has sent no rows yet."""
        self._observations.drop(node)

    def all(self) -> list[RankStatus]:
        """Return the rows of all living ranks; no rows if a node has not sent all of its own."""
        return self._observations.all(self._state.placement, self._state.exits)

    def few(self) -> list[RankStatus]:
        """Return rows that represent all living ranks; no rows if a node has not sent all of its own.
        Deadlines learn from them here, not at each heartbeat: 1,536 nodes send 1,536 in a second."""
        few = self._observations.few(self._state.placement, self._state.exits)
        if few and self._observations.has_news:
            self._observations.has_news = False
            self._deadlines.observe(few)
        return few

    @property
    def is_calm(self) -> bool:
        """Whether ranks make progress and no rank is stopped."""
        few = self.few()
        moving = bool(few) and min(one.idle_seconds for one in few) < _CALM_SECONDS
        return moving and not self._stopped_since and self._dumped_at is None

    def overdue(self, now: float) -> StuckAttempt | DumpStacks | None:
        """Return what to do about ranks without progress."""
        late = {rank for rank, since in self._stopped_since.items() if now - since >= self._stopped_seconds}
        stopped = [one for one in self.all() if one.rank in late] if late else []
        if stopped:
            return self._stopped(stopped[0], now)
        few = self.few()
        return self._hung(few, now) if few else None

    def _stopped(self, one: RankStatus, now: float) -> StuckAttempt:
        text = f"rank {one.rank} was stopped (SIGSTOP), pid {one.pid}"
        incident = self._incident("a rank was stopped", "stopped", one, text)
        idle = one.idle_seconds + self._membership.since_heard(incident.node, now)
        return StuckAttempt(incident, {"idle_seconds": idle})

    def _hung(self, few: Sequence[RankStatus], now: float) -> StuckAttempt | DumpStacks | None:
        """Dump the stacks first; end the attempt a moment later if nothing has moved by then."""
        idle, phase = min(one.idle_seconds for one in few), self._deadlines.phase_of(few)
        limit = self._deadlines.limit(phase)
        if idle <= limit:
            self._dumped_at = None
            return None
        if self._dumped_at is not None and now < self._dumped_at + _DUMP_SECONDS:
            return None
        seen = self.all()
        suspicion = find_suspects(seen, self._seats(seen))
        ranks, evidence = suspicion.ranks, {"idle_seconds": idle, "limit_seconds": limit, "phase": phase}
        if self._dumped_at is None:
            self._dumped_at = now
            evidence |= {"why": suspicion.why}
            return DumpStacks(rule="no rank goes on", evidence=evidence, epoch=self._state.epoch, ranks=ranks)
        one = next(one for one in seen if one.rank == ranks[0])
        text = f"{format_ranks(ranks)} hung: {suspicion.why} (stacks in the log)"
        incident = self._incident("no rank goes on", "hang", one, text)
        if suspicion.is_of_the_program:
            incident = replace(incident, node=-1)
        return StuckAttempt(incident, evidence)

    def _seats(self, seen: Sequence[RankStatus]) -> Mapping[int, Seat]:
        """Return the grid positions of ranks in this attempt; empty if the layout is unknown."""
        layout = self._state.layout
        if self._plan.work is None:
            return {}
        work, world = self._plan.work.in_attempt(layout), self._plan.world_of(layout)
        return {one.rank: work.seat(one.rank, world) for one in seen}

    def _incident(self, rule: str, cause: str, one: RankStatus, text: str) -> Incident:
        node = self._state.node_of(one.rank)
        return Incident(rule, cause, one.rank, node, one.step, text, text, self._state.stop_asked)


_SAMPLES = 256
_LEAST = {"step": 13.5}
"""Heartbeats come once a second, so a hang is found within 15 s."""
_LEAST_ELSEWHERE = 60.0
_FIRST = {"first step": 600.0, "step": 600.0, "validating": 600.0, "ending": 900.0}
_FIRST_ELSEWHERE = 1200.0
_ALWAYS_FIRST = ("starting", "loading", "first step")
_ENOUGH = 3
"""Least number of step times; with fewer, an attempt's first step counts, too."""


class Deadlines:
    """The deadlines of one run."""

    def __init__(self, patience: float, saving_seconds: float, longer_steps: Sequence[int] = ()) -> None:
        """``saving_seconds``: how long a rank itself waits for a save. ``longer_steps``: the steps that get
        at least twice the tokens of the step before."""
        self._patience, self._saving, self._longer_steps = patience, saving_seconds, longer_steps
        self._samples: dict[str, deque[float]] = defaultdict(partial(deque, maxlen=_SAMPLES))
        self._phase, self._step = "starting", -1
        self._longest = 0.0
        """Longest time in this phase without progress."""

    def observe(self, seen: Sequence[RankStatus]) -> None:
        """Record a row of every rank of an attempt."""
        idle, phase = min(one.idle_seconds for one in seen), self.phase_of(seen)
        if phase != self._phase:
            if self._phase not in ("step", *_ALWAYS_FIRST):
                self._samples[self._phase].append(self._longest)
            self._longest = 0.0
        self._longest = max(self._longest, idle)
        slowest = max(seen, key=lambda one: one.step_seconds)
        if slowest.step_seconds and slowest.step != self._step:
            which = "first step" if self._phase == "first step" else "step"
            self._samples[which].append(slowest.step_seconds)
        if any(self._step < first <= slowest.step for first in self._longer_steps):
            self.forget_steps()
        self._phase, self._step = phase, slowest.step

    def forget_steps(self) -> None:
        """Forget how long steps took: other replicas compute the same batch, or steps get more tokens."""
        for phase in ("first step", "step", "validating"):
            self._samples.pop(phase, None)

    def limit(self, phase: str) -> float:
        """Return the seconds without progress after which a phase is a hang."""
        samples = sorted(self._samples[phase])
        # an attempt's first step may include compilation, but it is better than no sample
        if phase == "step" and len(samples) < _ENOUGH:
            samples = sorted([*samples, *self._samples["first step"]])
        allowed = self._saving if phase in ("saving", "ending") else 0.0
        if not samples or phase in _ALWAYS_FIRST:
            return self._patience * max(allowed, _FIRST.get(phase, _FIRST_ELSEWHERE))
        p99 = samples[min(len(samples) - 1, int(0.99 * len(samples)))]
        least = _LEAST.get(phase, _LEAST_ELSEWHERE)
        return self._patience * max(allowed, least, 5 * median(samples), 2 * p99)

    @staticmethod
    def phase_of(seen: Sequence[RankStatus]) -> str:
        """Return the phase of the attempt: the slowest among its ranks, because a rank that saves or starts
        may hold up the others."""
        phases = {_phase_of(one) for one in seen}
        return next((phase for phase in _SLOWEST_FIRST if phase in phases), "starting")


_SLOWEST_FIRST = ("starting", "loading", "saving", "ending", "tracing", "validating", "first step", "step")


def _phase_of(one: RankStatus) -> str:
    return "first step" if one.phase == "step" and not one.step_seconds else one.phase or "starting"


_Placement = Mapping[int, tuple[int, ...]]


class RankObservations:
    """The newest rows of an attempt's ranks."""

    def __init__(self) -> None:
        self._ranks: dict[int, dict[int, RankStatus]] = {}
        self._few: dict[int, Sequence[RankStatus]] = {}
        """Rows of the nodes that have sent all their ranks; computed on demand."""
        self._all_few: list[RankStatus] | None = None
        self.has_news = False
        """Whether rows arrived since this was last set to False."""

    def observe(self, node: int, ranks: Sequence[RankStatus]) -> None:
        """Record the rows of all ranks of a node."""
        self._ranks[node] = {one.rank: one for one in ranks}
        self.has_news |= bool(ranks)
        self._forget(node)

    def changed(self, node: int) -> None:
        """Record that a rank of the node has ended."""
        self._forget(node)

    def drop(self, node: int) -> None:
        """Forget a node that is gone, or is back and has sent no rows yet."""
        self._ranks.pop(node, None)
        self._forget(node)

    def _forget(self, node: int) -> None:
        self._few.pop(node, None)
        self._all_few = None

    def few(self, placement: _Placement, ended: Container[int]) -> list[RankStatus]:
        """Return rows that represent all living ranks; no rows if a node has not sent all of its own."""
        if self._all_few is None:
            self._all_few = self._gather(placement, ended)
        return self._all_few

    def _gather(self, placement: _Placement, ended: Container[int]) -> list[RankStatus]:
        found: list[RankStatus] = []
        for node, ranks in placement.items():
            rows = self._few.get(node)
            if rows is None:
                living = self._living(node, ranks, ended)
                if living is None:
                    return []
                rows = self._few[node] = _few_of(living)
            found += rows
        return found

    def all(self, placement: _Placement, ended: Container[int]) -> list[RankStatus]:
        """Return the rows of all living ranks; no rows if a node has not sent all of its own."""
        found: list[RankStatus] = []
        for node, ranks in placement.items():
            living = self._living(node, ranks, ended)
            if living is None:
                return []
            found += living
        return found

    def _living(
        self, node: int, ranks: tuple[int, ...], ended: Container[int]
    ) -> Sequence[RankStatus] | None:
        """Return the rows of a node's living ranks; ``None``: some are missing."""
        rows = self._ranks.get(node, {})
        living = [rows.get(rank) for rank in ranks if rank not in ended]
        return None if None in living else [one for one in living if one is not None]


def _few_of(rows: Sequence[RankStatus]) -> Sequence[RankStatus]:
    """Select the rows that can matter for a deadline, in their order."""
    if len(rows) <= 1:
        return rows
    kept = {
        min(rows, key=lambda one: one.idle_seconds).rank,
        max(rows, key=lambda one: one.step_seconds).rank,
    }
    kinds: dict[tuple[str, bool], int] = {}
    for one in rows:
        kinds.setdefault((one.phase, not one.step_seconds), one.rank)
    kept.update(kinds.values())
    return [one for one in rows if one.rank in kept]
