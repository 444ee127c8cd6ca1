"""The arrays of the fluid model: what is on its way, what stands in queues, what each sender knows.

    place n     hop h of flow f: the queue of the link that it goes over there (n = paths.first[f] + h)
    batch       what came into one queue in one step; queues serve batches in order (first in, first out), and
                the wait of what leaves is the age of its batch

Arrays: F flows, L links, N places, D steps that a ring of what is on its way holds, B batches that a queue
holds.
"""

from typing import Any, NamedTuple

import numpy as np

from myriad.errors import BadInputError
from myriad.network.controls import Control, Dcqcn
from myriad.network.fabric import Fabric
from myriad.network.flows import Flows, Paths
from myriad.network.switch_settings import PACKET_BYTES, SwitchSettings

__all__ = ["Net", "Queues", "Senders", "base_round_trip_seconds", "choose_step_seconds", "make_net"]
__all__ += ["make_queues", "make_senders", "travel_seconds"]


class Net(NamedTuple):
    """What does not change."""

    step_seconds: float
    link: Any
    """(N) Of each place."""
    first: Any
    """(F + 1) Places of a flow."""
    flow: Any
    """(N)"""
    on: Any
    """(N) Places in order of their links."""
    start: Any
    """(L + 1) Of link l: ``on[start[l] : start[l + 1]]``."""
    rate: Any
    """(L) bytes/s."""
    ahead: Any
    """(L) Steps from leaving a link's queue to being at its end."""
    back: Any
    """(F) Steps of an acknowledgement."""
    base_seconds: Any
    """(F) Round trip of a full packet where all queues are empty."""
    hops: Any
    """(F) Switches on the way."""
    line: Any
    """(F) bytes/s of the NIC port a flow leaves by."""
    from_switch: Any
    """(L) Whether a switch's queue stands before it."""


class Queues(NamedTuple):
    """What is under way."""

    coming: Any
    """(D, N + F) By step: what reaches a place, and, at N + f, the target of flow f."""
    batch: Any
    """(B, N) Bytes of a place in a batch of its link's queue."""
    left: Any
    """(B, L) Bytes of a batch."""
    stamp: Any
    """(B, L) When it came."""
    head: Any
    """(L) First batch."""
    count: Any
    """(L) Batches."""
    stands: Any
    """(L) Bytes in a queue."""
    held: Any
    """(L) Bytes that came over this link and still stand in the switch at its end."""
    wait: Any
    """(L) Seconds that what leaves now has stood."""
    used: Any
    """(L) Of what the link could carry in this step."""
    is_paused: Any
    """(L)"""
    asked: Any
    """(L) Whether the far end wants it paused."""
    order: Any
    """(D, L) By step: 1 pause, -1 go on."""
    paused_seconds: Any
    """(L)"""
    most_held: Any
    """(L)"""


class Senders(NamedTuple):
    """What each flow's sender knows, and its target; (F) each."""

    rate: Any
    window: Any
    """Bytes."""
    reference: Any
    """Target rate (DCQCN), reference window (HPCC), window before the last cut (hybrid)."""
    estimate: Any
    """alpha (DCQCN), U (HPCC)."""
    cut_at: Any
    heard_at: Any
    """When the last CNP was sent."""
    aged_at: Any
    """When alpha last changed."""
    raised_at: Any
    """When the timer last rose (DCQCN), when this round trip began (the others)."""
    since: Any
    """Bytes sent since the byte counter last rose."""
    timer_stage: Any
    byte_stage: Any
    is_waiting: Any
    """A CNP came and the rate may not be cut yet."""
    unheard: Any
    """Part of a packet of which its acknowledgement, and whether it is marked, is not heard yet."""
    wanted: Any
    """Bytes that it would send in this step if its port were its own."""
    sent: Any
    arrived: Any
    acked: Any
    finish: Any
    signals: Any
    """(D, 4, F) By step: bytes acknowledged, wait, probability of a mark, U."""


def travel_seconds(fabric: Fabric, paths: Paths) -> Any:
    """(F) From a packet's first bit sent to its last received where all queues are empty."""
    each = fabric.latency_seconds[paths.link] + PACKET_BYTES / fabric.bytes_per_second[paths.link]
    return np.bincount(_owners(paths), weights=each, minlength=len(paths))


def base_round_trip_seconds(fabric: Fabric, paths: Paths) -> Any:
    """(F) The same and back, an acknowledgement's own length left out."""
    latency = fabric.latency_seconds[paths.link ^ 1]
    return travel_seconds(fabric, paths) + np.bincount(_owners(paths), weights=latency, minlength=len(paths))


