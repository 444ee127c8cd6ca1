"""Restarts ranks at a step boundary, without a fault, for an attempt that is better. Pure.

    a node may fail soon                   a spare in its place
    nodes are there for more replicas      as many replicas as they hold
    a rank or node is slow                 other micro-batches, other cuts, or a spare

No step is lost: all ranks finish the step, with a snapshot in memory. Ranks that do not end in time are
killed.
"""

from collections.abc import Iterator

from myriad.supervise.policy.elastic import MORE, Regrowth
from myriad.supervise.policy.hang_detector import HangDetector
from myriad.supervise.policy.health import Health
from myriad.supervise.policy.node_selection import NodeSelection
from myriad.supervise.policy.policy_actions import (
    RULES_OF_LEAVING,
    EvictionCause,
    PolicyAction,
    RestartAtStep,
)
from myriad.supervise.policy.rebalance import Rebalancer
from myriad.supervise.policy.run_state import RunPlan, RunState

__all__ = ["StepRestarts"]

_COMPARE_SECONDS = 1.0
"""Seconds between two comparisons, because each one looks at all ranks."""
_TURN_SECONDS, _TURN_STEPS = 30.0, 3
"""Seconds, plus a number of step times, after which ranks that did not end after their step are killed."""


class StepRestarts:
    """Decides when the ranks of a run restart at a step boundary."""

    def __init__(
        self,
        plan: RunPlan,
        state: RunState,
        selection: NodeSelection,
        watch: HangDetector,
        health: Health,
        now: float,
    ) -> None:
        self._plan, self._state, self._selection = plan, state, selection
        self._watch, self._health = watch, health
        self._balance = None if plan.work is None else Rebalancer(plan.work, plan.patience)
        self._growth = None if plan.fewer is None else Regrowth(plan.fewer, plan.patience, now)
        self._late_at = now + _TURN_SECONDS * plan.patience
        self._compare_at = now

    def take_up(self, now: float) -> None:
        """Continue an attempt that an earlier driver has left."""
        state = self._state
        if self._balance is not None:
            if state.layers_stay:
                self._balance.keep_layers()
            self._balance.begin(state.placement, state.layout, now, state.moved)

    def begin(self, now: float) -> None:
        """Begin a new attempt."""
        self.take_up(now)
        if self._growth is not None:
            self._growth.begin(now)

    def stand_still(self) -> None:
        """Compare no ranks until the next attempt: the division of work in this one is unknown."""
        if self._balance is not None:
            self._balance.stand_still()

    def is_late(self, now: float) -> bool:
        """Return whether the time in which ranks must end after their step has passed."""
        return self._state.turning and now >= self._late_at

    def due(self, now: float) -> Iterator[PolicyAction]:
        """Look for a better attempt at intervals; yield the restart that leads to it."""
        if now < self._compare_at or not self._watch.few():
            return
        self._compare_at = now + _COMPARE_SECONDS
        if not (self._state.turning or self._state.stop_asked):
            yield from self._replaced(now) or self._grown(now) or self._balanced(now)

    def leave(
        self, node: int, rule: str, now: float, leaving_as: EvictionCause, **evidence: object
    ) -> RestartAtStep:
        """Replace a node by a spare after the step in progress. ``leaving_as``: why the node leaves."""
        turn = RestartAtStep(rule=rule, evidence=dict(evidence), epoch=self._state.epoch, node=node)
        return self._turn(turn, now, leaving_as)

    def _replaced(self, now: float) -> list[RestartAtStep]:
        """Replace a node that may fail soon, before it fails."""
        failing = ((node, self._health.unsound(node)) for node in self._state.placement)
        node, why = next((one for one in failing if one[1] is not None), (-1, None))
        if why is None or not self._selection.has_spare:
            return []
        return [self.leave(node, RULES_OF_LEAVING[why], now, why)]

    def _grown(self, now: float) -> list[RestartAtStep]:
        """Restart with more replicas if nodes for them are connected."""
        state, fewer, growth = self._state, self._plan.fewer, self._growth
        if fewer is None or growth is None or state.layout.dp is None:
            return []
        found = fewer.largest(len(self._selection.usable), state.too_few) or state.layout
        before, after = state.layout.dp, fewer.replicas(found)
        if not growth.observe(self._watch.few(), now, before, after):
            return []
        evidence = {"replicas": [before, after]}
        return [self._turn(RestartAtStep(rule=MORE, evidence=evidence, epoch=state.epoch, layout=found), now)]

    def _balanced(self, now: float) -> Iterator[PolicyAction]:
        """Compare ranks; restart after the step in progress if another division of work pays."""
        if self._balance is None:
            return
        seen, epoch = self._watch.all(), self._state.epoch
        for action in self._balance.observe(seen, now, epoch, spares=self._selection.has_spare):
            yield self._turn(action, now, "slow") if isinstance(action, RestartAtStep) else action

    def _turn(self, action: RestartAtStep, now: float, leaving_as: EvictionCause = "") -> RestartAtStep:
        state = self._state
        steps = _TURN_STEPS * max([one.step_seconds for one in self._watch.few()], default=0.0)
        self._late_at = now + self._plan.patience * (_TURN_SECONDS + steps)
        state.turning, state.leaving, state.leaving_as = True, action.node, leaving_as
        state.next_layout = action.layout
        if action.layout is not None:
            state.moved = action.moved
        return action
