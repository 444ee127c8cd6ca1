"""Nodes that are to leave although nothing has failed: a person asks, or the doctor found them unfit. Pure.

A node without ranks leaves at once. One with ranks gives way to a spare after the step under way
(`myriad.resilience.decide.turns`), and nothing of the step is lost.
"""

from collections.abc import Iterator

from myriad.resilience.decide.actions import Action
from myriad.resilience.decide.evictions import BY_A_PERSON, RULES_OF_LEAVING, evidence_of, why_not
from myriad.resilience.decide.fitness import Fitness
from myriad.resilience.decide.presence import Presence
from myriad.resilience.decide.roster import Roster
from myriad.resilience.decide.state import State
from myriad.resilience.decide.turns import Turns
from myriad.resilience.facts import EvictionAsked, Examined

__all__ = ["Departures"]


class Departures:
    """Of one run."""

    def __init__(
        self, state: State, presence: Presence, fitness: Fitness, roster: Roster, turns: Turns
    ) -> None:
        self._state, self._presence, self._fitness = state, presence, fitness
        self._roster, self._turns = roster, turns

    def why_not(self, asked: EvictionAsked) -> str:
        """What keeps it from being done; empty: nothing."""
        roster = self._roster
        return why_not(asked, self._state, self._presence.there, roster.usable, roster.needed)

    def asked(self, asked: EvictionAsked, now: float) -> Iterator[Action]:
        """By a person."""
        state = self._state
        if self.why_not(asked):
            return
        if state.phase == "gathering" or asked.node not in state.placement:
            yield self._roster.evict(asked.node, BY_A_PERSON, "person", **evidence_of(asked))
            return
        state.asked, state.leaving, state.leaving_as = asked, asked.node, "person"
        if state.phase == "running" and not state.turning:
            yield self._turns.leave(asked.node, BY_A_PERSON, now, "person", **evidence_of(asked))

    def examined(self, examined: Examined, now: float) -> Iterator[Action]:
        """By the doctor."""
        state, node = self._state, examined.node
        has_ranks = state.phase in ("running", "ending") and node in state.placement
        yield from self._fitness.heard(examined, now, at_work=has_ranks)
        may_turn = state.phase == "running" and not state.turning and not state.stop_asked
        if has_ranks and may_turn and self._fitness.is_unfit(node) and self._roster.has_spare:
            yield self._turns.leave(node, RULES_OF_LEAVING["doctor"], now, "doctor")
