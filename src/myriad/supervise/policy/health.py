"""Health of each node's links, devices and clock, as its agent reports them. Pure; uses the driver's clock.

    a link    down ──up within 3 s──► an event; ranks continue, the kernel retransmits what is in flight
               └──still down──► a fault of the node, which is unusable until the link is up again
              three times in five minutes, or its traffic stays abnormal ──► the node is replaced after a step
    a device  a hardware fault ──► a fault of the node; if ranks can continue for now, the node is replaced
              a fault of the program, or of unknown cause ──► an event
    a clock   more than a second off the driver's, by ten heartbeats ──► one event

A node is replaced only when a healthy spare is connected. If a node has only one link, its loss is reported
when the link is up again, from the kernel's counters. A new driver does not know how often links went down
before.

A heartbeat is never received before it is sent, so time in flight makes a clock seem late and never early:
the largest difference of several heartbeats is the closest. No decision uses another machine's clock, but
people compare times of events and logs.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from myriad.supervise.messages import Beat, NodeJoined
from myriad.supervise.observations import DeviceTrouble, LinkStatus
from myriad.supervise.policy.incidents import Incident
from myriad.supervise.policy.policy_actions import Notice
from myriad.supervise.policy.run_state import RunState
from myriad.supervise.policy.traffic_alarms import TrafficAlarms

__all__ = ["TOLERATED_SECONDS", "AttemptFault", "ClockCheck", "Health", "Unsound"]

Unsound = Literal["link", "device"]

TOLERATED_SECONDS = 3.0
"""How long a link of a node with ranks may be down, times the timeout scale of the job."""
_FLAPS, _FLAP_SECONDS = 3, 300.0
_MOST_REPORTED = 8
"""Most flaps of a link that are reported in that time."""
_ERRORS, _ERROR_SECONDS = 100, 60.0
"""Number of damaged packets in that time that is reported."""


class AttemptFault(NamedTuple):
    """A fault that ends an attempt, and its evidence."""

    incident: Incident
    evidence: dict[str, object]


@dataclass
class _Link:
    seen: LinkStatus
    errors_since: float
    errors: int
    down_since: float | None = None
    down_clock: float = 0.0
    """The time in `down_since` by the node's own clock: heartbeats that the link delayed arrive late."""
    judged: bool = False
    flaps: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_REPORTED + 1))


@dataclass
class _Node:
    by: str
    heard: tuple[object, ...] = ()
    links: dict[str, _Link] = field(default_factory=dict)
    devices: tuple[DeviceTrouble, ...] = ()


