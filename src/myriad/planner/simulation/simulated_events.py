"""Network events and slow ranks of a simulated iteration: a link that is down for a while, a congested
uplink.

    --flap node=17:2s@1.5s      a link of node 17 (from 0) is down for 2 s, 1.5 s after the iteration's start
    --congested node=17:0.5     traffic in and out of node 17 has half of its rate
    --congested switch=2:0.5    the same for traffic in and out of the nodes under switch 2

A transfer to or from such a node stops when the link goes down. It continues when the last of its queue pairs
is answered (`myriad.network.link_flaps`). A transfer that begins while the link is down waits for a shorter
time. A ring runs at the rate of its slowest link, so a whole data-parallel group waits, and a pipeline stage
waits for its neighbour.

    link     ───────┐ down ┌──────────────────
    transfer ███████.............███████          rest of it, from the first resend that is answered

Ranks fill nodes in order, or in the order of `comm.node_order`; node 17 is the cluster's node 17, whichever
slot of the job it holds. Of a node with several NICs one is affected: all tensor-parallel ranks of a pipeline
rank wait for the one that uses it.

`parse_stragglers` reads slow nodes and ranks from the command line and returns their pipeline ranks.

    node=17:1.1x    all ranks of node 17 (from 0) compute 1.1 times as long
    rank=5:1.2x     rank 5 does, and with it all ranks of its tensor-parallel group

The grid's axes are ``dp pp cp tp ep``, the last one fastest.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from myriad.comm.layout import Layout
from myriad.errors import BadInputError
from myriad.network.link_flaps import (
    MAX_RETRIES,
    MAX_TIMEOUT,
    Timers,
    lost_probability,
    mean_wait_seconds,
)
from myriad.units import format_number, format_ranges

if TYPE_CHECKING:
    from myriad.planner.cluster_config import Cluster

__all__ = ["CongestedLinks", "LinkFlap", "NetworkEvents", "parse_stragglers", "read_timers"]

_FLAP = re.compile(r"node=(\d+):(\d+(?:\.\d*)?|\.\d+)s?@(\d+(?:\.\d*)?|\.\d+)s?")
_CONGESTED = re.compile(r"(node|switch)=(\d+):(\d+(?:\.\d*)?|\.\d+)")
_TIMERS = re.compile(r"(\d+)(?:x(\d))?(:adaptive)?")
_QUEUE_PAIRS = 16
_ELSEWHERE = -1
"""The place of replicas that represent other replicas."""
_CERTAIN = 1 - 1e-9


@dataclass(frozen=True)
class LinkFlap:
    """A period in which a link of a node is down."""

    node: int
    down_seconds: float
    start_seconds: float
    """Seconds from the start of the iteration."""


@dataclass(frozen=True)
class CongestedLinks:
    """Congested links between some nodes and all others."""

    nodes: tuple[int, ...]
    ratio: float
    """Remaining share of the links' rate."""


def read_timers(text: str) -> Timers:
    """Parse retransmission timers such as ``20x7`` or ``20x7:adaptive``. Raises `BadInputError`."""
    match = _TIMERS.fullmatch(text)
    timeout, retries = (int(match[1]), int(match[2] or MAX_RETRIES)) if match else (0, 0)
    if match is None or not (1 <= timeout <= MAX_TIMEOUT and 1 <= retries <= MAX_RETRIES):
        allowed = f"TIMEOUTxRETRIES such as 20x7, or 20x7:adaptive; up to {MAX_TIMEOUT} and {MAX_RETRIES}"
        raise BadInputError("--timers", text, allowed)
    return Timers(timeout, retries, match[3] is not None)


