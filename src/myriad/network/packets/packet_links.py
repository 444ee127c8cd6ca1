"""Switches and wires: output queues with ECN marks, a shared buffer, pauses by ingress, loss, down times; and
the heap of pending events.

A switch has one first-in, first-out queue for each link that leaves it. A packet counts in the queue from
its arrival until its first bit is sent, and for as long also against its ingress link: above `xoff_bytes`
the sender of that link is paused, below `xon_bytes` it resumes (PFC, IEEE 802.1Qbb). A paused link finishes
the packet that it is sending. All packets behind wait, whatever their source and target: head-of-line
blocking is not modelled, it happens.

A packet that leaves more than Kmin in its queue is marked with the probability of the settings, by the queue
at that moment (as in HPCC's simulator, switch-node.cc: the mark does not wait in the queue that it reports,
which is the advantage of ECN over delay: Zhu et al., CoNEXT 2016). A packet that does not fit in the buffer
is dropped. A packet is lost on the wire if the link is down while it is sent, or by chance.

Pending events are integers in a heap: the time and, in the low bits, the slot. A slot is one thing that can
happen next: link 3's transmitter becomes free, link 3's first packet arrives, flow 7's first acknowledgement
arrives. Later events of a slot wait in a list of their own. So the heap holds a few entries for each link and
flow, however many packets there are, and nothing is removed from its middle. The slot breaks ties: the same
input gives the same run. Each slot is pending once, except for flows that wake earlier than scheduled: the
late event stays (`FLOW.wake_ps` says which counts), and the heap grows if there are many of those.

Most events cause their own successor. So a removed root is left as a gap, and the next push fills it and
sinks once, where a pop and a push would walk the heap twice. Nodes have four children: half the depth, and
the four lie in one cache line.
"""

from typing import Any

from myriad.network.packets.packet_state import (
    NONE,
    NUM_FRAMES,
    bin_at,
    clock_of,
    compiled,
    frame_at,
    hop_at,
    key_at,
    knobs_of,
    link_at,
    outage_at,
    packet_at,
    spent_at,
    switch_at,
)

__all__ = ["close_gap", "discard", "enqueue", "is_down", "push", "take_queued", "uniform"]


@compiled
def uniform(clock: Any) -> Any:
    """Return a random number in [0, 1): splitmix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    clock.random += 0x9E3779B97F4A7C15
    mixed = clock.random
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    return ((mixed ^ (mixed >> 31)) >> 11) * (1.0 / (1 << 53))


@compiled
def discard(s: Any, p: Any) -> None:
    """Free packet p's record."""
    clock = clock_of(s)
    packet = packet_at(s, p)
    packet.next, packet.flow = clock.free_head, NONE
    clock.free_head = p
    clock.num_free += 1


@compiled
def enqueue(s: Any, ingress: Any, p: Any, now: Any) -> Any:
    """Append packet p, at the end of link ``ingress``, to the queue of its next link. Return the link with
    work, or NONE."""
    knobs, packet, came = knobs_of(s), packet_at(s, p), link_at(s, ingress)
    packet.hop += 1
    out = hop_at(s, packet.hop).value
    link, switch = link_at(s, out), switch_at(s, came.to_switch)
    if switch.used_bytes + packet.num_bytes > knobs.buffer_bytes:
        link.num_drops += 1
        discard(s, p)
        return NONE
    switch.used_bytes += packet.num_bytes
    came.held_bytes += packet.num_bytes
    packet.ingress = ingress
    if came.held_bytes > knobs.xoff_bytes and not came.is_pausing:
        came.is_pausing = 1
        _send_pause_frame(s, ingress, now)
    _count_queue_time(s, out, now)
    link.queue_bytes += packet.num_bytes
    link.most_queue_bytes = max(link.most_queue_bytes, link.queue_bytes)
    packet.next = NONE
    if link.queue_head == NONE:
        link.queue_head = p
    else:
        packet_at(s, link.queue_tail).next = p
    link.queue_tail = p
    return out


