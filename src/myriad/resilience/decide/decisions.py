"""What to do about what happens to a run. Pure: no files, no sockets, no clock, no threads.

    actions = decider.hear(observation, now)        something was seen
    actions = decider.due(now)                      time has passed

    gathering ──all nodes are there──► running ──fault──► ending ──all ranks are gone──► gathering, or over
                                          └──all ranks are done──► over

The driver writes `Decider.state` and the actions into its journal before it acts; a new driver begins with
the last one written and hears from the executors what has become of the ranks. So an action may be done
twice: each is for one epoch, and does nothing the second time. The same code runs under a virtual clock.

All of this folder, each with its part of it:

    presence, roster        who is there; who may have ranks
    watch, exits            whether ranks go on; what the end of one tells
    turns, departures       when another attempt would be better; who is to leave though nothing has failed
    aftermath, attempt      what follows when all ranks are gone; who has which ranks then
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from myriad.comm.attempt_layout import AttemptLayout
from myriad.resilience.decide.actions import Action, Notice, StartAttempt, StopRanks
from myriad.resilience.decide.aftermath import Aftermath
from myriad.resilience.decide.attempt import next_attempt
from myriad.resilience.decide.catch_up import NOWHERE, adopt, is_partial, place_missing, take_over
from myriad.resilience.decide.departures import Departures
from myriad.resilience.decide.evictions import why_left_out
from myriad.resilience.decide.exits import incident_of, is_as_asked, is_news
from myriad.resilience.decide.fitness import Fitness
from myriad.resilience.decide.health import Broken, Health
from myriad.resilience.decide.incidents import Incident
from myriad.resilience.decide.presence import Presence
from myriad.resilience.decide.roster import Roster
from myriad.resilience.decide.state import Plan, State
from myriad.resilience.decide.traffic import Traffic
from myriad.resilience.decide.turns import Turns
from myriad.resilience.decide.watch import Stuck, Watch
from myriad.resilience.decide.wrong_numbers import WrongNumbers
from myriad.resilience.facts import (
    Beat,
    EvictionAsked,
    Examined,
    NodeFacts,
    NodeJoined,
    NodeLeft,
    Observation,
    RankExited,
    StopAsked,
)
from myriad.units import format_ranks

__all__ = ["Decider"]

_BLAME_SECONDS = 1.5
"""After an error that only says that a peer is gone: the peer's own death may be told later."""
_LOST = -9
"""The code of ranks that nobody can tell of any more."""
_REPEAT_SECONDS, _REPEATS = 3.0, 2
"""After which ranks that were to be killed, and live, are to be killed again; then their executor is."""


