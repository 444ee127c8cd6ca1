"""The arrays of the fluid model, and one step of all its queues: arrivals, service, marks, pauses.

    place n     hop h of flow f: the queue of the link that the flow takes there (n = paths.first[f] + h)
    batch       the bytes that entered a queue in one step; queues serve batches first in, first out, and the
                wait of what leaves is the age of its batch

    service           rate x step bytes, oldest batch first; nothing while the far end pauses the link
    pause (PFC)       a switch counts queued bytes by the link they came over; above xoff it pauses that
                      link's source, whatever is queued there and wherever it goes: what is behind it waits
                      too (head-of-line blocking); below xon the link resumes
    mark (ECN)        by the length of the queue when a packet leaves it

Nothing is lost: `Queues.most_held` keeps how far a port exceeded its room for pauses.

Arrays: F flows, L links, N places, D steps of the ring of bytes on links, B batches that a queue holds.
"""

from typing import Any, NamedTuple

import numpy as np

from myriad.errors import BadInputError
from myriad.network.congestion_controls import PACKET_BYTES, Control, Dcqcn, SwitchSettings
from myriad.network.fabric import Fabric, Flows, Paths
from myriad.network.numba_cache import compiled_inside

__all__ = [
    "Net",
    "Queues",
    "Senders",
    "base_round_trip_seconds",
    "choose_step_seconds",
    "make_net",
    "mark_probability",
    "step_queues",
]

__all__ += ["make_queues", "make_senders", "travel_seconds"]


class Net(NamedTuple):
    """The constants of a simulation."""

    step_seconds: float
    link: Any
    """(N) Link of each place."""
    first: Any
    """(F + 1) First place of each flow."""
    flow: Any
    """(N) Flow of each place."""
    on: Any
    """(N) Places sorted by their links."""
    start: Any
    """(L + 1) Link l has the places ``on[start[l] : start[l + 1]]``."""
    rate: Any
    """(L) Bytes per second."""
    ahead: Any
    """(L) Steps from leaving the link's queue to its end."""
    back: Any
    """(F) Steps that an acknowledgement takes."""
    base_seconds: Any
    """(F) Round trip of a full packet without queues."""
    hops: Any
    """(F) Switches on the path."""
    line: Any
    """(F) Bytes per second of the NIC port of the source."""
    from_switch: Any
    """(L) Whether the link leaves a switch."""


class Queues(NamedTuple):
    """Bytes on links and in queues."""

    arriving: Any
    """(D, N + F) Bytes that reach each place in each step; column N + f is the target of flow f."""
    batch: Any
    """(B, N) Bytes of each place in each batch of its link's queue."""
    left: Any
    """(B, L) Bytes of each batch."""
    arrived_at: Any
    """(B, L) When each batch arrived."""
    head: Any
    """(L) First batch of each queue."""
    count: Any
    """(L) Number of batches."""
    queued: Any
    """(L) Bytes in each queue."""
    held: Any
    """(L) Bytes that came over the link and are still queued in the switch at its end."""
    wait: Any
    """(L) Seconds that the bytes leaving now were queued."""
    used: Any
    """(L) Share of the link's capacity used in this step."""
    is_paused: Any
    is_pause_requested: Any
    """(L) Whether the far end requests a pause."""
    order: Any
    """(D, L) Pause orders by step: 1 pause, -1 resume."""
    paused_seconds: Any
    most_held: Any


class Senders(NamedTuple):
    """State of each flow's sender and target; all arrays are (F)."""

    rate: Any
    window: Any
    """(F) Congestion window of each flow, in bytes."""
    reference: Any
    """Target rate (DCQCN), reference window (HPCC), window before the last cut (hybrid)."""
    estimate: Any
    """Alpha (DCQCN) or U (HPCC)."""
    cut_at: Any
    cnp_at: Any
    """When the last CNP was sent."""
    aged_at: Any
    """When alpha last changed."""
    raised_at: Any
    """When the timer last advanced (DCQCN), or when this round trip began (the others)."""
    since: Any
    """Bytes sent since the byte counter last advanced."""
    timer_stage: Any
    byte_stage: Any
    is_waiting: Any
    """Whether a CNP arrived and the next cut is not allowed yet."""
    partial_packets: Any
    """Acknowledged part of a packet whose rest is not acknowledged yet."""
    demand: Any
    """Bytes that the flow would send in this step if it had its port to itself."""
    sent: Any
    arrived: Any
    acked: Any
    finish: Any
    signals: Any
    """(D, 4, F) Acknowledgements by step: bytes, wait, mark probability, U."""


