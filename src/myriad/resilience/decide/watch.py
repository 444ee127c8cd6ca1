"""Whether the ranks of an attempt go on: who was stopped, and who hangs. Pure.

beats ──► rows of all ranks ──► a rank in state T at two looks      Stuck("stopped")
                            ──► no row moves within its deadline    DumpStacks, then Stuck("hang")
"""

from collections.abc import Sequence
from dataclasses import dataclass

from myriad.resilience.decide.actions import DumpStacks
from myriad.resilience.decide.culprit import find_suspects
from myriad.resilience.decide.deadlines import Deadlines
from myriad.resilience.decide.incidents import Incident
from myriad.resilience.decide.presence import Presence
from myriad.resilience.decide.sightings import Sightings
from myriad.resilience.decide.state import Plan, State
from myriad.resilience.facts import Beat, RankSeen
from myriad.units import format_ranks

__all__ = ["Stuck", "Watch"]

_STOPPED_SECONDS = 1.25
_CALM_SECONDS = 2.0
_DUMP_SECONDS = 1.0
"""What stacks take to be written."""


@dataclass(frozen=True)
class Stuck:
    """Why the attempt is to end."""

    incident: Incident
    evidence: dict[str, object]


class Watch:
    """Of one run; begun anew with each attempt."""

    def __init__(self, plan: Plan, state: State, presence: Presence) -> None:
        self._state, self._presence = state, presence
        self._deadlines = Deadlines(plan.patience, plan.saving_seconds)
        self._stopped_seconds = _STOPPED_SECONDS * plan.patience
        self.begin()

    def begin(self, *, other_replicas: bool = False) -> None:
        """An attempt: what was seen of earlier ones counts no more, but for how long phases take."""
        if other_replicas:
            self._deadlines.forget_steps()
        self._sightings = Sightings()
        self._stopped_since: dict[int, float] = {}
        self._dumped_at: float | None = None

    def heard(self, beat: Beat, now: float) -> None:
        """Of ranks of this attempt."""
        self._sightings.heard(beat.node, beat.ranks)
        for one in beat.ranks:
            if one.state == "T":
                self._stopped_since.setdefault(one.rank, now)
            elif self._stopped_since:
                self._stopped_since.pop(one.rank, None)

    def changed(self, node: int) -> None:
        """A rank there has ended."""
        self._sightings.changed(node)

    def drop(self, node: int) -> None:
        """It is not there any more, or has come back and has told nothing yet."""
        self._sightings.drop(node)

    def all(self) -> list[RankSeen]:
        """Of every rank that lives; none when a node has not told of all of its own."""
        return self._sightings.all(self._state.placement, self._state.exits)

    def few(self) -> list[RankSeen]:
        """Rows that stand for all ranks that live; none when a node has not told of all of its own. Deadlines
        learn from them here, not at each beat: of 1,536 nodes 1,536 come in a second."""
        few = self._sightings.few(self._state.placement, self._state.exits)
        if few and self._sightings.has_news:
            self._sightings.has_news = False
            self._deadlines.saw(few)
        return few

    @property
    def is_calm(self) -> bool:
        """Ranks go on, as far as was told, and none is stopped."""
        few = self.few()
        moving = bool(few) and min(one.idle_seconds for one in few) < _CALM_SECONDS
        return moving and not self._stopped_since and self._dumped_at is None

    def overdue(self, now: float) -> Stuck | DumpStacks | None:
        """What is to be done about ranks that do not go on."""
        late = {rank for rank, since in self._stopped_since.items() if now - since >= self._stopped_seconds}
        stopped = [one for one in self.all() if one.rank in late] if late else []
        if stopped:
            return self._stopped(stopped[0], now)
        few = self.few()
        return self._hung(few, now) if few else None

    def _stopped(self, one: RankSeen, now: float) -> Stuck:
        text = f"rank {one.rank} was stopped (SIGSTOP), pid {one.pid}"
        incident = self._incident("a rank was stopped", "stopped", one, text)
        idle = one.idle_seconds + self._presence.since_heard(incident.node, now)
        return Stuck(incident, {"idle_seconds": idle})

    def _hung(self, few: Sequence[RankSeen], now: float) -> Stuck | DumpStacks | None:
        """The stacks come first, and a moment later the end, unless it was none of a hang."""
        idle, phase = min(one.idle_seconds for one in few), self._deadlines.phase_of(few)
        limit = self._deadlines.limit(phase)
        if idle <= limit:
            self._dumped_at = None
            return None
        if self._dumped_at is not None and now < self._dumped_at + _DUMP_SECONDS:
            return None
        seen = self.all()
        suspicion = find_suspects(seen)
        ranks, evidence = suspicion.ranks, {"idle_seconds": idle, "limit_seconds": limit, "phase": phase}
        if self._dumped_at is None:
            self._dumped_at = now
            evidence |= {"why": suspicion.why}
            return DumpStacks(rule="no rank goes on", evidence=evidence, epoch=self._state.epoch, ranks=ranks)
        one = next(one for one in seen if one.rank == ranks[0])
        text = f"{format_ranks(ranks)} hung: {suspicion.why} (stacks in the log)"
        return Stuck(self._incident("no rank goes on", "hang", one, text), evidence)

    def _incident(self, rule: str, cause: str, one: RankSeen, text: str) -> Incident:
        node = self._state.node_of(one.rank)
        return Incident(rule, cause, one.rank, node, one.step, text, text, self._state.stop_asked)
