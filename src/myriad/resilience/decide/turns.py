"""When ranks that train well end after a step all the same, for an attempt that is better. Pure.

    a node may fail soon            a spare in its place
    nodes are there for more        as many replicas as they hold
    somebody is slow                other shares, other cuts, or a spare

Nothing of the step is lost: all ranks end it, with a snapshot in memory. Who does not end is killed.
"""

from collections.abc import Iterator

from myriad.resilience.decide.actions import Accused, Action, TurnRanks
from myriad.resilience.decide.balance import Balance
from myriad.resilience.decide.evictions import RULES_OF_LEAVING
from myriad.resilience.decide.fewer import MORE, Growth
from myriad.resilience.decide.health import Health
from myriad.resilience.decide.roster import Roster
from myriad.resilience.decide.state import Plan, State
from myriad.resilience.decide.watch import Watch

__all__ = ["Turns"]

_COMPARE_SECONDS = 1.0
"""How often ranks are compared: each look is at all of them."""
_TURN_SECONDS, _TURN_STEPS = 30.0, 3
"""After which ranks that were to end after a step are killed."""


class Turns:
    """Of one run."""

    def __init__(
        self, plan: Plan, state: State, roster: Roster, watch: Watch, health: Health, now: float
    ) -> None:
        self._plan, self._state, self._roster = plan, state, roster
        self._watch, self._health = watch, health
        self._balance = None if plan.work is None else Balance(plan.work, plan.patience)
        self._growth = None if plan.fewer is None else Growth(plan.fewer, plan.patience, now)
        self._late_at = now + _TURN_SECONDS * plan.patience
        self._compare_at = now

    def take_up(self, now: float) -> None:
        """The attempt that an earlier driver has left."""
        state = self._state
        if self._balance is not None:
            if state.layers_stay:
                self._balance.keep_layers()
            self._balance.begin(state.placement, state.layout, now, state.moved)

    def begin(self, now: float) -> None:
        """An attempt."""
        self.take_up(now)
        if self._growth is not None:
            self._growth.begin(now)

    def stand_still(self) -> None:
        """It is not known who has how much of this attempt: nobody is compared until the next one."""
        if self._balance is not None:
            self._balance.stand_still()

    def is_late(self, now: float) -> bool:
        """Ranks were to end after a step, and have not."""
        return self._state.turning and now >= self._late_at

    def due(self, now: float) -> Iterator[Action]:
        """What would be better, looked at now and then."""
        if now < self._compare_at or not self._watch.few():
            return
        self._compare_at = now + _COMPARE_SECONDS
        if not (self._state.turning or self._state.stop_asked):
            yield from self._replaced(now) or self._grown(now) or self._balanced(now)

    def leave(self, node: int, rule: str, now: float, leaving_as: Accused, **evidence: object) -> TurnRanks:
        """A node is to give way after the step; ``leaving_as``: what it is accused of."""
        turn = TurnRanks(rule=rule, evidence=dict(evidence), epoch=self._state.epoch, node=node)
        return self._turn(turn, now, leaving_as)

    def _replaced(self, now: float) -> list[TurnRanks]:
        """A node that may fail gives way before it does."""
        failing = ((node, self._health.unsound(node)) for node in self._state.placement)
        node, why = next((one for one in failing if one[1] is not None), (-1, None))
        if why is None or not self._roster.has_spare:
            return []
        return [self.leave(node, RULES_OF_LEAVING[why], now, why)]

    def _grown(self, now: float) -> list[TurnRanks]:
        """There are nodes for more replicas again."""
        state, fewer, growth = self._state, self._plan.fewer, self._growth
        if fewer is None or growth is None or state.layout.dp is None:
            return []
        found = fewer.largest(len(self._roster.usable), state.too_few) or state.layout
        before, after = state.layout.dp, fewer.replicas(found)
        if not growth.saw(self._watch.few(), now, before, after):
            return []
        evidence = {"replicas": [before, after]}
        return [self._turn(TurnRanks(rule=MORE, evidence=evidence, epoch=state.epoch, layout=found), now)]

    def _balanced(self, now: float) -> Iterator[Action]:
        """Somebody may be slow; the attempt ends after a step where it pays to go on otherwise."""
        if self._balance is None:
            return
        seen, epoch = self._watch.all(), self._state.epoch
        for action in self._balance.saw(seen, now, epoch, spares=self._roster.has_spare):
            yield self._turn(action, now, "slow") if isinstance(action, TurnRanks) else action

    def _turn(self, action: TurnRanks, now: float, leaving_as: Accused = "") -> TurnRanks:
        state = self._state
        steps = _TURN_STEPS * max([one.step_seconds for one in self._watch.few()], default=0.0)
        self._late_at = now + self._plan.patience * (_TURN_SECONDS + steps)
        state.turning, state.leaving, state.leaving_as = True, action.node, leaving_as
        state.next_layout = action.layout
        if action.layout is not None:
            state.moved = action.moved
        return action
