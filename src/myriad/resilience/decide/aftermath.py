"""What follows when all ranks of an attempt are gone: the run is over, or what changes before the next. Pure.

    no fault                        it is finished, or was turned or stopped as it was asked to
    a fault that nothing mends      it has failed: `ladder` says which
    numbers that are not finite     the step again, elsewhere, or without its batch: see `wrong_numbers`
    any other                       a spare for the node that may be the cause, layers as they fitted

Phases end here: the run is "gathering" or "over" when a judgement has been made.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from myriad.resilience.decide.actions import Action, EndRun, Evict, Outcome
from myriad.resilience.decide.evictions import BY_A_PERSON, RULES_OF_LEAVING, evidence_of
from myriad.resilience.decide.incidents import (
    CORRUPTION,
    MEMORY_FULL,
    NOT_FINITE,
    SPIKE,
    Incident,
)
from myriad.resilience.decide.ladder import accusation_of, count, is_of_the_node, why_hopeless
from myriad.resilience.decide.presence import Presence
from myriad.resilience.decide.roster import Roster
from myriad.resilience.decide.state import Plan, State
from myriad.resilience.decide.wrong_numbers import WrongNumbers

__all__ = ["Aftermath"]


class Aftermath:
    """Of the attempts of one run."""

    def __init__(
        self, plan: Plan, state: State, numbers: WrongNumbers, roster: Roster, presence: Presence
    ) -> None:
        self._plan, self._state, self._numbers = plan, state, numbers
        self._roster, self._presence = roster, presence

    def judge(self) -> Iterator[Action]:
        """All ranks are gone."""
        yield from self._compare_last()
        state = self._state
        if state.incident is None and not state.stop_asked and not self._turned:
            yield from self.carry_out(self._numbers.passed())
        incident = state.incident
        if incident is None and self._turned:
            state.phase = "gathering"
        elif incident is None or (state.stop_asked and not incident.after_stop):
            outcome: Outcome = "interrupted" if state.stop_asked else "finished"
            yield self.end_run("all ranks are gone", outcome, "")
        elif incident.after_stop:
            yield self.end_run("a fault after a stop was asked for", "failed", incident.text)
        elif (rule := self._why_hopeless(incident)) is not None:
            yield self.end_run(rule, "failed", incident.text)
        elif incident.cause == NOT_FINITE:
            state.phase = "gathering"
            yield from self.carry_out(self._numbers.judge(incident, len(self._presence.there)))
        else:
            state.phase = "gathering"
            if incident.cause == SPIKE:
                self._numbers.go_back_before(incident.step)
            if incident.cause in MEMORY_FULL and state.layout.partition is not None:
                state.layout, state.next_layout = replace(state.layout, partition=None), None
                state.layers_stay = True
            yield from self._swap(incident)
        if state.phase == "gathering" and (incident is None or state.asked is not None):
            yield from self._give_way()

    def carry_out(self, actions: Iterable[Action]) -> Iterator[Action]:
        """What follows from wrong numbers."""
        for action in actions:
            if isinstance(action, Evict):
                yield self._roster.evict(action.node, action.rule, action.accused)
            elif isinstance(action, EndRun):
                yield self.end_run(action.rule, action.outcome, action.reason)
            else:
                yield action

    def end_run(self, rule: str, outcome: Outcome, reason: str) -> EndRun:
        self._state.phase, self._state.outcome, self._state.reason = "over", outcome, reason
        return EndRun(rule=rule, outcome=outcome, reason=reason)

    def _compare_last(self) -> Iterator[Action]:
        """What ranks that have ended had told nobody yet."""
        known = self._state.incident
        if (known is None or known.cause != CORRUPTION) and (found := self._numbers.compare()) is not None:
            incident, evidence = found
            yield incident.blame(**evidence)
            self._state.incident = known or incident

    @property
    def _turned(self) -> bool:
        """The ranks ended because they were asked to, and not as the run was done."""
        state = self._state
        return state.turning and not state.stop_asked and any(state.exits.values())

    def _give_way(self) -> Iterator[Action]:
        node, asked = self._state.leaving, self._state.asked
        if asked is not None:
            if node in self._presence and (self._roster.has_spare or asked.anyway):
                yield self._roster.evict(node, BY_A_PERSON, "person", **evidence_of(asked))
        elif self._roster.has_spare and node in self._presence.there:
            yield self._roster.evict(node, RULES_OF_LEAVING[self._state.leaving_as], self._state.leaving_as)

    def _swap(self, incident: Incident) -> Iterator[Action]:
        """A spare stands ready, and another try on the same node could only cost more than it does."""
        likely, again = is_of_the_node(self._state, incident)
        if likely and self._roster.has_spare and incident.node in self._presence.there:
            rule = "the node may be the cause, and a spare is there"
            accused = accusation_of(incident.cause)
            yield self._roster.evict(incident.node, rule, accused, cause=incident.cause, again=again)

    def _why_hopeless(self, incident: Incident) -> str | None:
        state = self._state
        wrong = incident.cause == CORRUPTION
        if state.layout.dp is not None and incident.cause in MEMORY_FULL:
            state.too_few = max(state.too_few, state.layout.dp)
        progressed = self._numbers.count(incident) if wrong else state.best_step > state.fault_step
        count(state, incident, progressed=progressed)
        return why_hopeless(state, incident, self._plan.restarts)
