"""Who holds the others up, when no rank goes on: from all rows of the progress pages, by no clock.

A rank that is inside communication has entered more than it has left. The others wait for one that is not:

    rank 0   entered 7  left 6    waits in "reduce"
    rank 1   entered 7  left 6    waits in "reduce"
    rank 2   entered 6  left 6    in "backward": the first that did not enter
"""

from collections.abc import Sequence
from dataclasses import dataclass

from myriad.resilience.facts import RankSeen

__all__ = ["Suspicion", "find_suspects"]


@dataclass(frozen=True)
class Suspicion:
    """Ranks, and why them."""

    ranks: tuple[int, ...]
    why: str


def find_suspects(seen: Sequence[RankSeen]) -> Suspicion:
    """Those that are stopped; else the first outside all communication while others are inside; else those
    in the earliest communication, whose link is then as suspect as they are."""
    stopped = tuple(one.rank for one in seen if one.state == "T")
    if stopped:
        return Suspicion(stopped, "stopped (SIGSTOP)")
    inside = [one for one in seen if one.entered > one.left]
    outside = [one for one in seen if one.entered <= one.left]
    behind = min(outside or inside, key=_position)
    what = behind.activity or behind.phase
    if outside and inside:
        number = behind.entered + 1
        waiting = len(inside)
        why = f'in "{what}" of step {behind.step}, has not entered communication {number}; {waiting} waiting'
        return Suspicion((behind.rank,), why)
    together = tuple(one.rank for one in seen if _position(one) == _position(behind))
    if outside:
        return Suspicion(together, f'in "{what}" of step {behind.step}; nobody communicates')
    why = f'all wait in communication; these in the earliest, "{what}", number {behind.entered}'
    return Suspicion(together, f"{why}: one of them or a link between them")


def _position(one: RankSeen) -> tuple[int, int]:
    return one.step, one.entered