class Decider:
    """Of one run."""

    def __init__(self, plan: Plan, now: float, state: State | None = None) -> None:
        """``state``: as an earlier driver left it."""
        self._plan = plan
        self.state = state or State(
            "gathering",
            plan.first_epoch - 1,
            newest_step=plan.newest_step,
            skipped_steps=plan.skipped_steps,
        )
        self._numbers = WrongNumbers(plan, self.state)
        self._presence = Presence(plan.patience, now)
        self._watch = Watch(plan, self.state, self._presence)
        self._fitness = Fitness(plan)
        self._traffic = Traffic(plan, self.state)
        self._health = Health(plan.patience, self.state, self._traffic)
        self._roster = Roster(plan, self.state, self._presence, self._fitness, self._health)
        self._aftermath = Aftermath(plan, self.state, self._numbers, self._roster, self._presence)
        self._turns = Turns(plan, self.state, self._roster, self._watch, self._health, now)
        self._departures = Departures(self.state, self._presence, self._fitness, self._roster, self._turns)
        self._trains = False
        """The ranks of this attempt, as far as this driver has heard."""
        self._since = now
        self._blame_at: float | None = None
        self._enough_at: float | None = None
        """Since when as many nodes are there as are needed."""
        self._repeats = 0
        if self.state.placement and not is_partial(self.state, self._world):
            self._turns.take_up(now)

    @property
    def nodes(self) -> dict[int, NodeJoined]:
        """Those that are there."""
        return self._presence.there

    @property
    def silent_seconds(self) -> float:
        """After which a node that says nothing is given up."""
        return self._presence.silent_seconds

    def step_seconds(self) -> float:
        """What a step takes, as far as is known; 0: it is not."""
        return max((one.step_seconds for one in self._watch.all()), default=0.0)

    @property
    def _world(self) -> int:
        """Ranks of this attempt."""
        return self._plan.world_of(self.state.layout)

    @property
    def needed(self) -> int:
        """Nodes of the attempt; before the first, those of the job."""
        return self._roster.needed

    @property
    def usable(self) -> list[int]:
        """Nodes that are there and may have ranks."""
        return self._roster.usable

    def hear(self, observation: Observation, now: float) -> list[Action]:
        """Something was seen, by the driver's own clock at ``now``."""
        if self.state.phase == "over":
            return []
        if isinstance(observation, NodeJoined):
            return [*self._node_joined(observation, now), *self._go_on(now)]
        if isinstance(observation, NodeLeft):
            self._presence.leave(observation.node, now)
            return []
        if isinstance(observation, StopAsked):
            self.state.stop_asked = True
            return [*self._go_on(now)]
        if isinstance(observation, RankExited):
            return [*self._rank_exited(observation, now), *self._go_on(now)]
        if isinstance(observation, EvictionAsked):
            return [*self._departures.asked(observation, now), *self._go_on(now)]
        if isinstance(observation, Examined):
            return [*self._departures.examined(observation, now), *self._go_on(now)]
        if isinstance(observation, NodeFacts):
            return []
        return self._beat(observation, now)

    # Nodes

    def _node_joined(self, joined: NodeJoined, now: float) -> Iterator[Action]:
        self._presence.join(joined, now)
        self._fitness.joined(joined)
        self._health.join(joined)
        self._watch.drop(joined.node)
        state = self.state
        state.stop_asked |= joined.stop_asked
        if joined.epoch > state.epoch:
            self._take_over(joined, now)
        if joined.epoch == state.epoch and is_partial(state, self._world):
            adopt(state, joined, self._world)
        if joined.running and joined.epoch != state.epoch:
            yield StopRanks(rule="ranks of another epoch", epoch=joined.epoch)
        mine = state.placement.get(joined.node, ()) if state.phase in ("running", "ending") else ()
        if joined.epoch == state.epoch:
            for ended in joined.exits:
                yield from self._rank_exited(ended, now)
        known = {*joined.running, *state.exits} if joined.epoch == state.epoch else set(state.exits)
        if lost := tuple(sorted(set(mine) - known)):
            yield from self._lose(joined.node, lost, 0.0, now)

    def _take_over(self, joined: NodeJoined, now: float) -> None:
        """The journal does not know of what the executors have been told."""
        take_over(self.state, joined.epoch, joined.layout)
        self._presence.expect(now)
        self._watch.begin()
        self._since, self._blame_at = now, None
        self._turns.stand_still()

    def _beat(self, beat: Beat, now: float) -> list[Action]:
        if not self._presence.heard(beat, now):
            return []
        passed = list(self._tended(self._health.heard(beat, now), now))
        if beat.epoch != self.state.epoch:
            return passed
        self._watch.heard(beat, now)
        passed += self._traffic.heard(beat, now)
        if self.state.phase == "running":
            passed += self._went_on(max([one.step for one in beat.ranks], default=-1))
        for one in beat.ranks:
            self._numbers.saw(one.rank, one.digests)
        return [*passed, *self._compare_replicas(now)]

    def _went_on(self, step: int) -> Iterator[Action]:
        """Some rank trains this step: so all have loaded what they go on from, and the numbers of the step
        before were finite."""
        if step >= 0:
            self._trains = True
            self.state.best_step, self.state.newest_step = max(self.state.best_step, step), None
        yield from self._aftermath.carry_out(self._numbers.passed(step))

    def _compare_replicas(self, now: float) -> Iterator[Action]:
        if self.state.phase == "running" and (found := self._numbers.compare()) is not None:
            incident, evidence = found
            yield from self._end_attempt(incident, now, **evidence)

    # Faults

    def _rank_exited(self, ended: RankExited, now: float) -> Iterator[Action]:
        state = self.state
        if not is_news(ended, state):
            return
        state.exits[ended.rank] = ended.code
        self._watch.changed(ended.node)
        self._numbers.saw(ended.rank, ended.digests)
        if state.phase == "running":
            yield from self._went_on(ended.step)
        if is_as_asked(ended, state):
            if ended.cause == "interrupted" and state.phase == "running":
                state.phase, self._since, self._repeats = "ending", now, 0
                yield StopRanks(rule="a stop was asked for before all ranks could save", epoch=state.epoch)
            return
        if ended.cause == "device" and self._health.blames_program(ended.node, ended.rank):
            ended = replace(ended, cause="user")
        if ended.cause != "peer":
            yield from self._end_attempt(incident_of(ended, state, self._world), now)
        elif state.incident is None:
            state.incident = Incident.of_exit(ended, "a peer was lost", after_stop=state.stop_asked)
            self._blame_at = now + _BLAME_SECONDS

    def _end_attempt(self, incident: Incident, now: float, **evidence: object) -> Iterator[Action]:
        """The others cannot go on: none of them is asked to, as their snapshots are in the node's memory."""
        self.state.incident, self.state.phase = incident, "ending"
        self._fitness.suspect(incident)
        self._since, self._blame_at, self._repeats = now, None, 0
        if problem := self._traffic.problem():
            evidence["traffic"] = problem
        yield incident.blame(**evidence)
        yield StopRanks(rule=incident.rule, epoch=self.state.epoch)

    def _tended(self, found: Iterable[Notice | Broken], now: float) -> Iterator[Action]:
        """Of links and devices."""
        for one in found:
            if not isinstance(one, Broken):
                yield one
            elif self.state.phase == "running":
                yield from self._end_attempt(one.incident, now, **one.evidence)

    def is_calm(self, now: float) -> bool:
        """All ranks train, and no deadline may pass within a second if nothing else is heard."""
        state = self.state
        awaits = state.phase != "running" or state.turning or state.stop_asked or self._blame_at is not None
        return not awaits and self._watch.is_calm and self._presence.is_calm(now) and self._health.is_calm

    def due(self, now: float) -> list[Action]:
        """What the time asks for."""
        phase = self.state.phase
        if phase == "over":
            return []
        self._presence.forgive(now)
        actions = [*self._silent_nodes(now), *self._absent_nodes(now), *self._examine(now)]
        actions += [*self._tended(self._health.due(now), now), *self._traffic.due(now)]
        if phase == "running" and self.state.phase == "running":
            actions += self._overdue_ranks(now)
        elif phase == "ending" and now - self._since > _REPEAT_SECONDS:
            self._since = now
            actions += self._end_again(now)
        elif phase == "gathering" and now - self._since > self._plan.gather_seconds * self._plan.patience:
            useless = map(self._health.why_useless, sorted(self.nodes))
            reason = f"{self._plan.nodes} nodes are needed, and only {self.usable} came"
            reason += "".join(f"; {why}" for why in useless if why is not None)
            actions.append(self._aftermath.end_run("nodes did not come", "failed", reason))
        return [*actions, *self._go_on(now)]

    def _end_again(self, now: float) -> Iterator[Action]:
        """Ranks that were to end live, or nobody says that they do not."""
        self._repeats += 1
        if self._repeats <= _REPEATS:
            yield StopRanks(rule="ranks that were to end still live", epoch=self.state.epoch)
            return
        for number, ranks in self.state.placement.items():
            if number in self._presence and set(ranks) - set(self.state.exits):
                yield self._roster.evict(number, "a node cannot end its ranks")
                yield from self._lose(number, ranks, 0.0, now)

    def why_left_out(self, joined: NodeJoined) -> str:
        """Of the run; empty: it may be a node."""
        return why_left_out(self.state, joined)

    def why_not_evict(self, asked: EvictionAsked) -> str:
        """What keeps it from being done; empty: nothing."""
        return self._departures.why_not(asked)

    def _examine(self, now: float) -> Iterator[Action]:
        """Whoever the doctor is to see, and the end of a run that would start on none but unfit nodes."""
        state, first = self.state, self._roster.is_first
        training = state.phase == "running" and self._trains
        at_work = () if first else state.placement
        yield from self._fitness.due(self.nodes, at_work, now, first=first, training=training)
        if first and state.phase == "gathering" and (why := self._fitness.why_no_start(self.nodes, now)):
            yield self._aftermath.end_run("nodes are unfit", "failed", why)

    def _silent_nodes(self, now: float) -> Iterator[Action]:
        for number, silent in self._presence.silent(now):
            yield self._roster.evict(number, "a node was silent", silent_seconds=silent)
            ranks = self.state.placement.get(number, ())
            if self.state.phase in ("running", "ending"):
                yield from self._lose(number, ranks, silent, now)

    def _absent_nodes(self, now: float) -> Iterator[Action]:
        """They have ranks, and were lost with the last driver: this one has never heard of them."""
        state, absent = self.state, self._presence.waited(now)
        if state.phase not in ("running", "ending") or absent is None:
            return
        if is_partial(state, self._world):
            place_missing(state, self._world)
        for number, ranks in list(state.placement.items()):
            if number in self._presence or all(rank in state.exits for rank in ranks):
                continue
            if number != NOWHERE:
                yield self._roster.evict(number, "a node was silent", silent_seconds=absent)
            yield from self._lose(number, ranks, absent, now)

    def _lose(self, node: int, ranks: tuple[int, ...], silent: float, now: float) -> Iterator[Action]:
        name = "a node" if node == NOWHERE else f"node {node}"
        text = f"{name} with {format_ranks(ranks)} was lost"
        self._watch.drop(node)
        for rank in ranks:
            self.state.exits.setdefault(rank, _LOST)
        if ranks and self.state.phase == "running":
            incident = Incident("a node was lost", "node", -1, node, -1, text, text, self.state.stop_asked)
            yield from self._end_attempt(incident, now, silent_seconds=silent)

    def _overdue_ranks(self, now: float) -> Iterator[Action]:
        state, waited = self.state, self.state.incident
        if waited is not None and self._blame_at is not None:
            # a node that is away is about to be back, or to be given up: then that is what its peers miss
            if now >= self._blame_at and not self._presence.any_away(state.placement):
                yield from self._end_attempt(waited, now)
            return
        if is_partial(state, self._world):
            return
        if self._turns.is_late(now):
            state.phase, self._since, self._repeats = "ending", now, 0
            yield StopRanks(rule="ranks did not end after their step", epoch=state.epoch)
            return
        yield from self._turns.due(now)
        found = self._watch.overdue(now)
        if isinstance(found, Stuck):
            yield from self._end_attempt(found.incident, now, **found.evidence)
        elif found is not None:
            yield found

    # What comes next

    def _go_on(self, now: float) -> Iterator[Action]:
        state = self.state
        all_gone = len(state.exits) == self._world
        if state.phase == "running" and all_gone and state.incident is not None:
            yield from self._end_attempt(state.incident, now)
        if state.phase in ("running", "ending") and all_gone:
            yield from self._aftermath.judge()
            self._since = now
        if state.phase != "gathering":
            return
        if state.stop_asked:
            yield self._aftermath.end_run("a stop was asked for", "interrupted", "")
            return
        layout = self._roster.fitting(now - self._since)
        if layout is None:
            self._enough_at = None
        elif not self._is_early(now):
            yield self._start(layout, now)

    def _is_early(self, now: float) -> bool:
        """At the very start a spare that came first takes nobody's place."""
        self._enough_at = now if self._enough_at is None else self._enough_at
        meant = self.state.placement or set(range(self._plan.nodes)) <= set(self._roster.preferred)
        return not meant and now - self._enough_at < self._plan.late_seconds * self._plan.patience

    def _start(self, layout: AttemptLayout, now: float) -> StartAttempt:
        other_replicas = layout.dp != self.state.layout.dp
        attempt = next_attempt(self._plan, self.state, self._numbers, self._roster, layout)
        self._numbers.begin()
        self._since, self._blame_at = now, None
        self._watch.begin(other_replicas=other_replicas)
        self._trains = False
        self._fitness.started(attempt.placement)
        self._turns.begin(now)
        return attempt
