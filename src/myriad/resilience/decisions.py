"""What to do about what happens to a run. Pure: no files, no sockets, no clock, no threads.

    actions = decider.hear(observation, now)        something was seen
    actions = decider.due(now)                      time has passed

    gathering ──all nodes are there──► running ──fault──► ending ──all ranks are gone──► gathering, or over
                                          └──all ranks are done──► over

The driver writes `Decider.state` and the actions into its journal before it acts; a new driver begins with
the last one written and hears from the executors what has become of the ranks. So an action may be done
twice: each is for one epoch, and does nothing the second time. The same code runs under a virtual clock.

Recovery is the cheapest sufficient step: all ranks anew on the nodes that are there, from the snapshots in
their memory; on a spare where a node is gone or, when a spare is there, where the node may be the cause. What
a healthy node does not cure is tried twice.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from myriad.resilience.actions import (
    Action,
    DumpStacks,
    EndRun,
    Evict,
    Outcome,
    StartAttempt,
    StopRanks,
    TurnRanks,
)
from myriad.resilience.balance import Balance
from myriad.resilience.catch_up import NOWHERE, adopt, is_partial, place_missing, take_over
from myriad.resilience.causes import first_not_finite
from myriad.resilience.culprit import find_suspects
from myriad.resilience.deadlines import Deadlines
from myriad.resilience.facts import (
    Beat,
    NodeJoined,
    NodeLeft,
    Observation,
    RankExited,
    RankSeen,
    StopAsked,
)
from myriad.resilience.incidents import CORRUPTION, NOT_FINITE, OF_THE_NODE, OF_THE_USER, Incident, told_ranks
from myriad.resilience.sightings import Sightings
from myriad.resilience.state import Plan, State
from myriad.resilience.wrong_numbers import WrongNumbers

__all__ = ["Decider"]

_BLAME_SECONDS = 1.5
"""After an error that only says that a peer is gone: the peer's own death may be told later."""
_STOPPED_SECONDS = 1.5
_SILENT_SECONDS, _AWAY_SECONDS = 3.5, 3.0
"""Without a beat of a node that is connected; without a connection."""
_ABSENT_SECONDS = 10.0
"""After which a new driver waits no longer for a node of which it has read."""
_LEAST_SILENCE_SECONDS = 2.5
_LOOK_SECONDS = 1.0
"""Time is looked at more often than this, by whoever is not held up."""
_COMPARE_SECONDS = 1.0
"""How often ranks are compared: each look is at all of them."""
_DUMP_SECONDS = 1.0
_LOST = -9
"""The code of ranks that nobody can tell of any more."""
_REPEAT_SECONDS, _REPEATS = 3.0, 2
"""After which ranks that were to be killed, and live, are to be killed again; then their executor is."""
_TURN_SECONDS, _TURN_STEPS = 30.0, 3
"""After which ranks that were to end after a step are killed."""