class Health:
    """The health of the nodes of one run."""

    def __init__(self, patience: float, state: RunState, traffic: TrafficAlarms | None = None) -> None:
        """``traffic``: the traffic alarms, which are evidence about links."""
        self._patience, self._state, self._now, self._traffic = patience, state, 0.0, traffic
        self._nodes: dict[int, _Node] = {}
        self._remarkable: set[int] = set()
        """Nodes with faults or flaps to look at: hardly any of 1,536."""

    def join(self, joined: NodeJoined) -> None:
        """Add a node. Links are counted by the machine's kernel, so a new agent on the same machine keeps
        their history. Device troubles are forgotten, because a new agent has not reported any."""
        known = self._nodes.get(joined.node)
        if known is None or known.by.rpartition(":")[0] != joined.by.rpartition(":")[0]:
            self._nodes[joined.node] = _Node(joined.by)
        elif known.by != joined.by:
            self._nodes[joined.node] = _Node(joined.by, links=known.links)

    def observe(self, beat: Beat, now: float) -> Iterator[Notice | AttemptFault]:
        """Compare a heartbeat with the last one; most heartbeats report no change."""
        self._now = now
        node = self._nodes.get(beat.node)
        if node is None or node.heard == (beat.links, beat.devices):
            return
        node.heard = (beat.links, beat.devices)
        for link in beat.links:
            yield from self._link(beat, node, link, now)
        for trouble in beat.devices:
            if trouble not in node.devices:
                yield self._device(beat.node, trouble)
        node.devices = beat.devices
        if node.devices or any(link.flaps for link in node.links.values()):
            self._remarkable.add(beat.node)

    # Links

    def _link(self, beat: Beat, node: _Node, seen: LinkStatus, now: float) -> Iterator[Notice]:
        link = node.links.get(seen.name)
        if link is None or seen.downs < link.seen.downs:  # the interface was created again
            link = node.links[seen.name] = _Link(seen, now, seen.errors)
            was_up, downs = True, 0
        else:
            was_up, downs, link.seen = link.seen.up, seen.downs - link.seen.downs, seen
        goes_down = was_up and not seen.up
        link.flaps.extend([now] * max(downs, goes_down))
        yield from self._errors(beat.node, link, now)
        if goes_down:
            link.down_since, link.down_clock = now, beat.clock_seconds
            yield from self._notice_link(beat.node, link, now, "is down")
        elif seen.up and not was_up:
            seconds = beat.clock_seconds - link.down_clock
            link.down_since, link.judged = None, False
            yield from self._notice_link(beat.node, link, now, f"is up again after {seconds:.1f} s")
        elif downs:
            yield from self._notice_link(beat.node, link, now, f"was down {_times(downs)}")

    def _notice_link(self, number: int, link: _Link, now: float, what: str) -> Iterator[Notice]:
        if len(link.flaps) > _MOST_REPORTED and now - link.flaps[0] < _FLAP_SECONDS:
            return
        yield Notice(
            rule="a link of a node went down or came up",
            evidence={"interface": link.seen.name, "times_in_five_minutes": self._flaps(link, now)},
            what="link",
            node=number,
            problem=f"link {link.seen.name} of node {number} {what}",
        )

    def _errors(self, number: int, link: _Link, now: float) -> Iterator[Notice]:
        if now - link.errors_since < _ERROR_SECONDS:
            return
        more, link.errors, link.errors_since = link.seen.errors - link.errors, link.seen.errors, now
        if more >= _ERRORS:
            yield Notice(
                rule="packets arrive damaged",
                evidence={"interface": link.seen.name, "errors": more},
                what="link",
                node=number,
                problem=f"link {link.seen.name} of node {number} had {more} damaged packets",
            )

    def _flaps(self, link: _Link, now: float) -> int:
        return sum(now - at < _FLAP_SECONDS for at in link.flaps)

    @property
    def is_calm(self) -> bool:
        """Whether no link was ever down, no link carries abnormal traffic, and no device reports trouble."""
        return not self._remarkable and (self._traffic is None or self._traffic.is_calm)

    def due(self, now: float) -> Iterator[AttemptFault]:
        """Return faults of links that stay down on nodes with ranks. Call this method regularly."""
        self._now = now
        if self._state.phase != "running":
            return
        for number in sorted(self._remarkable & self._state.placement.keys()):
            for link in self._nodes[number].links.values():
                down = 0.0 if link.down_since is None else now - link.down_since
                if down >= TOLERATED_SECONDS * self._patience and not link.judged:
                    link.judged = True
                    yield self._broken_link(number, link.seen.name, down)

    def _broken_link(self, number: int, name: str, down: float) -> AttemptFault:
        text = f"link {name} of node {number} is down"
        incident = Incident("a link is down", "link", -1, number, -1, text, text, self._state.stop_asked)
        return AttemptFault(incident, {"interface": name, "idle_seconds": down})

    # Devices

    def _device(self, number: int, trouble: DeviceTrouble) -> Notice | AttemptFault:
        state = self._state
        who = f" (rank {trouble.rank})" if trouble.rank >= 0 else ""
        which = f"device {trouble.device} of node {number}{who}" if trouble.device >= 0 else f"node {number}"
        text = f"{which}: {trouble.words}" + _WHOSE[trouble.blame]
        here = trouble.epoch == state.epoch and number in state.placement
        if trouble.blame == "hardware" and here and not trouble.can_wait:
            rank = trouble.rank if trouble.rank in state.placement[number] else -1
            incident = Incident("a device failed", "device", rank, number, -1, text, text, state.stop_asked)
            return AttemptFault(incident, {"device": trouble.device})
        return Notice(
            rule="the devices' driver reported it",
            evidence={"device": trouble.device} if trouble.device >= 0 else {},
            what="device",
            node=number,
            rank=trouble.rank,
            problem=text,
        )

    def blames_program(self, number: int, rank: int) -> bool:
        """Return whether the device driver reports that this rank's program, not the hardware, caused the
        error."""
        troubles = self._nodes[number].devices if number in self._nodes else ()
        blames = {one.blame for one in troubles if one.rank == rank and one.epoch == self._state.epoch}
        return "user" in blames and "hardware" not in blames

    # Fitness of nodes for ranks

    def why_useless(self, number: int) -> str | None:
        """Return why no rank can run on a node now; ``None``: ranks can run."""
        if number not in self._remarkable:
            return None
        node = self._nodes[number]
        down = [f"link {name} is down" for name, link in node.links.items() if not link.seen.up]
        lost = [f"device {one.device}: {one.words}" for one in node.devices if one.lost]
        return next(iter(down + lost), None)

    def unsound(self, number: int) -> Unsound | None:
        """Return why the node should be replaced; ``None``: there is no reason."""
        if self._traffic is not None and self._traffic.is_bad(number, self._now):
            return "link"
        if number not in self._remarkable:
            return None
        node = self._nodes[number]
        if any(one.blame == "hardware" for one in node.devices):
            return "device"
        if any(self._flaps(link, self._now) >= _FLAPS for link in node.links.values()):
            return "link"
        return None


_WHOSE = {"user": " (the program's doing, not the device's)", "unknown": "", "hardware": ""}


def _times(count: int) -> str:
    return f"{count} time{'s' if count != 1 else ''}, and is up again"


_BEATS = 10
_LIMIT_SECONDS = 1.0


class ClockCheck:
    """Compares the clocks of the nodes with the driver's."""

    def __init__(self) -> None:
        self._seen: dict[int, deque[float]] = {}
        self._reported: set[int] = set()

    def observe(self, node: int, sent: float, now: float) -> Notice | None:
        """Compare ``sent``, by the node's clock (0: not reported), with ``now``, by the driver's clock."""
        if not sent or node in self._reported:
            return None
        seen = self._seen.setdefault(node, deque(maxlen=_BEATS))
        seen.append(sent - now)
        ahead = max(seen)
        if len(seen) < _BEATS or abs(ahead) < _LIMIT_SECONDS:
            return None
        self._reported.add(node)
        which = "ahead of" if ahead > 0 else "behind"
        return Notice(
            rule="a node's clock is not the driver's",
            evidence={"ahead_seconds": round(ahead, 3)},
            what="clock",
            node=node,
            problem=f"the clock of node {node} is {abs(ahead):.1f} s {which} the driver's",
        )
