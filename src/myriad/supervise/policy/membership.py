"""Membership of nodes: which are connected, and for how long the others have been silent. Pure; by the
driver's clock.

    joined ──► connected ──connection lost──► away (kept for 3 s, as it may return) ──► given up
                 └──no heartbeat for 3.5 s──────────────────────────────────────────► given up

A driver that was held up could receive nothing: that time does not count as silence of a node.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from myriad.supervise.messages import Beat, NodeJoined

__all__ = ["Membership", "machine_of"]

_SILENT_SECONDS, _AWAY_SECONDS = 3.5, 3.0
"""Seconds without a heartbeat of a connected node, and seconds without a connection, until a node is given
up."""
_LEAST_SILENCE_SECONDS = 2.5
_ABSENT_SECONDS = 10.0
"""Seconds until a new driver gives up a node that it knows only from the journal."""
_POLL_SECONDS = 1.25
"""A driver that is not held up checks the time more often than this."""


@dataclass
class _Node:
    joined: NodeJoined
    heard_at: float
    left_at: float | None = None


class Membership:
    """Membership of the nodes in a run, by their heartbeats and connections."""

    def __init__(self, patience: float, now: float) -> None:
        self._patience = patience
        self._nodes: dict[int, _Node] = {}
        self._absent_since = self._polled_at = now

    def __contains__(self, number: object) -> bool:
        """Return whether a node has joined and is not given up; its connection may be lost."""
        return number in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def there(self) -> dict[int, NodeJoined]:
        """Nodes that are connected."""
        return {number: node.joined for number, node in self._nodes.items() if node.left_at is None}

    @property
    def known(self) -> dict[int, NodeJoined]:
        """Nodes that are not given up, connected or not."""
        return {number: node.joined for number, node in self._nodes.items()}

    @property
    def silent_seconds(self) -> float:
        """Seconds without a heartbeat after which a node is given up."""
        return self._limit(_SILENT_SECONDS)

    def join(self, joined: NodeJoined, now: float) -> None:
        """Add a node, or record that it has reconnected."""
        self._nodes[joined.node] = _Node(joined, now)

    def leave(self, number: int, now: float) -> None:
        """Record that the connection of a node is lost."""
        if number in self._nodes:
            self._nodes[number].left_at = now

    def forget(self, number: int) -> None:
        """Remove a node that was given up."""
        self._nodes.pop(number, None)

    def record_beat(self, beat: Beat, now: float) -> bool:
        """Record a heartbeat; return whether the node is a member."""
        node = self._nodes.get(beat.node)
        if node is None:
            return False
        node.heard_at = now
        if beat.port != node.joined.port:
            node.joined = replace(node.joined, port=beat.port)
        return True

    def since_heard(self, number: int, now: float) -> float:
        """Return the seconds since a node's last heartbeat."""
        return now - self._nodes[number].heard_at

    def any_away(self, numbers: Iterable[int]) -> bool:
        """Return whether one of the nodes is disconnected or has not found this driver yet. Such a node will
        soon reconnect or be given up."""
        return any(
            (node := self._nodes.get(number)) is None or node.left_at is not None for number in numbers
        )

    def silent(self, now: float) -> list[tuple[int, float]]:
        """Return the nodes to give up, with the seconds since the last heartbeat of each."""
        found = []
        for number, node in self._nodes.items():
            silent, away = now - node.heard_at, now - (now if node.left_at is None else node.left_at)
            if silent >= self._limit(_SILENT_SECONDS) or away >= self._limit(_AWAY_SECONDS):
                found.append((number, silent))
        return found

    def is_calm(self, now: float) -> bool:
        """Return whether all nodes are connected and no node is close to being given up."""
        limit = self._limit(_SILENT_SECONDS) - _POLL_SECONDS
        return all(node.left_at is None and now - node.heard_at < limit for node in self._nodes.values())

    def expect(self, now: float) -> None:
        """Restart the time in which nodes that this driver knows only from other nodes must join."""
        self._absent_since = now

    def waited(self, now: float) -> float | None:
        """Return how long the driver has waited for nodes that never joined it; ``None``: not long enough."""
        absent = now - self._absent_since
        return absent if absent >= self._limit(_ABSENT_SECONDS) else None

    def extend_deadlines(self, now: float) -> None:
        """Extend all deadlines by the time that this driver itself was held up. Call this method
        regularly."""
        held_up, self._polled_at = now - self._polled_at - _POLL_SECONDS, now
        if held_up <= 0:
            return
        self._absent_since += held_up
        for node in self._nodes.values():
            node.heard_at = min(now, node.heard_at + held_up)
            if node.left_at is not None:
                node.left_at = min(now, node.left_at + held_up)

    def _limit(self, seconds: float) -> float:
        """Return a limit for silence, never so short that the next heartbeat is not yet due."""
        return max(_LEAST_SILENCE_SECONDS, seconds * self._patience)


def machine_of(node: int, nodes: Mapping[int, NodeJoined]) -> str:
    """Return the machine of a node; empty if other nodes share the machine, or if it is unknown."""
    name = nodes[node].machine if node in nodes else ""
    return "" if any(one.machine == name for number, one in nodes.items() if number != node) else name
