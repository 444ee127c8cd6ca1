"""What is made of the links and devices of nodes, as their executors tell them. Pure; by the driver's clock.

    a link    down ──up within 3 s──► told, and ranks go on: what is under way is repeated by the kernel
               └──still down──► the node's fault; it is of no use until the link is up again
              three times in five minutes, or its traffic stays abnormal ──► the node is to give way, after
              a step
    a device  a fault of hardware ──► the node's fault, or, where ranks go on for now, it is to give way
              of the program, or nobody knows ──► told

A node that is to give way does so when a sound spare is there; until then it goes on. The only link of a node
is told of when it is up again: by the kernel's count. How often links went down a new driver does not know.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from myriad.resilience.decide.actions import Notice
from myriad.resilience.decide.incidents import Incident
from myriad.resilience.decide.state import State
from myriad.resilience.decide.traffic import Traffic
from myriad.resilience.facts import Beat, DeviceTrouble, LinkSeen, NodeJoined

__all__ = ["TOLERATED_SECONDS", "Broken", "Health", "Unsound"]

Unsound = Literal["link", "device"]

TOLERATED_SECONDS = 3.0
"""A link under ranks may be down for so long, times the patience of the job."""
_FLAPS, _FLAP_SECONDS = 3, 300.0
_MOST_TOLD = 8
"""Flaps of a link in that time: more say nothing new."""
_ERRORS, _ERROR_SECONDS = 100, 60.0
"""Damaged packets in that time of which people are to know."""


class Broken(NamedTuple):
    """An attempt is to end."""

    incident: Incident
    evidence: dict[str, object]


@dataclass
class _Link:
    seen: LinkSeen
    errors_since: float
    errors: int
    down_since: float | None = None
    down_clock: float = 0.0
    """The same by the node's own clock: beats come late that could not leave."""
    judged: bool = False
    flaps: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_TOLD + 1))


@dataclass
class _Node:
    by: str
    heard: tuple[object, ...] = ()
    links: dict[str, _Link] = field(default_factory=dict)
    devices: tuple[DeviceTrouble, ...] = ()


class Health:
    """Of the nodes of one run."""

    def __init__(self, patience: float, state: State, traffic: Traffic | None = None) -> None:
        """``traffic``: its alarms are evidence about links."""
        self._patience, self._state, self._now, self._traffic = patience, state, 0.0, traffic
        self._nodes: dict[int, _Node] = {}
        self._remarkable: set[int] = set()
        """Nodes with anything to look at: of 1,536 mostly none."""

    def join(self, joined: NodeJoined) -> None:
        """A machine has a kernel and its counts; an executor that was started anew knows of no device yet."""
        known = self._nodes.get(joined.node)
        if known is None or known.by.rpartition(":")[0] != joined.by.rpartition(":")[0]:
            self._nodes[joined.node] = _Node(joined.by)
        elif known.by != joined.by:
            self._nodes[joined.node] = _Node(joined.by, links=known.links)

    def heard(self, beat: Beat, now: float) -> Iterator[Notice | Broken]:
        """Mostly the same as before."""
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

    def _link(self, beat: Beat, node: _Node, seen: LinkSeen, now: float) -> Iterator[Notice]:
        link = node.links.get(seen.name)
        if link is None or seen.downs < link.seen.downs:  # it was made anew
            link = node.links[seen.name] = _Link(seen, now, seen.errors)
            was_up, downs = True, 0
        else:
            was_up, downs, link.seen = link.seen.up, seen.downs - link.seen.downs, seen
        goes_down = was_up and not seen.up
        link.flaps.extend([now] * max(downs, goes_down))
        yield from self._errors(beat.node, link, now)
        if goes_down:
            link.down_since, link.down_clock = now, beat.clock_seconds
            yield from self._told(beat.node, link, now, "is down")
        elif seen.up and not was_up:
            seconds = beat.clock_seconds - link.down_clock
            link.down_since, link.judged = None, False
            yield from self._told(beat.node, link, now, f"is up again after {seconds:.1f} s")
        elif downs:
            yield from self._told(beat.node, link, now, f"was down {_times(downs)}")

    def _told(self, number: int, link: _Link, now: float, what: str) -> Iterator[Notice]:
        if len(link.flaps) > _MOST_TOLD and now - link.flaps[0] < _FLAP_SECONDS:
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
        """No link was ever down, none carries abnormal traffic, and no device complains."""
        return not self._remarkable and (self._traffic is None or self._traffic.is_calm)

    def due(self, now: float) -> Iterator[Broken]:
        """To be told at each look at the time: links under ranks that do not come up again."""
        self._now = now
        if self._state.phase != "running":
            return
        for number in sorted(self._remarkable & self._state.placement.keys()):
            for link in self._nodes[number].links.values():
                down = 0.0 if link.down_since is None else now - link.down_since
                if down >= TOLERATED_SECONDS * self._patience and not link.judged:
                    link.judged = True
                    yield self._broken_link(number, link.seen.name, down)

    def _broken_link(self, number: int, name: str, down: float) -> Broken:
        text = f"link {name} of node {number} is down"
        incident = Incident("a link is down", "link", -1, number, -1, text, text, self._state.stop_asked)
        return Broken(incident, {"interface": name, "idle_seconds": down})

    # Devices

    def _device(self, number: int, trouble: DeviceTrouble) -> Notice | Broken:
        state = self._state
        who = f" (rank {trouble.rank})" if trouble.rank >= 0 else ""
        which = f"device {trouble.device} of node {number}{who}" if trouble.device >= 0 else f"node {number}"
        text = f"{which}: {trouble.words}" + _WHOSE[trouble.blame]
        here = trouble.epoch == state.epoch and number in state.placement
        if trouble.blame == "hardware" and here and not trouble.can_wait:
            rank = trouble.rank if trouble.rank in state.placement[number] else -1
            incident = Incident("a device failed", "device", rank, number, -1, text, text, state.stop_asked)
            return Broken(incident, {"device": trouble.device})
        return Notice(
            rule="the devices' driver reported it",
            evidence={"device": trouble.device} if trouble.device >= 0 else {},
            what="device",
            node=number,
            rank=trouble.rank,
            problem=text,
        )

    def blames_program(self, number: int, rank: int) -> bool:
        """The driver of the devices says that this rank's program did what its device complains of."""
        told = self._nodes[number].devices if number in self._nodes else ()
        blames = {one.blame for one in told if one.rank == rank and one.epoch == self._state.epoch}
        return "user" in blames and "hardware" not in blames

    # What nodes are good for

    def why_useless(self, number: int) -> str | None:
        """Nothing can run there now; ``None``: it can."""
        if number not in self._remarkable:
            return None
        node = self._nodes[number]
        down = [f"link {name} is down" for name, link in node.links.items() if not link.seen.up]
        lost = [f"device {one.device}: {one.words}" for one in node.devices if one.lost]
        return next(iter(down + lost), None)

    def unsound(self, number: int) -> Unsound | None:
        """Why another node would be better; ``None``: none would."""
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