@compiled
def take_queued(s: Any, out: Any, now: Any) -> Any:
    """Remove and return the first packet of a queue, or NONE."""
    link = link_at(s, out)
    p = link.queue_head
    if p == NONE:
        return NONE
    packet = packet_at(s, p)
    came = link_at(s, packet.ingress)
    link.queue_head = packet.next
    _count_queue_time(s, out, now)
    link.queue_bytes -= packet.num_bytes
    came.held_bytes -= packet.num_bytes
    if link.queue_bytes > knobs_of(s).ecn_min_bytes and _is_marked(
        clock_of(s), knobs_of(s), link.queue_bytes
    ):
        packet.is_marked = 1
        link.num_marks += 1
    switch_at(s, link.from_switch).used_bytes -= packet.num_bytes
    if came.is_pausing and came.held_bytes <= knobs_of(s).xon_bytes:
        came.is_pausing = 0
        _send_pause_frame(s, packet.ingress, now)
    return p


@compiled
def _is_marked(clock: Any, knobs: Any, queue_bytes: Any) -> Any:
    if queue_bytes > knobs.ecn_max_bytes:
        return True
    share = (queue_bytes - knobs.ecn_min_bytes) / (knobs.ecn_max_bytes - knobs.ecn_min_bytes)
    return uniform(clock) < share * knobs.ecn_max_ratio


@compiled
def _count_queue_time(s: Any, out: Any, now: Any) -> None:
    """Add the time since the last change to the histogram of the queue's length."""
    link = link_at(s, out)
    grain = min(link.queue_bytes >> s.grain_bits, s.num_grains - 1)
    spent_at(s, out * s.num_bins + bin_at(s, grain).value).value += now - link.seen_ps
    link.seen_ps = now


@compiled
def _send_pause_frame(s: Any, ingress: Any, now: Any) -> None:
    """Send a pause or resume frame to the sender of a link. The two alternate: if no more frames fit on the
    wire, this one and its opposite before it cancel out."""
    came = link_at(s, ingress)
    if came.num_frames == NUM_FRAMES:
        came.num_frames -= 1
        return
    due = now + came.frame_ps
    frame_at(s, ingress * NUM_FRAMES + (came.frame_first + came.num_frames) % NUM_FRAMES).value = due
    came.num_frames += 1
    if came.num_frames == 1:
        push(s, due, 2 * s.num_links + ingress)


@compiled
def is_down(s: Any, out: Any, now: Any, start: Any, end: Any) -> Any:
    """Return whether a link is down at some time from ``start`` to ``end``; ``now`` is not after
    ``start``."""
    link = link_at(s, out)
    while link.outage < link.last_outage and outage_at(s, link.outage).until_ps <= now:
        link.outage += 1
    for index in range(link.outage, link.last_outage):
        if outage_at(s, index).from_ps > end:
            break
        if outage_at(s, index).until_ps > start:
            return True
    return False


@compiled
def push(s: Any, time_ps: Any, slot: Any) -> None:
    """Schedule ``slot`` at ``time_ps``."""
    clock = clock_of(s)
    key = (min(time_ps, clock.last_ps) << clock.slot_bits) | slot
    if clock.has_gap:
        clock.has_gap = 0
        _sink(s, key, clock.num_pending)
        return
    place = clock.num_pending
    clock.num_pending = place + 1
    while place > 0:
        above = (place - 1) >> 2
        parent = key_at(s, above).value
        if parent <= key:
            break
        key_at(s, place).value = parent
        place = above
    key_at(s, place).value = key


@compiled
def close_gap(s: Any) -> None:
    """Fill the gap at the root after an event without a successor."""
    clock = clock_of(s)
    if clock.has_gap:
        clock.has_gap = 0
        clock.num_pending -= 1
        if clock.num_pending > 0:
            _sink(s, key_at(s, clock.num_pending).value, clock.num_pending)


@compiled
def _sink(s: Any, key: Any, count: Any) -> None:
    place = 0
    while True:
        child = (place << 2) + 1
        if child >= count:
            break
        place_of_least, least = child, key_at(s, child).value
        for other in range(child + 1, min(child + 4, count)):
            if key_at(s, other).value < least:
                place_of_least, least = other, key_at(s, other).value
        if least >= key:
            break
        key_at(s, place).value = least
        place = place_of_least
    key_at(s, place).value = key