def travel_seconds(fabric: Fabric, paths: Paths) -> Any:
    """Return (F) the time from a packet's first bit sent to its last bit received, without queues."""
    each = fabric.latency_seconds[paths.link] + PACKET_BYTES / fabric.bytes_per_second[paths.link]
    return np.bincount(_owners(paths), weights=each, minlength=len(paths))


def base_round_trip_seconds(fabric: Fabric, paths: Paths) -> Any:
    """Return (F) the round trip without queues; the length of an acknowledgement is left out."""
    latency = fabric.latency_seconds[paths.link ^ 1]
    return travel_seconds(fabric, paths) + np.bincount(_owners(paths), weights=latency, minlength=len(paths))


def _owners(paths: Paths) -> Any:
    return np.repeat(np.arange(len(paths)), np.diff(paths.first))


def choose_step_seconds(fabric: Fabric, paths: Paths) -> float:
    """Return half of the shortest link time, so that an event at one end reaches the other in a later
    step."""
    used = np.unique(paths.link)
    shortest = fabric.latency_seconds[used] + PACKET_BYTES / fabric.bytes_per_second[used]
    return max(float(shortest.min()) / 2, 1e-8)


def make_net(fabric: Fabric, paths: Paths, step_seconds: float) -> Net:
    """Return the constants of a fabric and its paths."""
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
    """Return empty queues with room for the longest wait that the flows can cause. Raises `BadInputError` if
    that needs more than ``max_bytes``."""
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
        arriving=np.zeros((ring, num_places + len(flows))),
        batch=np.zeros((depth, num_places)),
        left=np.zeros((depth, num_links)),
        arrived_at=np.zeros((depth, num_links)),
        head=np.zeros(num_links, dtype=np.int64),
        count=np.zeros(num_links, dtype=np.int64),
        queued=zeros[0],
        held=zeros[1],
        wait=zeros[2],
        used=zeros[3],
        is_paused=np.zeros(num_links, dtype=np.bool_),
        is_pause_requested=np.zeros(num_links, dtype=np.bool_),
        order=np.zeros((ring, num_links), dtype=np.int8),
        paused_seconds=zeros[4],
        most_held=zeros[5],
    )


def make_senders(net: Net, control: Control, start_packets: float | None) -> Senders:
    """Return senders at the rate of their port with a window of one round trip, as NICs start, or with
    ``start_packets`` in flight in the first round trip."""
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
        cnp_at=np.full(num_flows, -1.0),
        aged_at=zeros[0],
        raised_at=zeros[1],
        since=zeros[2],
        timer_stage=zeros[3],
        byte_stage=zeros[4],
        is_waiting=np.zeros(num_flows, dtype=np.bool_),
        partial_packets=zeros[5],
        demand=zeros[6],
        sent=zeros[7],
        arrived=zeros[8],
        acked=zeros[9],
        finish=np.full(num_flows, np.nan),
        signals=np.zeros((int(net.back.max()) + 2, 4, num_flows)),
    )


@compiled_inside
def step_queues(net: Net, queues: Queues, settings: Any, step: int) -> float:
    """Advance all links by one step; return the bytes in the deepest queue of a switch."""
    slot = step % len(queues.arriving)
    deepest = 0.0
    for link in range(len(net.rate)):
        _apply_pause_order(queues, link, slot)
        if net.start[link] < net.start[link + 1]:
            if queues.is_paused[link]:
                queues.paused_seconds[link] += net.step_seconds
            if net.from_switch[link]:
                _enqueue_arrivals(net, queues, link, slot, step)
                _serve(net, queues, link, step)
                deepest = max(deepest, queues.queued[link])
    for link in range(len(net.rate)):
        if net.start[link] < net.start[link + 1]:
            _update_pause_request(net, queues, link, settings, step)
    return deepest


