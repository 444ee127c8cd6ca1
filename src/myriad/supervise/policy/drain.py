"""Drains nodes that leave although nothing has failed: a person asked, or the doctor found them unfit. Pure.

    myriad evict RUN NODE ──► driver ──► ranks end after their step ──► a spare takes the node's place

A node without ranks leaves at once. A node with ranks is replaced by a spare after the step in progress
(`myriad.supervise.policy.step_restarts`). No step is lost: all ranks restart from the snapshot of that step
in memory. Without a spare the run would wait, so an eviction is then refused unless the person asks for it
explicitly (``--anyway``).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping

from myriad.supervise.messages import EvictionAsked, NodeJoined
from myriad.supervise.observations import Examined
from myriad.supervise.policy.fitness import Fitness
from myriad.supervise.policy.membership import Membership
from myriad.supervise.policy.node_selection import NodeSelection
from myriad.supervise.policy.policy_actions import BY_A_PERSON, RULES_OF_LEAVING, PolicyAction, evidence_of
from myriad.supervise.policy.run_state import RunState
from myriad.supervise.policy.step_restarts import StepRestarts

__all__ = ["NodeDrain", "what_follows"]


class NodeDrain:
    """Drains nodes of a run, on request of a person or of the doctor."""

    def __init__(
        self,
        state: RunState,
        membership: Membership,
        fitness: Fitness,
        selection: NodeSelection,
        step_restarts: StepRestarts,
    ) -> None:
        self._state, self._membership, self._fitness = state, membership, fitness
        self._selection, self._step_restarts = selection, step_restarts

    def why_not(self, asked: EvictionAsked) -> str:
        """Return why a request cannot be fulfilled; empty if it can."""
        selection = self._selection
        return why_not(asked, self._state, self._membership.there, selection.usable, selection.needed)

    def asked(self, asked: EvictionAsked, now: float) -> Iterator[PolicyAction]:
        """Handle the request of a person."""
        state = self._state
        if self.why_not(asked):
            return
        if state.phase == "gathering" or asked.node not in state.placement:
            yield self._selection.evict(asked.node, BY_A_PERSON, "person", **evidence_of(asked))
            return
        state.asked, state.leaving, state.leaving_as = asked, asked.node, "person"
        if state.phase == "running" and not state.turning:
            yield self._step_restarts.leave(asked.node, BY_A_PERSON, now, "person", **evidence_of(asked))

    def examined(self, examined: Examined, now: float) -> Iterator[PolicyAction]:
        """Handle a verdict of the doctor."""
        state, node = self._state, examined.node
        has_ranks = state.phase in ("running", "ending") and node in state.placement
        yield from self._fitness.record(examined, now, at_work=has_ranks)
        may_turn = state.phase == "running" and not state.turning and not state.stop_asked
        if has_ranks and may_turn and self._fitness.is_unfit(node) and self._selection.has_spare:
            yield self._step_restarts.leave(node, RULES_OF_LEAVING["doctor"], now, "doctor")


_MOST_LISTED = 16


def why_not(
    asked: EvictionAsked,
    state: RunState,
    nodes: Mapping[int, NodeJoined],
    usable: Collection[int],
    needed: int,
) -> str:
    """Return why a person's request cannot be fulfilled; empty if it can. ``nodes``: connected nodes.
    ``usable``: those that may have ranks. ``needed``: number of nodes that the run needs."""
    node, leaving = asked.node, state.asked
    if state.phase == "over":
        return "the run is over"
    if state.stop_asked:
        return "the run saves and stops, as it was asked to"
    if node not in nodes and (node not in state.placement or state.phase == "gathering"):
        return f"no node of this run, which has {_list_nodes(state, nodes)}"
    if leaving is not None:
        return f"node {leaving.node} is about to leave, as {leaving.who} asked; ask again when ranks train"
    others = len(set(usable) - {node})
    if others < needed and not asked.anyway and (node in state.placement or state.phase == "gathering"):
        return "no spare stands by to take its place; --anyway: the run waits, or goes on with fewer replicas"
    return ""


def what_follows(
    asked: EvictionAsked,
    state: RunState,
    nodes: Mapping[int, NodeJoined],
    usable: Collection[int],
    needed: int,
) -> str:
    """Describe for the person what an eviction does."""
    name = _named(asked.node, nodes)
    if asked.node not in state.placement:
        return f"{name} leaves the run; it had no ranks"
    when = "when the step under way is done" if state.phase == "running" else "at once"
    if len(set(usable) - {asked.node}) < needed:
        return f"{name} leaves {when}; then the run waits for another, or goes on with fewer"
    return f"{name} gives way to a spare {when}; no step is lost"


def _named(node: int, nodes: Mapping[int, NodeJoined]) -> str:
    host = nodes[node].by.rpartition(":")[0] if node in nodes else ""
    return f"node {node} ({host})" if host else f"node {node}"


def _list_nodes(state: RunState, nodes: Mapping[int, NodeJoined]) -> str:
    at_work = sorted(nodes.keys() & state.placement.keys()) or sorted(nodes)
    spares = sorted(nodes.keys() - set(at_work))
    listed = _list(_named(node, nodes) for node in at_work) or "none that is connected"
    return listed + (f"; to spare: {_list(_named(node, nodes) for node in spares)}" if spares else "")


def _list(names: Iterable[str]) -> str:
    all_names = list(names)
    more = len(all_names) - _MOST_LISTED
    return ", ".join(all_names[:_MOST_LISTED]) + (f" and {more} more" if more > 0 else "")