def _owners(paths: Paths) -> Any:
    return np.repeat(np.arange(len(paths)), np.diff(paths.first))


def choose_step_seconds(fabric: Fabric, paths: Paths) -> float:
    """Half of the shortest link, so that what happens at one end is not at the other in the same step."""
    used = np.unique(paths.link)
    shortest = fabric.latency_seconds[used] + PACKET_BYTES / fabric.bytes_per_second[used]
    return max(float(shortest.min()) / 2, 1e-8)


def make_net(fabric: Fabric, paths: Paths, step_seconds: float) -> Net:
    """The arrays of a fabric and its paths."""
    flow, link = _owners(paths), paths.link.astype(np.int64)
    order = np.argsort(link, kind="stable")
    start = np.searchsorted(link[order], np.arange(fabric.num_links + 1))
    ahead = fabric.latency_seconds + PACKET_BYTES / fabric.bytes_per_second
    base = base_round_trip_seconds(fabric, paths)
    back = base - travel_seconds(fabric, paths)
    return Net(
        step_seconds=step_seconds,
        link=link,
        first=paths.first,
        flow=flow,
        on=order,
        start=start,
        rate=fabric.bytes_per_second,
        ahead=np.maximum(1, np.rint(ahead / step_seconds)).astype(np.int64),
        back=np.maximum(1, np.rint(back / step_seconds)).astype(np.int64),
        base_seconds=base,
        hops=np.diff(paths.first) - 1,
        line=fabric.bytes_per_second[link[paths.first[:-1]]],
        from_switch=fabric.tier[fabric.source] > 0,
    )


def make_queues(net: Net, flows: Flows, settings: SwitchSettings, max_bytes: float) -> Queues:
    """All empty, with room for the longest wait that the flows' bytes can cause. Raises `BadInputError` where
    that needs more memory than allowed."""
    num_links, num_places = len(net.rate), len(net.link)
    through = np.bincount(net.link, weights=flows.num_bytes[net.flow], minlength=num_links)
    longest = np.minimum(through, settings.buffer_bytes) / net.rate
    depth = int(min(2 * longest.max() / net.step_seconds + 16, 2**14, 2**24 // max(num_places, 1) + 16))
    ring = int(max(net.ahead.max(), 1)) + 2
    needed = 8.0 * (depth * (num_places + 2 * num_links) + ring * (num_places + len(flows)))
    if needed > max_bytes:
        allowed = (
            f"fewer: they need {needed / 1e9:.1f} GB at the fluid level, {max_bytes / 1e9:.1f} GB is allowed"
        )
        raise BadInputError("flows", len(flows), allowed)
    zeros = [np.zeros(num_links) for _ in range(6)]
    return Queues(
        coming=np.zeros((ring, num_places + len(flows))),
        batch=np.zeros((depth, num_places)),
        left=np.zeros((depth, num_links)),
        stamp=np.zeros((depth, num_links)),
        head=np.zeros(num_links, dtype=np.int64),
        count=np.zeros(num_links, dtype=np.int64),
        stands=zeros[0],
        held=zeros[1],
        wait=zeros[2],
        used=zeros[3],
        is_paused=np.zeros(num_links, dtype=np.bool_),
        asked=np.zeros(num_links, dtype=np.bool_),
        order=np.zeros((ring, num_links), dtype=np.int8),
        paused_seconds=zeros[4],
        most_held=zeros[5],
    )


def make_senders(net: Net, control: Control, start_packets: float | None) -> Senders:
    """All at the rate of their port and a window of one round trip, as NICs start; or with fewer packets on
    their way in the first round trip."""
    num_flows = len(net.line)
    zeros = [np.zeros(num_flows) for _ in range(10)]
    window = net.line * net.base_seconds
    if start_packets is not None:
        window = np.minimum(window, start_packets * PACKET_BYTES)
    rate = window / net.base_seconds
    return Senders(
        rate=rate if isinstance(control, Dcqcn) else net.line.copy(),
        window=window.copy(),
        reference=(rate if isinstance(control, Dcqcn) else window).copy(),
        estimate=np.ones(num_flows),
        cut_at=np.full(num_flows, -1.0),
        heard_at=np.full(num_flows, -1.0),
        aged_at=zeros[0],
        raised_at=zeros[1],
        since=zeros[2],
        timer_stage=zeros[3],
        byte_stage=zeros[4],
        is_waiting=np.zeros(num_flows, dtype=np.bool_),
        unheard=zeros[5],
        wanted=zeros[6],
        sent=zeros[7],
        arrived=zeros[8],
        acked=zeros[9],
        finish=np.full(num_flows, np.nan),
        signals=np.zeros((int(net.back.max()) + 2, 4, num_flows)),
    )
