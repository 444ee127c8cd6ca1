"""What the end of a rank tells: whether it is news, and which fault it is. Pure."""

from dataclasses import replace

from myriad.resilience.causes import first_not_finite, spike_text
from myriad.resilience.decide.incidents import NOT_FINITE, SPIKE, Incident
from myriad.resilience.decide.state import State
from myriad.resilience.facts import RankExited

__all__ = ["incident_of", "is_as_asked", "is_news"]


def is_news(ended: RankExited, state: State) -> bool:
    """A rank of this attempt, where it is to be, that was not known to have ended."""
    return (
        ended.epoch == state.epoch
        and ended.rank not in state.exits
        and ended.rank in state.placement.get(ended.node, ())
        and state.phase in ("running", "ending")
    )


def is_as_asked(ended: RankExited, state: State) -> bool:
    """It is done, was stopped or turned as it was asked to, or ends because another did."""
    asked_and_obeyed = state.stop_asked and ended.cause == "interrupted"
    turned = state.turning and ended.cause == "turned"
    return state.phase == "ending" or ended.code == 0 or asked_and_obeyed or turned


def incident_of(ended: RankExited, state: State, world: int) -> Incident:
    """Where numbers went wrong each rank says who made them: so much is told of that one, whoever is heard
    first, and of nobody where all did."""
    incident = Incident.of_exit(ended, "a rank ended", after_stop=state.stop_asked)
    if ended.cause == NOT_FINITE:
        rank, text = first_not_finite(ended.error)
        if rank < world:
            text += f" (log: {ended.log})"
            incident = replace(incident, rank=rank, node=state.node_of(rank), text=text)
    elif ended.cause == SPIKE:
        text = f"step {ended.step}: {spike_text(ended.error)}"
        incident = replace(incident, rank=-1, node=-1, text=text)
    return incident
