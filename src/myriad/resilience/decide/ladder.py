"""What an incident asks for: the cheapest step that suffices. Pure.

all ranks anew, where they were
  │ the node may be the cause, and a spare is there
the spare in its place; what others lost is with their peers, or stored
  │ nobody stands by, and nobody comes
fewer replicas (`myriad.resilience.decide.fewer`)
  │ the same again and again, or the program's own fault
the end of the run, with the reason
"""

from myriad.errors import NEXT_ATTEMPT_SKIPS
from myriad.resilience.decide.actions import Accused
from myriad.resilience.decide.incidents import CORRUPTION, OF_THE_NODE, OF_THE_USER, Incident
from myriad.resilience.decide.state import State

__all__ = ["accusation_of", "count", "is_of_the_node", "why_hopeless"]


def count(state: State, incident: Incident, *, progressed: bool) -> None:
    """One more of its kind; ``progressed``: since the last one, so that earlier ones count no more."""
    if progressed:
        state.repeats = {}
    state.fault_step = state.best_step
    state.repeats[incident.signature] = state.repeats.get(incident.signature, 0) + 1


def why_hopeless(state: State, incident: Incident, restarts: int) -> str | None:
    """The rule by which it makes no sense to begin again; ``None``: it does."""
    repeats = state.repeats[incident.signature]
    if incident.cause == "input":
        return "bad input"
    if incident.cause == "unsaved":
        return "the last checkpoint was not stored in checkpoint.timeout_seconds"
    if incident.cause == "state":
        return "no state can be loaded: a person has to decide"
    if incident.cause == "data" and not incident.last_line.endswith(NEXT_ATTEMPT_SKIPS):
        return "the corpus is damaged"
    if repeats > restarts:
        return "the same fault came too often without progress"
    if incident.cause in OF_THE_USER and repeats > 1:
        return "the same error of the program came twice at the same step"
    return None


def is_of_the_node(state: State, incident: Incident) -> tuple[bool, bool]:
    """Whether another node may cure it, and whether that is because it has come again."""
    again = state.repeats[incident.signature] > 1 and incident.cause not in OF_THE_USER
    again |= incident.cause == CORRUPTION and state.wrong_on.get(incident.node, 0) > 1
    return again or incident.cause in OF_THE_NODE, again


def accusation_of(cause: str) -> Accused:
    """Of a node that is evicted for an incident of this cause."""
    known: dict[str, Accused] = {"hang": "hang", "device": "device", "link": "link", CORRUPTION: "corruption"}
    return known.get(cause, "again")
