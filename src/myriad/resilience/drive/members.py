"""Which machine is which node: numbers for those that ask for one, and none for two.

A machine that comes back gets the number that it had, under which its snapshots are kept. What a driver knows
of this dies with it; the next one hears it from the executors, so it gives no numbers before it has.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from myriad.resilience.facts import NodeJoined

__all__ = ["HEAR_SECONDS", "Members"]

HEAR_SECONDS = 1.5
"""In which executors find a new driver."""
_STALE_SECONDS = 2.5
"""An executor that has said nothing for so long may be one of a machine that was started anew."""
_PROMISE_SECONDS = 60.0
"""How long a number that was given waits for its node."""


@dataclass
class _Member:
    by: str
    heard_at: float


class Members:
    """Of one driver."""

    def __init__(self) -> None:
        self._members: dict[int, _Member] = {}
        self._host_of: dict[int, str] = {}
        self._given_at: dict[int, float] = {}

    def joined(self, joined: NodeJoined, now: float) -> None:
        """An executor is a node from now on."""
        self._members[joined.node] = _Member(joined.by, now)
        self._host_of[joined.node] = joined.by.rpartition(":")[0]
        self._given_at.pop(joined.node, None)

    def heard(self, node: int, now: float) -> None:
        """It lives."""
        if node in self._members:
            self._members[node].heard_at = now

    def left(self, node: int) -> None:
        """Its connection is gone."""
        self._members.pop(node, None)

    def other_than(self, joined: NodeJoined, now: float) -> str | None:
        """Who else is that node at this moment, if anybody."""
        known = self._members.get(joined.node)
        if known is None or known.by == joined.by or now - known.heard_at > _STALE_SECONDS:
            return None
        return known.by

    def number_for(self, host: str, taken: Iterable[int], now: float) -> int:
        """A node that ``host`` may be: the one that it was, else one that is new and none of ``taken``."""
        busy = {*self._members, *self._promised(now)}
        for number, owner in sorted(self._host_of.items()):
            if owner == host and number not in busy:
                break
        else:
            used = {*busy, *taken, *self._host_of}
            number = next(number for number in count() if number not in used)
        self._host_of[number], self._given_at[number] = host, now
        return number

    def _promised(self, now: float) -> set[int]:
        return {number for number, at in self._given_at.items() if now - at < _PROMISE_SECONDS}