class NetworkEvents:
    """Network events of one iteration of a layout on a cluster."""

    def __init__(
        self,
        layout: Layout,
        cluster: "Cluster",
        *,
        flaps: Sequence[str] = (),
        congested: Sequence[str] = (),
        timers: Timers,
        order: Sequence[int] | None = None,
    ) -> None:
        """Parse events in the syntax of the command line. ``order``: the job's nodes, slot by slot; off: the
        first nodes. Raises `BadInputError`."""
        self.layout, self.per_node, self.timers = layout, cluster.accelerators_per_node, timers
        self.nodes_per_switch = cluster.nodes_per_switch
        self.order = tuple(range(-(-layout.world // self.per_node)) if order is None else order)
        self.begin_seconds = 0.0
        """Start of the observed iteration on the simulator's clock."""
        self.flaps = tuple(map(self._flap, flaps))
        self.congested = tuple(map(self._congested, congested))
        if (flaps or congested) and self._width > self.per_node:
            key = "layout.tp"
            raise BadInputError(
                key, layout.tp, f"within a node of {self.per_node}, for --flap and --congested"
            )

    @property
    def replicas(self) -> set[int]:
        """Replicas that have ranks on affected nodes."""
        nodes = {one.node for one in self.flaps}.union(*(one.nodes for one in self.congested))
        ranks_of_replica = self._width * self.layout.pp
        found: set[int] = set()
        for slot, node in enumerate(self.order):
            if node in nodes:
                first, last = slot * self.per_node, (slot + 1) * self.per_node - 1
                found.update(range(first // ranks_of_replica, last // ranks_of_replica + 1))
        return {replica for replica in found if replica < self.layout.dp}

    def travel(self, begin: float, seconds: float, lanes: Sequence[tuple[int, int]]) -> float:
        """Return the seconds of a transfer among lanes, each a pair (replica, pipeline rank)."""
        seconds /= self.rate_ratio(lanes)
        return seconds + self.held_seconds(begin, begin + seconds, lanes)

    def rate_ratio(self, lanes: Sequence[tuple[int, int]]) -> float:
        """Return the share of their links' rate that congestion leaves to transfers among lanes."""
        places, ratio = self._nodes_of(lanes), 1.0
        for one in self.congested:
            inside = places & set(one.nodes)
            if inside and places - inside:
                ratio *= one.ratio
        return ratio

    def held_seconds(self, begin: float, end: float, lanes: Sequence[tuple[int, int]]) -> float:
        """Return the seconds by which links that are down delay what travels among lanes until ``end``."""
        places, undelayed = self._nodes_of(lanes), end
        for flap in sorted(self.flaps, key=lambda flap: flap.start_seconds):
            if flap.node in places and len(places) > 1:
                end += self._held(begin, end, flap)
        return end - undelayed

    def _nodes_of(self, lanes: Sequence[tuple[int, int]]) -> set[int]:
        return {place for lane in lanes for place in self._places(lane)}

    def _held(self, begin: float, end: float, flap: LinkFlap) -> float:
        down = self.begin_seconds + flap.start_seconds
        up = down + flap.down_seconds
        hit = max(begin, down)
        return self.wait_seconds(up - hit) if hit < min(end, up) else 0.0

    def wait_seconds(self, down_seconds: float) -> float:
        """Return the seconds by which a transfer is delayed if its link goes down for so long."""
        return float(mean_wait_seconds(self.timers, np.array([down_seconds]), _QUEUE_PAIRS)[0])

    @cached_property
    def lost_probability(self) -> float:
        """Probability that one of the flaps ends the job."""
        down = np.array([one.down_seconds for one in self.flaps])
        survives = 1 - lost_probability(self.timers, down, _QUEUE_PAIRS)
        return float(1 - survives.prod())

    @property
    def _width(self) -> int:
        return self.layout.cp * self.layout.tp

    def _places(self, lane: tuple[int, int]) -> tuple[int, ...]:
        """Return the nodes of the lane's ranks."""
        replica, rank = lane
        if replica < 0:
            return (_ELSEWHERE,)
        first = (replica * self.layout.pp + rank) * self._width
        return self.order[first // self.per_node : (first + self._width - 1) // self.per_node + 1]

    def _flap(self, text: str) -> LinkFlap:
        match = _FLAP.fullmatch(text)
        if match is None:
            raise BadInputError("--flap", text, "node=NUMBER:SECONDSs@STARTs, like node=17:2s@1.5s")
        found = LinkFlap(self._node("--flap", text, int(match[1])), float(match[2]), float(match[3]))
        if found.down_seconds <= 0:
            raise BadInputError("--flap", text, "down for some time, above 0 s")
        lost = lost_probability(self.timers, np.array([found.down_seconds]), _QUEUE_PAIRS)[0]
        if lost > _CERTAIN:
            longest = self.timers.longer[1] * float(self.timers.resends[-1])
            raise BadInputError(
                "--flap", text, f"at most {format_number(longest)} s with these --timers: the job would fail"
            )
        return found

    def _congested(self, text: str) -> CongestedLinks:
        match = _CONGESTED.fullmatch(text)
        if match is None or not 0 < float(match[3]) <= 1:
            allowed = "node=NUMBER:SHARE or switch=NUMBER:SHARE, like node=17:0.5: above 0, at most 1"
            raise BadInputError("--congested", text, allowed)
        number, ratio = int(match[2]), float(match[3])
        if match[1] == "node":
            return CongestedLinks((self._node("--congested", text, number),), ratio)
        below = self.nodes_per_switch or max(self.order) + 1
        under = {node: node // below for node in self.order}
        if number not in under.values():
            where = f"the job's {len(self.order)} nodes are under {format_ranges(under.values())}"
            raise BadInputError("--congested", text, f"a switch that the job uses: {where}")
        return CongestedLinks(
            tuple(sorted(node for node, switch in under.items() if switch == number)), ratio
        )

    def _node(self, key: str, text: str, number: int) -> int:
        if len(self.order) < 2:
            raise BadInputError(key, text, "needs a job on several nodes; this job uses no network")
        if number not in self.order:
            allowed = (
                f"one of nodes {format_ranges(self.order)}: the job's {self.layout.world} ranks are there"
            )
            raise BadInputError(key, text, allowed)
        return number


_KEY = "--straggler"
_FORM = re.compile(r"(node|rank)=(\d+):(\d+(?:\.\d*)?|\.\d+)x?")


def parse_stragglers(
    given: Sequence[str], layout: Layout, accelerators_per_node: int, order: Sequence[int] | None = None
) -> dict[tuple[int, int], float]:
    """Return the compute slowdown by (replica, pipeline rank), the largest where several apply. ``order``:
    the job's nodes, slot by slot; off: the first nodes. Raises `BadInputError`."""
    found: dict[tuple[int, int], float] = {}
    for one in given:
        ranks, factor = _parse(one, layout, accelerators_per_node, order)
        for rank in ranks:
            lane = divmod(rank // (layout.cp * layout.tp), layout.pp)
            found[lane] = max(found.get(lane, 0.0), factor)
    return found


def _parse(given: str, layout: Layout, per_node: int, order: Sequence[int] | None) -> tuple[range, float]:
    match = _FORM.fullmatch(given)
    if match is None:
        raise BadInputError(_KEY, given, "node=NUMBER:FACTORx or rank=NUMBER:FACTORx, like node=17:1.1x")
    kind, number, factor = match[1], int(match[2]), float(match[3])
    if factor <= 0:
        raise BadInputError(_KEY, given, "the factor must be above 0")
    if kind == "node" and order is not None:
        if number not in order:
            raise BadInputError(_KEY, given, f"one of the job's nodes, {format_ranges(order)}")
        number = order.index(number)
    nodes = -(-layout.world // per_node)
    most = nodes if kind == "node" else layout.world
    if number >= most:
        where = f"the job's {layout.world} ranks are on {nodes} node{'s' * (nodes > 1)}"
        raise BadInputError(_KEY, given, f"{kind} 0 to {most - 1}: {where}")
    if kind == "rank":
        return range(number, number + 1), factor
    return range(number * per_node, min((number + 1) * per_node, layout.world)), factor
