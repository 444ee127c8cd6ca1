"""Selects the nodes of the next attempt and their ranks, and evicts nodes. Pure.

connected ──► usable ──► preferred ──► nodes of the attempt      the others are spares
               │ no link or device is down that ranks need
               └ the doctor did not find it unfit, or it already has ranks

Placement keeps each rank where its snapshot is, if it can:

full       before     connected  next
0 1 2 3    0 1 2 3    0 2 3 4      0 4 2 3    as many nodes: no rank of another node moves
0 1 2 3    0 1 2 3    1 2          2 1        fewer, two a replica: each has the half that it had
0 1 2 3    2 1        0 1 2 3      0 1 2 3    more: all in their old places
0 1 2      0 4        0 1 2 4      0 4 1      nodes that have the state come first
"""

from collections.abc import Sequence

from myriad.comm.attempt_layout import AS_THE_JOB, AttemptLayout
from myriad.supervise.policy.fitness import Fitness
from myriad.supervise.policy.health import Health
from myriad.supervise.policy.membership import Membership, machine_of
from myriad.supervise.policy.policy_actions import Evict, EvictionCause
from myriad.supervise.policy.run_state import RunPlan, RunState

__all__ = ["NodeSelection"]


class NodeSelection:
    """Selects nodes for the attempts of a run."""

    def __init__(
        self, plan: RunPlan, state: RunState, membership: Membership, fitness: Fitness, health: Health
    ) -> None:
        self._plan, self._state, self._membership = plan, state, membership
        self._fitness, self._health = fitness, health

    @property
    def needed(self) -> int:
        """Number of nodes of the attempt; before the first attempt, of the job."""
        return len(self._state.placement) or self._plan.nodes

    @property
    def is_first(self) -> bool:
        """Whether no rank has been started yet."""
        return self._state.epoch < self._plan.first_epoch

    @property
    def usable(self) -> list[int]:
        """Connected nodes on which ranks can run now. A node that the doctor found unfit is included only if
        it has ranks."""
        had, first = self._state.placement, self.is_first
        there = (node for node in sorted(self._membership.there) if self._health.why_useless(node) is None)
        return [node for node in there if node in had or self._fitness.may_start(node, first=first)]

    @property
    def preferred(self) -> list[int]:
        """Usable nodes without unfit or unsound ones, if enough others are connected."""
        usable = self.usable
        sound = [node for node in usable if self._health.unsound(node) is None]
        for better in ([node for node in sound if not self._fitness.is_unfit(node)], sound):
            if len(better) >= self._plan.nodes:
                return better
        fit = [node for node in usable if not self._fitness.is_unfit(node)]
        return fit if len(fit) >= self._plan.nodes else usable

    @property
    def has_spare(self) -> bool:
        """Whether there is a healthy spare that is not needed to replace a missing node."""
        there, placed = self._membership.there, self._state.placement
        if not placed:
            return len(self.usable) > self.needed
        spares = [one for one in self.usable if one not in placed and self._health.unsound(one) is None]
        return len(spares) > sum(node not in there for node in placed)

    def fitting(self, waited_seconds: float) -> AttemptLayout | None:
        """Return the layout of the next attempt on the connected nodes; ``None``: too few are connected."""
        plan, state, fewer = self._plan, self._state, self._plan.fewer
        if len(self._membership) >= plan.nodes and len(self.usable) >= plan.nodes:
            return AS_THE_JOB
        if fewer is None or not state.placement or len(self._membership) < fewer.least_nodes:
            return None
        return fewer.instead(state.layout, len(self.usable), waited_seconds, state.too_few)

    def places(self, there: Sequence[int], layout: AttemptLayout) -> tuple[list[int], list[int]]:
        """Return the nodes of an attempt in the order of their ranks, and the rest. Nodes of the last attempt
        keep their places."""
        state, plan, fewer = self._state, self._plan, self._plan.fewer
        needed = plan.nodes_of(layout)
        before = list(state.placement) or list(there[:needed])
        per_replica = 1 if fewer is None else fewer.nodes_per_replica
        return place_nodes(state.full_places, before, there, needed, per_replica)

    def evict(self, node: int, rule: str, accused: EvictionCause = "", **evidence: object) -> Evict:
        """Evict a node. If ``accused`` names a cause, neither the node nor its machine takes part again."""
        known = self._membership.known
        machine = machine_of(node, known) if accused else ""
        if accused and (name := machine or (known[node].by if node in known else "")):
            self._state.left_out[name] = f"node {node} was evicted from this run: {rule}"
        self._membership.forget(node)
        return Evict(rule=rule, evidence=dict(evidence), node=node, accused=accused, machine=machine)


def place_nodes(
    full: Sequence[int], before: Sequence[int], there: Sequence[int], needed: int, per_replica: int
) -> tuple[list[int], list[int]]:
    """Return ``needed`` nodes in the order of their ranks, and the remaining ones. ``full``: nodes of the
    last attempt with all replicas. ``before``: nodes of the last attempt. ``per_replica``: nodes that a
    replica fills. Most of the state that a node's ranks load is then in its own memory."""
    if needed == len(before):
        others = [one for one in there if one not in before]
        return [one if one in there else others.pop(0) for one in before], others
    place_of = {one: place for nodes in (before, full) for place, one in enumerate(nodes)}
    present = set(there)
    waiting = [one for one in dict.fromkeys((*place_of, *there)) if one in present]
    each, columns = needed // per_replica, list[list[int]]()
    for part in range(per_replica):
        fits = [one for one in waiting if one in place_of and place_of[one] % per_replica == part]
        columns.append(fits[:each])
        taken = set(columns[-1])
        waiting = [one for one in waiting if one not in taken]
    for column in columns:
        missing = each - len(column)
        column += waiting[:missing]
        waiting = waiting[missing:]
        column.sort(key=lambda one: place_of.get(one, len(place_of)))
    return [columns[place % per_replica][place // per_replica] for place in range(needed)], waiting
