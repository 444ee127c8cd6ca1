"""An attempt that the executors have, and the journal has not: its disk was full, or hung, when it was
decided, and then that driver was lost. The executors know what is:

    journal     attempt 5 on nodes 0, 1              what a new driver begins with
    node 0      attempt 6, ranks 0 to 7 live     ──► attempt 6: ranks 0 to 7 on node 0, the rest not known yet
    node 2      attempt 6, ranks 8 to 15 live    ──► all are known: it goes on, and no rank has noticed

Ranks of which no node tells in time are taken for lost, on `NOWHERE`.
"""

from myriad.comm.attempt_layout import AttemptLayout
from myriad.resilience.decide.state import State
from myriad.resilience.facts import NodeJoined

__all__ = ["NOWHERE", "adopt", "is_partial", "place_missing", "take_over"]

NOWHERE = -1


def take_over(state: State, epoch: int, layout: AttemptLayout) -> None:
    """Nothing is known of this attempt yet but its number, and in which layout it trains."""
    state.phase, state.epoch = "running", epoch
    state.placement, state.exits, state.incident = {}, {}, None
    state.layout, state.next_layout, state.turning = layout, None, False
    state.leaving, state.leaving_as, state.asked = -1, "", None


def is_partial(state: State, world: int) -> bool:
    """There are ranks of which it is not known where they are."""
    return state.phase in ("running", "ending") and sum(map(len, state.placement.values())) < world


def adopt(state: State, joined: NodeJoined, world: int) -> None:
    """What a node has of the attempt, unless another has told the same."""
    told = {*joined.running, *(ended.rank for ended in joined.exits)}
    taken = {rank for ranks in state.placement.values() for rank in ranks}
    if joined.node not in state.placement and told and told <= set(range(world)) - taken:
        state.placement[joined.node] = tuple(sorted(told))
        _sort(state)


def place_missing(state: State, world: int) -> None:
    """Nobody has told of them."""
    taken = {rank for ranks in state.placement.values() for rank in ranks}
    state.placement[NOWHERE] = tuple(sorted(set(range(world)) - taken))
    _sort(state)


def _sort(state: State) -> None:
    """By rank: the next attempt keeps this order, and each node has the snapshots of its own ranks."""
    state.placement = dict(sorted(state.placement.items(), key=lambda item: item[1][0]))
