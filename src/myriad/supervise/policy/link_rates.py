"""The rates of links, one direction at a time: each as a share of its own earlier rate, compared with its
peers. Pure.

    ratio     current rate / the direction's own rate (upper quartile of its last 30 rates without a problem)
    fell      since when the ratio has been below `SLOW`
    peers     the same direction on other nodes' links, whose own rates were known before the fall

In a synchronous job all links slow down with the slowest. `most_fallen` returns the directions that fell
furthest, which are the suspects of `traffic_alarms`.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Literal, NamedTuple

__all__ = [
    "AS_BEFORE",
    "DIRECTIONS",
    "FURTHEST",
    "KNOWN",
    "MANY_PEERS",
    "REMEMBERED",
    "SLOW",
    "SWINGS",
    "Direction",
    "DirectionRates",
    "LinkDirection",
    "LinkPeers",
    "most_fallen",
]

Direction = Literal["sent", "received"]
DIRECTIONS: tuple[Direction, ...] = ("sent", "received")
KNOWN, REMEMBERED = 5, 30
"""Number of polls after which a link's own rate is known, and number of rates that are kept."""
SLOW, AS_BEFORE, FURTHEST = 0.5, 0.7, 0.6
"""Shares of a rate: slow below the first, as before from the second on; further than others below the
third."""
SWINGS = 3
"""Number of falls within a short time that count as swinging."""
MANY_PEERS = 64
"""Number of links from which one node hardly changes the median."""


class LinkDirection(NamedTuple):
    """One direction of a link of a node."""

    node: int
    link: str
    direction: Direction


@dataclass
class DirectionRates:
    """The rates and bytes of one direction of a link."""

    rates: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    rate: float = 0.0
    """Own rate of the direction without a problem; 0: not known yet."""
    num_bytes: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    usual_bytes: float = 0.0
    """Median of the bytes of its last steps."""
    known_at: float = math.inf
    """Time at which its own rate became known."""
    fell_at: float = math.inf
    """Time since which it has carried less than half of its own rate."""
    low: int = 0
    """Number of successive polls at which it was slow."""
    falls: deque[float] = field(default_factory=lambda: deque(maxlen=SWINGS))

    def carried(self, num_bytes: int) -> None:
        """Record the bytes of a step."""
        self.num_bytes.append(num_bytes)
        self.usual_bytes = float(median(self.num_bytes))

    def add(self, rate: float, now: float) -> float | None:
        """Record the current rate; return it as a share of the direction's own rate, if that is known."""
        own = self.rate
        if not own or rate >= AS_BEFORE * own:
            self.rates.append(rate)
            if len(self.rates) >= KNOWN:
                self.rate = sorted(self.rates)[3 * len(self.rates) // 4]
                self.known_at = min(self.known_at, now)
        if not own:
            return None
        self.fell_at = math.inf if rate >= SLOW * own else min(self.fell_at, now)
        return rate / own


class _Others(NamedTuple):
    """What the links of other nodes carry, as shares of their own rates."""

    median: float
    least: float


class LinkPeers:
    """Rates of the same direction on other nodes' links, for each link that fell. Only links with a rate
    known before the fall count: a rate measured afterwards may be that of a slow link."""

    def __init__(self, seen: Mapping[LinkDirection, tuple[float, DirectionRates]]) -> None:
        """``seen``: each direction's share of its own rate."""
        self._seen = seen
        self._sorted: dict[tuple[Direction, float], list[tuple[float, int]]] = {}

    def of(self, key: LinkDirection) -> _Others | None:
        """Return the rates of the peers; ``None``: there are no peers."""
        fell_at = self._seen[key][1].fell_at
        found = self._sorted.get((key.direction, fell_at))
        if found is None:
            found = self._sorted[key.direction, fell_at] = sorted(
                (ratio, other.node)
                for other, (ratio, side) in self._seen.items()
                if other.direction == key.direction and side.known_at < fell_at
            )
        if len(found) > MANY_PEERS:  # one node more or less does not change the median of many
            least = next((ratio for ratio, node in found if node != key.node), math.inf)
            return _Others(found[len(found) // 2][0], least)
        others = [ratio for ratio, node in found if node != key.node]
        return _Others(median(others), others[0]) if others else None


def most_fallen(
    low: set[LinkDirection], ratios: Mapping[LinkDirection, float], peers: LinkPeers
) -> set[LinkDirection]:
    """Return the directions to name: those that fell furthest. Both ends of a slow link see it, so a
    receiving link is not named if another link sends at nearly as low a rate."""
    if not low:
        return low
    furthest = min(low, key=lambda key: (ratios[key], key.direction == "received"))
    if furthest.direction == "received":
        senders = [
            one
            for one, ratio in ratios.items()
            if one.direction == "sent" and one.node != furthest.node and ratio < SLOW and peers.of(one)
        ]
        sender = min(senders, key=ratios.__getitem__, default=furthest)
        if FURTHEST * ratios[sender] <= ratios[furthest]:
            low, furthest = low | {sender}, sender
    return {
        one for one in low if one.direction == furthest.direction and ratios[one] < 1.5 * ratios[furthest]
    }