@dataclass
class _Node:
    joined: NodeJoined
    heard_at: float
    left_at: float | None = None


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
        self._numbers = WrongNumbers(plan, self.state, self._node_of)
        self._nodes: dict[int, _Node] = {}
        self._since = self._absent_since = self._looked_at = now
        self._kill_at: float | None = None
        self._enough_at: float | None = None
        """Since when as many nodes are there as are needed."""
        self._repeats = 0
        self._sightings = Sightings()
        self._stopped_since: dict[int, float] = {}
        self._deadlines = Deadlines(plan.patience, plan.saving_seconds)
        self._balance = None if plan.work is None else Balance(plan.work, plan.patience)
        self._turn_by = now + _TURN_SECONDS * plan.patience
        self._compare_at = now
        if self._balance is not None and self.state.placement and not is_partial(self.state, plan.world):
            self._balance.begin(self.state.placement, self.state.shares, now)

    @property
    def nodes(self) -> dict[int, NodeJoined]:
        """Those that are there."""
        return {number: node.joined for number, node in self._nodes.items() if node.left_at is None}

    @property
    def silent_seconds(self) -> float:
        """After which a node that says nothing is given up."""
        return self._limit(_SILENT_SECONDS)

    @property
    def _has_spare(self) -> bool:
        return len(self.nodes) > self._plan.nodes

    def hear(self, observation: Observation, now: float) -> list[Action]:
        """Something was seen, by the driver's own clock at ``now``."""
        if self.state.phase == "over":
            return []
        if isinstance(observation, NodeJoined):
            return [*self._node_joined(observation, now), *self._go_on(now)]
        if isinstance(observation, NodeLeft):
            if observation.node in self._nodes:
                self._nodes[observation.node].left_at = now
            return []
        if isinstance(observation, StopAsked):
            self.state.stop_asked = True
            return [*self._go_on(now)]
        if isinstance(observation, RankExited):
            return [*self._rank_exited(observation, now), *self._go_on(now)]
        return self._beat(observation, now)

    # Nodes

    def _node_joined(self, joined: NodeJoined, now: float) -> Iterator[Action]:
        self._nodes[joined.node] = _Node(joined, now)
        self._sightings.drop(joined.node)
        state = self.state
        state.stop_asked |= joined.stop_asked
        if joined.epoch > state.epoch:
            self._take_over(joined.epoch, now)
        if joined.epoch == state.epoch and is_partial(state, self._plan.world):
            adopt(state, joined, self._plan.world)
        if joined.running and joined.epoch != state.epoch:
            yield StopRanks(rule="ranks of another epoch", epoch=joined.epoch)
        mine = state.placement.get(joined.node, ()) if state.phase in ("running", "ending") else ()
        if joined.epoch == state.epoch:
            for ended in joined.exits:
                yield from self._rank_exited(ended, now)
        known = {*joined.running, *state.exits} if joined.epoch == state.epoch else set(state.exits)
        if lost := tuple(sorted(set(mine) - known)):
            yield from self._lose(joined.node, lost, 0.0, now)

    def _take_over(self, epoch: int, now: float) -> None:
        """The journal does not know of what the executors have been told."""
        take_over(self.state, epoch)
        self._since, self._kill_at, self._stopped_since = now, None, {}
        self._absent_since, self._sightings = now, Sightings()
        if self._balance is not None:
            self._balance.stand_still()

    def _beat(self, beat: Beat, now: float) -> list[Action]:
        node = self._nodes.get(beat.node)
        if node is None:
            return []
        node.heard_at = now
        if beat.port != node.joined.port:
            node.joined = replace(node.joined, port=beat.port)
        if beat.epoch == self.state.epoch:
            self._sightings.heard(beat.node, beat.ranks)
            passed: list[Action] = []
            if self.state.phase == "running":
                passed += self._went_on(max([one.step for one in beat.ranks], default=-1))
            for one in beat.ranks:
                if one.state == "T":
                    self._stopped_since.setdefault(one.rank, now)
                elif self._stopped_since:
                    self._stopped_since.pop(one.rank, None)
                self._numbers.saw(one.rank, one.digests)
            return [*passed, *self._compare_replicas(now)]
        return []

    def _went_on(self, step: int) -> Iterator[Action]:
        """Some rank trains this step: so all have loaded what they go on from, and the numbers of the step
        before were finite."""
        if step >= 0:
            self.state.best_step, self.state.newest_step = max(self.state.best_step, step), None
        yield from self._carry_out(self._numbers.passed(step))

    def _compare_replicas(self, now: float) -> Iterator[Action]:
        if self.state.phase == "running" and (found := self._numbers.compare()) is not None:
            incident, evidence = found
            yield from self._end_attempt(incident, now, **evidence)

    def _compare_last(self) -> Iterator[Action]:
        """What ranks that have ended had told nobody yet."""
        known = self.state.incident
        if (known is None or known.cause != CORRUPTION) and (found := self._numbers.compare()) is not None:
            incident, evidence = found
            yield incident.blame(**evidence)
            self.state.incident = known or incident

    def _carry_out(self, actions: Iterable[Action]) -> Iterator[Action]:
        """What follows from wrong numbers."""
        for action in actions:
            if isinstance(action, Evict):
                yield self._evict(action.node, action.rule)
            elif isinstance(action, EndRun):
                yield self._end_run(action.rule, action.outcome, action.reason)
            else:
                yield action

    # Faults

    def _rank_exited(self, ended: RankExited, now: float) -> Iterator[Action]:
        state = self.state
        if (
            ended.epoch != state.epoch
            or ended.rank in state.exits
            or ended.rank not in state.placement.get(ended.node, ())
            or state.phase not in ("running", "ending")
        ):
            return
        state.exits[ended.rank] = ended.code
        self._sightings.changed(ended.node)
        self._numbers.saw(ended.rank, ended.digests)
        if state.phase == "running":
            yield from self._went_on(ended.step)
        asked_and_obeyed = state.stop_asked and ended.cause == "interrupted"
        turned = state.turning and ended.cause == "turned"
        if state.phase == "ending" or ended.code == 0 or asked_and_obeyed or turned:
            return
        if ended.cause == "peer":
            if state.incident is None:
                state.incident = Incident.of_exit(ended, "a peer was lost", after_stop=state.stop_asked)
                self._kill_at = now + _BLAME_SECONDS
            return
        incident = Incident.of_exit(ended, "a rank ended", after_stop=state.stop_asked)
        if ended.cause == NOT_FINITE:  # whoever is told to have ended first, each says who made it
            rank, text = first_not_finite(ended.error)
            if rank < self._plan.world:
                text += f" (log: {ended.log})"
                incident = replace(incident, rank=rank, node=self._node_of(rank), text=text)
        yield from self._end_attempt(incident, now)

    def _end_attempt(self, incident: Incident, now: float, **evidence: object) -> Iterator[Action]:
        """The others cannot go on: none of them is asked to, as their snapshots are in the node's memory."""
        self.state.incident, self.state.phase = incident, "ending"
        self._since, self._kill_at, self._repeats = now, None, 0
        yield incident.blame(**evidence)
        yield StopRanks(rule=incident.rule, epoch=self.state.epoch)

    def due(self, now: float) -> list[Action]:
        """What the time asks for."""
        phase = self.state.phase
        if phase == "over":
            return []
        self._forgive(now)
        actions = [*self._silent_nodes(now), *self._absent_nodes(now)]
        if phase == "running" and self.state.phase == "running":
            actions += self._overdue_ranks(now)
        elif phase == "ending" and now - self._since > _REPEAT_SECONDS:
            self._since = now
            actions += self._end_again(now)
        elif phase == "gathering" and now - self._since > self._plan.gather_seconds * self._plan.patience:
            there = sorted(self.nodes)
            reason = f"{self._plan.nodes} nodes are needed, and only {there} came"
            actions.append(self._end_run("nodes did not come", "failed", reason))
        return [*actions, *self._go_on(now)]

    def _forgive(self, now: float) -> None:
        """Nobody listened while the driver itself was held up: that was no silence of the nodes."""
        held_up, self._looked_at = now - self._looked_at - _LOOK_SECONDS, now
        if held_up > 0:
            self._absent_since += held_up
            for node in self._nodes.values():
                node.heard_at = min(now, node.heard_at + held_up)
                if node.left_at is not None:
                    node.left_at = min(now, node.left_at + held_up)

    def _end_again(self, now: float) -> Iterator[Action]:
        """Ranks that were to end live, or nobody says that they do not."""
        self._repeats += 1
        if self._repeats <= _REPEATS:
            yield StopRanks(rule="ranks that were to end still live", epoch=self.state.epoch)
            return
        for number, ranks in self.state.placement.items():
            if number in self._nodes and set(ranks) - set(self.state.exits):
                yield self._evict(number, "a node cannot end its ranks")
                yield from self._lose(number, ranks, 0.0, now)

    def _evict(self, node: int, rule: str, **evidence: object) -> Evict:
        self._nodes.pop(node, None)
        return Evict(rule=rule, evidence=dict(evidence), node=node)

    def _silent_nodes(self, now: float) -> Iterator[Action]:
        for number, node in list(self._nodes.items()):
            silent, away = now - node.heard_at, now - (now if node.left_at is None else node.left_at)
            if silent < self._limit(_SILENT_SECONDS) and away < self._limit(_AWAY_SECONDS):
                continue
            yield self._evict(number, "a node was silent", silent_seconds=silent)
            ranks = self.state.placement.get(number, ())
            if self.state.phase in ("running", "ending"):
                yield from self._lose(number, ranks, silent, now)

    def _absent_nodes(self, now: float) -> Iterator[Action]:
        """They have ranks, and were lost with the last driver: this one has never heard of them."""
        state, absent = self.state, now - self._absent_since
        if state.phase not in ("running", "ending") or absent < self._limit(_ABSENT_SECONDS):
            return
        if is_partial(state, self._plan.world):
            place_missing(state, self._plan.world)
        for number, ranks in list(state.placement.items()):
            if number in self._nodes or all(rank in state.exits for rank in ranks):
                continue
            if number != NOWHERE:
                yield self._evict(number, "a node was silent", silent_seconds=absent)
            yield from self._lose(number, ranks, absent, now)

    def _lose(self, node: int, ranks: tuple[int, ...], silent: float, now: float) -> Iterator[Action]:
        name = "a node" if node == NOWHERE else f"node {node}"
        text = f"{name} with {told_ranks(ranks)} was lost"
        self._sightings.drop(node)
        for rank in ranks:
            self.state.exits.setdefault(rank, _LOST)
        if ranks and self.state.phase == "running":
            incident = Incident("a node was lost", "node", -1, node, -1, text, text, self.state.stop_asked)
            yield from self._end_attempt(incident, now, silent_seconds=silent)

    def _overdue_ranks(self, now: float) -> Iterator[Action]:
        waited = self.state.incident
        if waited is not None and self._kill_at is not None:
            if now >= self._kill_at and not self._misses_node():
                yield from self._end_attempt(waited, now)
            return
        if is_partial(self.state, self._plan.world):
            return
        if self.state.turning and now >= self._turn_by:
            self.state.phase, self._since, self._repeats = "ending", now, 0
            yield StopRanks(rule="ranks did not end after their step", epoch=self.state.epoch)
            return
        sightings, where = self._sightings, (self.state.placement, self.state.exits)
        few = sightings.few(*where)
        if few and sightings.has_news:
            # looked at here, not at each beat: of 1,536 nodes 1,536 come in a second
            sightings.has_news = False
            self._deadlines.saw(few)
        if few and now >= self._compare_at:
            self._compare_at = now + _COMPARE_SECONDS
            yield from self._balanced(now)
        limit = self._plan.patience * _STOPPED_SECONDS
        overdue = {rank for rank, since in self._stopped_since.items() if now - since >= limit}
        stopped = [one for one in sightings.all(*where) if one.rank in overdue] if overdue else []
        if stopped:
            rank = stopped[0]
            text = f"rank {rank.rank} was stopped (SIGSTOP), pid {rank.pid}"
            incident = self._hang("a rank was stopped", "stopped", rank, text)
            idle = rank.idle_seconds + now - self._nodes[incident.node].heard_at
            yield from self._end_attempt(incident, now, idle_seconds=idle)
        elif few:
            yield from self._hung(few, now)

    def _misses_node(self) -> bool:
        """One of this attempt is not connected: it is about to be back, or to be given up, and then it is
        what its peers have missed."""
        placement = self.state.placement
        return any(number in placement and one.left_at is not None for number, one in self._nodes.items())

    def _balanced(self, now: float) -> Iterator[Action]:
        """Somebody may be slow; the attempt ends after a step where it pays to go on otherwise."""
        state = self.state
        if self._balance is None or state.turning or state.stop_asked:
            return
        seen = self._sightings.all(state.placement, state.exits)
        for action in self._balance.saw(seen, now, state.epoch, spares=self._has_spare):
            if isinstance(action, TurnRanks):
                steps = _TURN_STEPS * max(one.step_seconds for one in seen)
                self._turn_by = now + self._plan.patience * (_TURN_SECONDS + steps)
                state.turning, state.leaving = True, action.node
                state.shares = action.shares or state.shares
            yield action

    def _limit(self, seconds: float) -> float:
        """Of silence: never so short that the next beat is not yet due."""
        return max(_LEAST_SILENCE_SECONDS, seconds * self._plan.patience)

    def _hung(self, few: list[RankSeen], now: float) -> Iterator[Action]:
        """The stacks come first, and a moment later the end, unless it was none of a hang."""
        idle = min(one.idle_seconds for one in few)
        phase = self._deadlines.phase_of(few)
        limit = self._deadlines.limit(phase)
        if idle <= limit:
            self._kill_at = None
            return
        seen = self._sightings.all(self.state.placement, self.state.exits)
        suspicion = find_suspects(seen)
        if self._kill_at is None:
            self._kill_at = now + _DUMP_SECONDS
            evidence = {"idle_seconds": idle, "limit_seconds": limit, "phase": phase, "why": suspicion.why}
            ranks = suspicion.ranks
            yield DumpStacks(rule="no rank goes on", evidence=evidence, epoch=self.state.epoch, ranks=ranks)
        elif now >= self._kill_at:
            rank = next(one for one in seen if one.rank == suspicion.ranks[0])
            text = f"{told_ranks(suspicion.ranks)} hung: {suspicion.why} (stacks in the log)"
            incident = self._hang("no rank goes on", "hang", rank, text)
            yield from self._end_attempt(incident, now, idle_seconds=idle, limit_seconds=limit, phase=phase)

    def _hang(self, rule: str, cause: str, one: RankSeen, text: str) -> Incident:
        node = self._node_of(one.rank)
        return Incident(rule, cause, one.rank, node, one.step, text, text, self.state.stop_asked)

    def _node_of(self, rank: int) -> int:
        return next(node for node, ranks in self.state.placement.items() if rank in ranks)

    # What comes next

    def _go_on(self, now: float) -> Iterator[Action]:
        state = self.state
        all_gone = len(state.exits) == self._plan.world
        if state.phase == "running" and all_gone and state.incident is not None:
            yield from self._end_attempt(state.incident, now)
        if state.phase in ("running", "ending") and all_gone:
            yield from self._judge(now)
        if state.phase != "gathering":
            return
        if state.stop_asked:
            yield self._end_run("a stop was asked for", "interrupted", "")
            return
        there = sorted(self.nodes) if len(self._nodes) >= self._plan.nodes else []
        if len(there) < self._plan.nodes:
            self._enough_at = None
        elif not self._is_early(there, now):
            yield self._start(there, now)

    def _is_early(self, there: list[int], now: float) -> bool:
        """At the very start a spare that came first takes nobody's place."""
        self._enough_at = now if self._enough_at is None else self._enough_at
        meant = self.state.placement or set(range(self._plan.nodes)) <= set(there)
        return not meant and now - self._enough_at < self._plan.late_seconds * self._plan.patience

    def _start(self, there: list[int], now: float) -> StartAttempt:
        """On the nodes of the last attempt that are there; where one is not, a spare takes its place, so that
        no rank of another moves."""
        state, plan = self.state, self._plan
        before = list(state.placement) or there[: plan.nodes]
        others = [number for number in there if number not in before]
        filled = [number if number in there else others.pop(0) for number in before]
        chosen, each = self._numbers.order(filled, others)[: plan.nodes], plan.world // plan.nodes
        placement = {
            number: tuple(range(place * each, (place + 1) * each)) for place, number in enumerate(chosen)
        }
        if list(placement) != list(state.placement):  # others may be slow there, or nobody
            state.shares = ()
        rule = "ranks ended as they were asked to" if state.turning else "all nodes are there"
        state.placement, state.turning, state.leaving = placement, False, -1
        state.epoch, state.phase, state.exits, state.incident = state.epoch + 1, "running", {}, None
        self._numbers.begin()
        self._since, self._kill_at, self._stopped_since = now, None, {}
        self._sightings = Sightings()
        if self._balance is not None:
            self._balance.begin(placement, state.shares, now)
        return StartAttempt(
            rule=rule,
            epoch=state.epoch,
            placement=dict(placement),
            again=state.epoch > plan.first_epoch,
            newest_step=state.newest_step,
            skipped_steps=state.skipped_steps,
            shares=state.shares,
        )

    def _judge(self, now: float) -> Iterator[Action]:
        """All ranks are gone."""
        yield from self._compare_last()
        state = self.state
        if state.incident is None and not state.stop_asked and not self._turned:
            yield from self._carry_out(self._numbers.passed())
        incident = state.incident
        if incident is None and self._turned:
            state.phase, self._since = "gathering", now
            yield from self._give_way()
        elif incident is None or (state.stop_asked and not incident.after_stop):
            outcome: Outcome = "interrupted" if state.stop_asked else "finished"
            yield self._end_run("all ranks are gone", outcome, "")
        elif incident.after_stop:
            yield self._end_run("a fault after a stop was asked for", "failed", incident.text)
        elif (rule := self._is_hopeless(incident)) is not None:
            yield self._end_run(rule, "failed", incident.text)
        elif incident.cause == NOT_FINITE:
            state.phase, self._since = "gathering", now
            yield from self._carry_out(self._numbers.judge(incident, len(self.nodes)))
        else:
            state.phase, self._since = "gathering", now
            yield from self._swap(incident)

    @property
    def _turned(self) -> bool:
        """The ranks ended because they were asked to, and not as the run was done."""
        state = self.state
        return state.turning and not state.stop_asked and any(state.exits.values())

    def _give_way(self) -> Iterator[Action]:
        node = self.state.leaving
        if self._has_spare and node in self.nodes:
            yield self._evict(node, "a node is slow, and a spare is there")

    def _swap(self, incident: Incident) -> Iterator[Action]:
        """A spare stands ready, and another try on the same node could only cost more than it does."""
        node, cause = incident.node, incident.cause
        again = self.state.repeats[incident.signature] > 1 and cause not in OF_THE_USER
        again |= cause == CORRUPTION and self.state.wrong_on.get(node, 0) > 1
        likely = again or cause in OF_THE_NODE
        if likely and self._has_spare and node in self.nodes:
            yield self._evict(
                node, "the node may be the cause, and a spare is there", cause=cause, again=again
            )

    def _is_hopeless(self, incident: Incident) -> str | None:
        """The rule by which it makes no sense to begin again."""
        state = self.state
        wrong = incident.cause == CORRUPTION
        if self._numbers.count(incident) if wrong else state.best_step > state.fault_step:
            state.repeats = {}
        state.fault_step = state.best_step
        count = state.repeats[incident.signature] = state.repeats.get(incident.signature, 0) + 1
        if incident.cause == "input":
            return "bad input"
        if count > self._plan.restarts:
            return "the same fault came too often without progress"
        if incident.cause in OF_THE_USER and count > 1:
            return "the same error of the program came twice at the same step"
        return None

    def _end_run(self, rule: str, outcome: Outcome, reason: str) -> EndRun:
        self.state.phase, self.state.outcome, self.state.reason = "over", outcome, reason
        return EndRun(rule=rule, outcome=outcome, reason=reason)
