"""A person wants a node to leave: whether that can be, and what follows. Pure.

    myriad evict RUN NODE ──► driver ──► ranks end after their step ──► a spare takes the node's place

Nothing is lost by it: all ranks begin again from the snapshot of that step in memory. Where no spare stands
by the run would wait, so that is only done when the person says that it is meant.
"""

from collections.abc import Collection, Iterable, Mapping

from myriad.resilience.decide.actions import Accused
from myriad.resilience.decide.state import State
from myriad.resilience.facts import EvictionAsked, NodeJoined

__all__ = [
    "BY_A_PERSON",
    "RULES_OF_LEAVING",
    "evidence_of",
    "machine_of",
    "what_follows",
    "why_left_out",
    "why_not",
]

BY_A_PERSON = "asked for by a person"
"""The rule."""
RULES_OF_LEAVING: Mapping[Accused, str] = {
    "slow": "a node is slow, and a spare is there",
    "link": "a link of the node keeps going down, and a spare is there",
    "device": "a device of the node fails, and a spare is there",
    "doctor": "the doctor found a node unfit, and a spare is there",
    "person": BY_A_PERSON,
}
_MOST_TOLD = 16


def machine_of(node: int, nodes: Mapping[int, NodeJoined]) -> str:
    """Of a node that has it for itself; empty: nobody could tell which node of it is bad, or it has none."""
    name = nodes[node].machine if node in nodes else ""
    return "" if any(one.machine == name for number, one in nodes.items() if number != node) else name


def why_left_out(state: State, joined: NodeJoined) -> str:
    """Of the run, since it was evicted as the cause of something; empty: it is not."""
    return (
        state.left_out.get(joined.by) or (state.left_out.get(joined.machine) if joined.machine else "") or ""
    )


def evidence_of(asked: EvictionAsked) -> dict[str, object]:
    """Who, and why."""
    return {"who": asked.who, **({"reason": asked.reason} if asked.reason else {})}


def why_not(
    asked: EvictionAsked, state: State, nodes: Mapping[int, NodeJoined], usable: Collection[int], needed: int
) -> str:
    """What keeps it from being done, for the person; empty: nothing. ``nodes``: those that are there;
    ``usable``: of them those on which ranks may be; ``needed``: as many must be."""
    node, leaving = asked.node, state.asked
    if state.phase == "over":
        return "the run is over"
    if state.stop_asked:
        return "the run saves and stops, as it was asked to"
    if node not in nodes and (node not in state.placement or state.phase == "gathering"):
        return f"no node of this run, which has {_told_nodes(state, nodes)}"
    if leaving is not None:
        return f"node {leaving.node} is about to leave, as {leaving.who} asked; ask again when ranks train"
    others = len(set(usable) - {node})
    if others < needed and not asked.anyway and (node in state.placement or state.phase == "gathering"):
        return "no spare stands by to take its place; --anyway: the run waits, or goes on with fewer replicas"
    return ""


def what_follows(
    asked: EvictionAsked, state: State, nodes: Mapping[int, NodeJoined], usable: Collection[int], needed: int
) -> str:
    """For the person, of what can be done."""
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


def _told_nodes(state: State, nodes: Mapping[int, NodeJoined]) -> str:
    at_work = sorted(nodes.keys() & state.placement.keys()) or sorted(nodes)
    spares = sorted(nodes.keys() - set(at_work))
    told = _list(_named(node, nodes) for node in at_work) or "none that is connected"
    return told + (f"; to spare: {_list(_named(node, nodes) for node in spares)}" if spares else "")


def _list(names: Iterable[str]) -> str:
    all_names = list(names)
    more = len(all_names) - _MOST_TOLD
    return ", ".join(all_names[:_MOST_TOLD]) + (f" and {more} more" if more > 0 else "")