@compiled_inside
def _apply_pause_order(queues: Queues, link: int, slot: int) -> None:
    if queues.order[slot, link] != 0:
        queues.is_paused[link] = queues.order[slot, link] > 0
        queues.order[slot, link] = 0


@compiled_inside
def _enqueue_arrivals(net: Net, queues: Queues, link: int, slot: int, step: int) -> None:
    """Append the bytes that arrive in this step as one batch; without room for it, add them to the last
    batch."""
    total = 0.0
    for index in range(net.start[link], net.start[link + 1]):
        total += queues.arriving[slot, net.on[index]]
    if total <= 0:
        return
    depth = len(queues.left)
    if queues.count[link] < depth:
        queues.count[link] += 1
        queues.arrived_at[(queues.head[link] + queues.count[link] - 1) % depth, link] = (
            step * net.step_seconds
        )
    at = (queues.head[link] + queues.count[link] - 1) % depth
    for index in range(net.start[link], net.start[link + 1]):
        place = net.on[index]
        amount = queues.arriving[slot, place]
        if amount > 0:
            queues.arriving[slot, place] = 0.0
            queues.batch[at, place] += amount
            queues.held[net.link[place - 1]] += amount
    queues.left[at, link] += total
    queues.queued[link] += total


@compiled_inside
def _serve(net: Net, queues: Queues, link: int, step: int) -> None:
    full = net.rate[link] * net.step_seconds
    room = 0.0 if queues.is_paused[link] else full
    while room > 1e-9 * full and queues.count[link] > 0:
        at = queues.head[link]
        left = queues.left[at, link]
        taken = min(left, room)
        if taken > left * (1 - 1e-12):
            taken = left
            queues.head[link] = (at + 1) % len(queues.left)
            queues.count[link] -= 1
        _send_on(net, queues, link, at, taken / left, step)
        queues.left[at, link] = left - taken
        queues.queued[link] -= taken
        queues.wait[link] = step * net.step_seconds - queues.arrived_at[at, link]
        room -= taken
    queues.used[link] = 0.0 if queues.is_paused[link] else 1 - max(room, 0.0) / full
    if queues.count[link] == 0:
        queues.queued[link] = 0.0
        queues.wait[link] = 0.0


@compiled_inside
def _send_on(net: Net, queues: Queues, link: int, at: int, share: float, step: int) -> None:
    """Move a share of a batch to the next places of its flows."""
    slot = (step + net.ahead[link]) % len(queues.arriving)
    for index in range(net.start[link], net.start[link + 1]):
        place = net.on[index]
        amount = queues.batch[at, place]
        if amount > 0:
            moved = amount * share
            queues.batch[at, place] = amount - moved if share < 1 else 0.0
            queues.arriving[slot, next_place(net, place)] += moved
            queues.held[net.link[place - 1]] -= moved


@compiled_inside
def next_place(net: Net, place: int) -> int:
    """Return the place after this one on the flow's path."""
    flow = net.flow[place]
    return place + 1 if place + 1 < net.first[flow + 1] else len(net.link) + flow


@compiled_inside
def _update_pause_request(net: Net, queues: Queues, link: int, settings: Any, step: int) -> None:
    """Have the receiver of a link send a PFC frame that pauses or resumes the sender. The frame arrives after
    the link's latency."""
    held = queues.held[link]
    queues.most_held[link] = max(queues.most_held[link], held)
    slot = (step + net.ahead[link]) % len(queues.order)
    if not queues.is_pause_requested[link] and held > settings.pfc_xoff_bytes:
        queues.is_pause_requested[link] = True
        queues.order[slot, link] = 1
    elif queues.is_pause_requested[link] and held < max(settings.pfc_xon_bytes, 1.0):
        queues.is_pause_requested[link] = False
        queues.order[slot, link] = -1


@compiled_inside
def mark_probability(settings: SwitchSettings, num_bytes: float) -> float:
    """Return the probability that a packet is marked that leaves a queue of ``num_bytes``."""
    if num_bytes <= settings.ecn_min_bytes:
        return 0.0
    if num_bytes > settings.ecn_max_bytes:
        return 1.0
    span = settings.ecn_max_bytes - settings.ecn_min_bytes
    return settings.ecn_max_ratio * (num_bytes - settings.ecn_min_bytes) / span
