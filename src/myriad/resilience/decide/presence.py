"""Which nodes are there, and for how long nothing was heard of the others. Pure; by the driver's own clock.

    joined ──► there ──connection lost──► away (kept for 3 s: it may be back) ──► gone
                 └──no beat for 3.5 s──────────────────────────────────────────► gone

While the driver itself was held up it could hear nobody: that counts as nobody's silence.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from myriad.resilience.facts import Beat, NodeJoined

__all__ = ["Presence"]

_SILENT_SECONDS, _AWAY_SECONDS = 3.5, 3.0
"""Without a beat of a node that is connected; without a connection."""
_LEAST_SILENCE_SECONDS = 2.5
_ABSENT_SECONDS = 10.0
"""After which a new driver waits no longer for a node of which it has read."""
_LOOK_SECONDS = 1.25
"""Time is looked at more often than this, by whoever is not held up."""


@dataclass
class _Node:
    joined: NodeJoined
    heard_at: float
    left_at: float | None = None


class Presence:
    """Of the nodes of one run."""

    def __init__(self, patience: float, now: float) -> None:
        self._patience = patience
        self._nodes: dict[int, _Node] = {}
        self._absent_since = self._looked_at = now

    def __contains__(self, number: object) -> bool:
        """It has joined, and is not given up: perhaps it is away."""
        return number in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def there(self) -> dict[int, NodeJoined]:
        """Those that are connected."""
        return {number: node.joined for number, node in self._nodes.items() if node.left_at is None}

    @property
    def known(self) -> dict[int, NodeJoined]:
        """All that are not given up."""
        return {number: node.joined for number, node in self._nodes.items()}

    @property
    def silent_seconds(self) -> float:
        """After which a node that says nothing is given up."""
        return self._limit(_SILENT_SECONDS)

    def join(self, joined: NodeJoined, now: float) -> None:
        """It is there, perhaps again."""
        self._nodes[joined.node] = _Node(joined, now)

    def leave(self, number: int, now: float) -> None:
        """Its connection is lost."""
        if number in self._nodes:
            self._nodes[number].left_at = now

    def forget(self, number: int) -> None:
        """It is given up."""
        self._nodes.pop(number, None)

    def heard(self, beat: Beat, now: float) -> bool:
        """Whether it is one of them."""
        node = self._nodes.get(beat.node)
        if node is None:
            return False
        node.heard_at = now
        if beat.port != node.joined.port:
            node.joined = replace(node.joined, port=beat.port)
        return True

    def since_heard(self, number: int, now: float) -> float:
        """Seconds since its last beat."""
        return now - self._nodes[number].heard_at

    def any_away(self, numbers: Iterable[int]) -> bool:
        """One of these is not connected, or has not yet found this driver: it is about to be there, or to be
        given up."""
        return any(
            (node := self._nodes.get(number)) is None or node.left_at is not None for number in numbers
        )

    def silent(self, now: float) -> list[tuple[int, float]]:
        """Those that are to be given up, with the seconds of their silence."""
        found = []
        for number, node in self._nodes.items():
            silent, away = now - node.heard_at, now - (now if node.left_at is None else node.left_at)
            if silent >= self._limit(_SILENT_SECONDS) or away >= self._limit(_AWAY_SECONDS):
                found.append((number, silent))
        return found

    def is_calm(self, now: float) -> bool:
        """All are connected, and none is close to being given up."""
        limit = self._limit(_SILENT_SECONDS) - _LOOK_SECONDS
        return all(node.left_at is None and now - node.heard_at < limit for node in self._nodes.values())

    def expect(self, now: float) -> None:
        """Nodes of which this driver has heard from others only have this long, from now on, to join."""
        self._absent_since = now

    def waited(self, now: float) -> float | None:
        """How long nodes were waited for that this driver has never seen; ``None``: not long enough."""
        absent = now - self._absent_since
        return absent if absent >= self._limit(_ABSENT_SECONDS) else None

    def forgive(self, now: float) -> None:
        """To be told at each look at the time: nobody listened while the driver itself was held up."""
        held_up, self._looked_at = now - self._looked_at - _LOOK_SECONDS, now
        if held_up <= 0:
            return
        self._absent_since += held_up
        for node in self._nodes.values():
            node.heard_at = min(now, node.heard_at + held_up)
            if node.left_at is not None:
                node.left_at = min(now, node.left_at + held_up)

    def _limit(self, seconds: float) -> float:
        """Of silence: never so short that the next beat is not yet due."""
        return max(_LEAST_SILENCE_SECONDS, seconds * self._patience)
