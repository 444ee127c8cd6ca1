"""On which nodes the next attempt runs, and who leaves the run. Pure.

there ──► usable ──► preferred ──► places of the attempt      what is left over: spares
           │ no link or device that nothing can run with
           └ not found unfit, unless it has ranks
"""

from collections.abc import Sequence

from myriad.comm.attempt_layout import AS_THE_JOB, AttemptLayout
from myriad.resilience.decide.actions import Accused, Evict
from myriad.resilience.decide.evictions import machine_of
from myriad.resilience.decide.fitness import Fitness
from myriad.resilience.decide.health import Health
from myriad.resilience.decide.places import place_nodes
from myriad.resilience.decide.presence import Presence
from myriad.resilience.decide.state import Plan, State

__all__ = ["Roster"]


class Roster:
    """Of one run."""

    def __init__(
        self, plan: Plan, state: State, presence: Presence, fitness: Fitness, health: Health
    ) -> None:
        self._plan, self._state, self._presence = plan, state, presence
        self._fitness, self._health = fitness, health

    @property
    def needed(self) -> int:
        """Nodes of the attempt; before the first, those of the job."""
        return len(self._state.placement) or self._plan.nodes

    @property
    def is_first(self) -> bool:
        """No rank has been started yet."""
        return self._state.epoch < self._plan.first_epoch

    @property
    def usable(self) -> list[int]:
        """Nodes that are there, but not those that the doctor found unfit, unless they have ranks, nor any on
        which nothing can run now."""
        had, first = self._state.placement, self.is_first
        there = (node for node in sorted(self._presence.there) if self._health.why_useless(node) is None)
        return [node for node in there if node in had or self._fitness.may_start(node, first=first)]

    @property
    def preferred(self) -> list[int]:
        """The same, and none that is unfit or unsound where there are enough others."""
        usable = self.usable
        sound = [node for node in usable if self._health.unsound(node) is None]
        for better in ([node for node in sound if not self._fitness.is_unfit(node)], sound):
            if len(better) >= self._plan.nodes:
                return better
        fit = [node for node in usable if not self._fitness.is_unfit(node)]
        return fit if len(fit) >= self._plan.nodes else usable

    @property
    def has_spare(self) -> bool:
        """A sound one, that nobody who is missing needs."""
        there, placed = self._presence.there, self._state.placement
        if not placed:
            return len(self.usable) > self.needed
        spares = [one for one in self.usable if one not in placed and self._health.unsound(one) is None]
        return len(spares) > sum(node not in there for node in placed)

    def fitting(self, waited_seconds: float) -> AttemptLayout | None:
        """In which the next attempt begins on the nodes that are there; ``None``: they are too few."""
        plan, state, fewer = self._plan, self._state, self._plan.fewer
        if len(self._presence) >= plan.nodes and len(self.usable) >= plan.nodes:
            return AS_THE_JOB
        if fewer is None or not state.placement or len(self._presence) < fewer.least_nodes:
            return None
        return fewer.instead(state.layout, len(self.usable), waited_seconds, state.too_few)

    def places(self, there: Sequence[int], layout: AttemptLayout) -> tuple[list[int], list[int]]:
        """Nodes in the order of the ranks of an attempt, those of the last one first, and who is left."""
        state, plan, fewer = self._state, self._plan, self._plan.fewer
        needed = plan.nodes_of(layout)
        before = list(state.placement) or list(there[:needed])
        per_replica = 1 if fewer is None else fewer.nodes_per_replica
        return place_nodes(state.full_places, before, there, needed, per_replica)

    def evict(self, node: int, rule: str, accused: Accused = "", **evidence: object) -> Evict:
        """``accused``: of what it is the cause; then neither it nor its machine takes part again."""
        known = self._presence.known
        machine = machine_of(node, known) if accused else ""
        if accused and (name := machine or (known[node].by if node in known else "")):
            self._state.left_out[name] = f"node {node} was evicted from this run: {rule}"
        self._presence.forget(node)
        return Evict(rule=rule, evidence=dict(evidence), node=node, accused=accused, machine=machine)
