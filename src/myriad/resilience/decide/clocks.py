"""How far the clocks of nodes are from the driver's, by their beats. Pure.

    beat sent at 12:00:05.0 (its clock), heard at 12:00:02.1 (the driver's)     2.9 s ahead, or more

A beat is never heard before it is sent, so what is on its way makes a clock seem late and never early: the
largest difference of several beats is the nearest. No decision uses another machine's clock; but times of
events and logs are compared by people, so a clock that is wrong is told, once.
"""

from collections import deque

from myriad.resilience.decide.actions import Notice

__all__ = ["Clocks"]

_BEATS = 10
_LIMIT_SECONDS = 1.0


class Clocks:
    """Of the nodes of one run, as one driver hears them."""

    def __init__(self) -> None:
        self._seen: dict[int, deque[float]] = {}
        self._told: set[int] = set()

    def heard(self, node: int, sent: float, now: float) -> Notice | None:
        """``sent`` by the node's clock (0: it did not say), ``now`` by the driver's."""
        if not sent or node in self._told:
            return None
        seen = self._seen.setdefault(node, deque(maxlen=_BEATS))
        seen.append(sent - now)
        ahead = max(seen)
        if len(seen) < _BEATS or abs(ahead) < _LIMIT_SECONDS:
            return None
        self._told.add(node)
        which = "ahead of" if ahead > 0 else "behind"
        return Notice(
            rule="a node's clock is not the driver's",
            evidence={"ahead_seconds": round(ahead, 3)},
            what="clock",
            node=node,
            problem=f"the clock of node {node} is {abs(ahead):.1f} s {which} the driver's",
        )
