"""Decides what to do about each observation of a run. Pure: no files, sockets, clock or threads.

    actions = decider.handle(observation, now)        something was observed
    actions = decider.due(now)                      time has passed

    gathering ──all nodes connected──► running ──fault──► ending ──all ranks ended──► gathering, or over
                                          └──all ranks are done──► over

The driver writes `Decider.state` and the actions into its journal before it acts. A new driver starts from
the last entry and learns the state of the ranks from the agents. So an action may be carried out twice:
each is for one attempt, and the second time has no effect. The same code runs under a virtual clock.

The modules of this folder and their parts:

    membership, node_selection    which nodes are connected; which may have ranks, and which ones
    hang_detector, attempts       whether ranks make progress; what an exit means and what follows it
    step_restarts, drain          when another attempt would be better; nodes that leave without a fault
    straggler_detector, rebalance slow ranks; moving work away from them
    health, traffic_alarms        links and devices of the nodes
    numeric_faults, nan_trial     wrong or non-finite values
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from myriad.comm.attempt_layout import AttemptLayout
from myriad.supervise.messages import Beat, EvictionAsked, NodeJoined, NodeLeft, Observation, StopAsked
from myriad.supervise.observations import Examined, NodeFacts, RankExited
from myriad.supervise.policy.attempts import (
    NOWHERE,
    AttemptOutcome,
    adopt,
    incident_of,
    is_as_asked,
    is_news,
    is_partial,
    next_attempt,
    place_missing,
    take_over,
)
from myriad.supervise.policy.drain import NodeDrain
from myriad.supervise.policy.fitness import Fitness
from myriad.supervise.policy.hang_detector import HangDetector, StuckAttempt
from myriad.supervise.policy.health import AttemptFault, Health
from myriad.supervise.policy.incidents import Incident
from myriad.supervise.policy.membership import Membership
from myriad.supervise.policy.node_selection import NodeSelection
from myriad.supervise.policy.numeric_faults import NumericFaults
from myriad.supervise.policy.policy_actions import Notice, PolicyAction, StartAttempt, StopRanks
from myriad.supervise.policy.run_state import RunPlan, RunState
from myriad.supervise.policy.step_restarts import StepRestarts
from myriad.supervise.policy.traffic_alarms import TrafficAlarms
from myriad.units import format_ranks

__all__ = ["Decider"]

_BLAME_SECONDS = 1.5
"""Wait after an error that only reports a lost peer: the exit of the peer itself may arrive later."""
_LOST = -9
"""Exit code of ranks that are lost with their node."""
_REPEAT_SECONDS, _REPEATS = 3.0, 2
"""Interval and number of attempts to kill ranks that do not end; after that their node is evicted."""


class Decider:
    """Decides what to do about each observation of a run."""

    def __init__(self, plan: RunPlan, now: float, state: RunState | None = None) -> None:
        """``state``: the state that an earlier driver left."""
        self._plan = plan
        self.state = state or RunState(
            "gathering",
            plan.first_epoch - 1,
            newest_step=plan.newest_step,
            skipped_steps=plan.skipped_steps,
        )
        self._numbers = NumericFaults(plan, self.state)
        self._membership = Membership(plan.patience, now)
        self._watch = HangDetector(plan, self.state, self._membership)
        self._fitness = Fitness(plan)
        self._traffic = TrafficAlarms(plan, self.state)
        self._health = Health(plan.patience, self.state, self._traffic)
        self._selection = NodeSelection(plan, self.state, self._membership, self._fitness, self._health)
        self._outcome = AttemptOutcome(plan, self.state, self._numbers, self._selection, self._membership)
        self._step_restarts = StepRestarts(plan, self.state, self._selection, self._watch, self._health, now)
        self._node_drain = NodeDrain(
            self.state, self._membership, self._fitness, self._selection, self._step_restarts
        )
        self._trains = False
        """Whether ranks of this attempt train, as far as this driver has received reports."""
        self._since = now
        self._blame_at: float | None = None
        self._enough_at: float | None = None
        """Time since which enough nodes are connected."""
        self._repeats = 0
        if self.state.placement and not is_partial(self.state, self._world):
            self._step_restarts.take_up(now)

    @property
    def nodes(self) -> dict[int, NodeJoined]:
        """Nodes that are connected."""
        return self._membership.there

    @property
    def silent_seconds(self) -> float:
        """Seconds without a heartbeat after which a node is given up."""
        return self._membership.silent_seconds

    def step_seconds(self) -> float:
        """Return the seconds of a step; 0 if unknown."""
        return max((one.step_seconds for one in self._watch.all()), default=0.0)

    @property
    def _world(self) -> int:
        """Number of ranks of this attempt."""
        return self._plan.world_of(self.state.layout)

    @property
    def needed(self) -> int:
        """Number of nodes of the attempt; before the first attempt, of the job."""
        return self._selection.needed

    @property
    def usable(self) -> list[int]:
        """Nodes that are connected and may have ranks."""
        return self._selection.usable

    def handle(self, observation: Observation, now: float) -> list[PolicyAction]:
        """Return the actions that follow from an observation at time ``now`` of the driver's clock."""
        if self.state.phase == "over":
            return []
        if isinstance(observation, NodeJoined):
            return [*self._node_joined(observation, now), *self._go_on(now)]
        if isinstance(observation, NodeLeft):
            self._membership.leave(observation.node, now)
            return []
        if isinstance(observation, StopAsked):
            self.state.stop_asked = True
            return [*self._go_on(now)]
        if isinstance(observation, RankExited):
            return [*self._rank_exited(observation, now), *self._go_on(now)]
        if isinstance(observation, EvictionAsked):
            return [*self._node_drain.asked(observation, now), *self._go_on(now)]
        if isinstance(observation, Examined):
            return [*self._node_drain.examined(observation, now), *self._go_on(now)]
        if isinstance(observation, NodeFacts):
            return []
        return self._beat(observation, now)

    # Nodes

    def _node_joined(self, joined: NodeJoined, now: float) -> Iterator[PolicyAction]:
        self._membership.join(joined, now)
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
        """Take over an attempt that the journal does not contain, because an agent reports it."""
        take_over(self.state, joined.epoch, joined.layout)
        self._membership.expect(now)
        self._watch.begin()
        self._since, self._blame_at = now, None
        self._step_restarts.stand_still()

    def _beat(self, beat: Beat, now: float) -> list[PolicyAction]:
        if not self._membership.record_beat(beat, now):
            return []
        passed = list(self._tended(self._health.observe(beat, now), now))
        if beat.epoch != self.state.epoch:
            return passed
        self._watch.observe(beat, now)
        passed += self._traffic.observe(beat, now)
        if self.state.phase == "running":
            passed += self._went_on(max([one.step for one in beat.ranks], default=-1))
        for one in beat.ranks:
            self._numbers.observe(one.rank, one.digests)
        return [*passed, *self._compare_replicas(now)]

    def _went_on(self, step: int) -> Iterator[PolicyAction]:
        """Record that a rank trains this step: all ranks have restored their state, and the numbers of the
        previous step were finite."""
        if step >= 0:
            self._trains = True
            self.state.best_step, self.state.newest_step = max(self.state.best_step, step), None
        yield from self._outcome.carry_out(self._numbers.passed(step))

    def _compare_replicas(self, now: float) -> Iterator[PolicyAction]:
        if self.state.phase == "running" and (found := self._numbers.compare()) is not None:
            incident, evidence = found
            yield from self._end_attempt(incident, now, **evidence)

    # Faults

    def _rank_exited(self, ended: RankExited, now: float) -> Iterator[PolicyAction]:
        state = self.state
        if not is_news(ended, state):
            return
        state.exits[ended.rank] = ended.code
        self._watch.changed(ended.node)
        self._numbers.observe(ended.rank, ended.digests)
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

    def _end_attempt(self, incident: Incident, now: float, **evidence: object) -> Iterator[PolicyAction]:
        """End an attempt. The other ranks cannot continue. They are killed without a save, because their
        snapshots are in the memory of the nodes."""
        self.state.incident, self.state.phase = incident, "ending"
        self._fitness.suspect(incident)
        self._since, self._blame_at, self._repeats = now, None, 0
        if problem := self._traffic.problem():
            evidence["traffic"] = problem
        yield incident.blame(**evidence)
        yield StopRanks(rule=incident.rule, epoch=self.state.epoch)

    def _tended(self, found: Iterable[Notice | AttemptFault], now: float) -> Iterator[PolicyAction]:
        """Handle findings about links and devices."""
        for one in found:
            if not isinstance(one, AttemptFault):
                yield one
            elif self.state.phase == "running":
                yield from self._end_attempt(one.incident, now, **one.evidence)

    def is_calm(self, now: float) -> bool:
        """Whether all ranks train and no deadline can pass within a second without another observation."""
        state = self.state
        awaits = state.phase != "running" or state.turning or state.stop_asked or self._blame_at is not None
        return not awaits and self._watch.is_calm and self._membership.is_calm(now) and self._health.is_calm

    def due(self, now: float) -> list[PolicyAction]:
        """Return what is due at this time."""
        phase = self.state.phase
        if phase == "over":
            return []
        self._membership.extend_deadlines(now)
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
            actions.append(self._outcome.end_run("nodes did not come", "failed", reason))
        return [*actions, *self._go_on(now)]

    def _end_again(self, now: float) -> Iterator[PolicyAction]:
        """Kill again the ranks that did not end, or whose exits are not reported."""
        self._repeats += 1
        if self._repeats <= _REPEATS:
            yield StopRanks(rule="ranks that were to end still live", epoch=self.state.epoch)
            return
        for number, ranks in self.state.placement.items():
            if number in self._membership and set(ranks) - set(self.state.exits):
                yield self._selection.evict(number, "a node cannot end its ranks")
                yield from self._lose(number, ranks, 0.0, now)

    def why_left_out(self, joined: NodeJoined) -> str:
        """Return why a node takes no part in the run; empty if it may."""
        return self.state.why_left_out(joined)

    def why_not_evict(self, asked: EvictionAsked) -> str:
        """Return why an eviction cannot be done; empty if it can."""
        return self._node_drain.why_not(asked)

    def _examine(self, now: float) -> Iterator[PolicyAction]:
        """Request examinations, and end a run that could only start on unfit nodes."""
        state, first = self.state, self._selection.is_first
        training = state.phase == "running" and self._trains
        at_work = () if first else state.placement
        yield from self._fitness.due(self.nodes, at_work, now, first=first, training=training)
        if first and state.phase == "gathering" and (why := self._fitness.why_no_start(self.nodes, now)):
            yield self._outcome.end_run("nodes are unfit", "failed", why)

    def _silent_nodes(self, now: float) -> Iterator[PolicyAction]:
        for number, silent in self._membership.silent(now):
            yield self._selection.evict(number, "a node was silent", silent_seconds=silent)
            ranks = self.state.placement.get(number, ())
            if self.state.phase in ("running", "ending"):
                yield from self._lose(number, ranks, silent, now)

    def _absent_nodes(self, now: float) -> Iterator[PolicyAction]:
        """Give up nodes that have ranks but were lost with the last driver: this driver has never received a
        message from them."""
        state, absent = self.state, self._membership.waited(now)
        if state.phase not in ("running", "ending") or absent is None:
            return
        if is_partial(state, self._world):
            place_missing(state, self._world)
        for number, ranks in list(state.placement.items()):
            if number in self._membership or all(rank in state.exits for rank in ranks):
                continue
            if number != NOWHERE:
                yield self._selection.evict(number, "a node was silent", silent_seconds=absent)
            yield from self._lose(number, ranks, absent, now)

    def _lose(self, node: int, ranks: tuple[int, ...], silent: float, now: float) -> Iterator[PolicyAction]:
        name = "a node" if node == NOWHERE else f"node {node}"
        text = f"{name} with {format_ranks(ranks)} was lost"
        self._watch.drop(node)
        for rank in ranks:
            self.state.exits.setdefault(rank, _LOST)
        if ranks and self.state.phase == "running":
            incident = Incident("a node was lost", "node", -1, node, -1, text, text, self.state.stop_asked)
            yield from self._end_attempt(incident, now, silent_seconds=silent)

    def _overdue_ranks(self, now: float) -> Iterator[PolicyAction]:
        state, waited = self.state, self.state.incident
        if waited is not None and self._blame_at is not None:
            # A node that is away will soon reconnect or be given up; then its loss is the fault that its
            # peers report.
            if now >= self._blame_at and not self._membership.any_away(state.placement):
                yield from self._end_attempt(waited, now)
            return
        if is_partial(state, self._world):
            return
        if self._step_restarts.is_late(now):
            state.phase, self._since, self._repeats = "ending", now, 0
            yield StopRanks(rule="ranks did not end after their step", epoch=state.epoch)
            return
        yield from self._step_restarts.due(now)
        found = self._watch.overdue(now)
        if isinstance(found, StuckAttempt):
            yield from self._end_attempt(found.incident, now, **found.evidence)
        elif found is not None:
            yield found

    # Next attempt

    def _go_on(self, now: float) -> Iterator[PolicyAction]:
        state = self.state
        all_gone = len(state.exits) == self._world
        if state.phase == "running" and all_gone and state.incident is not None:
            yield from self._end_attempt(state.incident, now)
        if state.phase in ("running", "ending") and all_gone:
            yield from self._outcome.evaluate()
            self._since = now
        if state.phase != "gathering":
            return
        if state.stop_asked:
            yield self._outcome.end_run("a stop was asked for", "interrupted", "")
            return
        layout = self._selection.fitting(now - self._since)
        if layout is None:
            self._enough_at = None
        elif not self._is_early(now):
            yield self._start(layout, now)

    def _is_early(self, now: float) -> bool:
        """Return whether to wait for the numbered nodes, so that a spare which connects first gets no
        ranks."""
        self._enough_at = now if self._enough_at is None else self._enough_at
        meant = self.state.placement or set(range(self._plan.nodes)) <= set(self._selection.preferred)
        return not meant and now - self._enough_at < self._plan.late_seconds * self._plan.patience

    def _start(self, layout: AttemptLayout, now: float) -> StartAttempt:
        other_replicas = layout.dp != self.state.layout.dp
        attempt = next_attempt(self._plan, self.state, self._numbers, self._selection, layout)
        self._numbers.begin()
        self._since, self._blame_at = now, None
        self._watch.begin(other_replicas=other_replicas)
        self._trains = False
        self._fitness.started(attempt.placement)
        self._step_restarts.begin(now)
        return attempt
