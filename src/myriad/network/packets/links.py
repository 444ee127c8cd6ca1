"""Switches and wires: output queues with ECN marks, a shared buffer, pauses by ingress, loss and down times.

A switch has one queue per link that leaves it, first in, first out. A packet counts in the queue from its
arrival until its first bit is sent, and so long also against the link it came by: over `xoff_bytes` that
link's sender is told to stop, below `xon_bytes` to go on (PFC, IEEE 802.1Qbb). A stopped link ends the
packet it is sending; what waits for it waits, whoever sent it and wherever it goes: head-of-line blocking
is not modelled, it happens.

A packet that leaves more than Kmin in its queue is marked with the probability of the settings, by the queue
of that moment (as in HPCC's simulator, switch-node.cc: a mark does not wait in the queue that it tells of,
which is what ECN has over delay: Zhu et al., CoNEXT 2016). One that the buffer has no room for is dropped.
One that is being sent while the link is down, or that chance picks, is lost on the wire.
"""

from typing import Any

from myriad.network.packets.heap import push
from myriad.network.packets.records import NONE, NUM_FRAMES
from myriad.network.packets.state import (
    bin_at,
    clock_of,
    compiled,
    frame_at,
    hop_at,
    knobs_of,
    link_at,
    outage_at,
    packet_at,
    spent_at,
    switch_at,
)

__all__ = ["discard", "enqueue", "is_down", "take_queued", "uniform"]


@compiled
def uniform(clock: Any) -> Any:
    """A random number in [0, 1): splitmix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    clock.random += 0x9E3779B97F4A7C15
    mixed = clock.random
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    return ((mixed ^ (mixed >> 31)) >> 11) * (1.0 / (1 << 53))


@compiled
def discard(s: Any, p: Any) -> None:
    """Packet p's record can be used again."""
    clock = clock_of(s)
    packet = packet_at(s, p)
    packet.next, packet.flow = clock.free_head, NONE
    clock.free_head = p
    clock.num_free += 1


@compiled
def enqueue(s: Any, came_by: Any, p: Any, now: Any) -> Any:
    """Packet p has come to the end of a link: into the queue of its next. Says which link has work, or
    NONE."""
    knobs, packet, came = knobs_of(s), packet_at(s, p), link_at(s, came_by)
    packet.hop += 1
    out = hop_at(s, packet.hop).value
    link, switch = link_at(s, out), switch_at(s, came.to_switch)
    if switch.used_bytes + packet.num_bytes > knobs.buffer_bytes:
        link.num_drops += 1
        discard(s, p)
        return NONE
    switch.used_bytes += packet.num_bytes
    came.held_bytes += packet.num_bytes
    packet.came_by = came_by
    if came.held_bytes > knobs.xoff_bytes and not came.is_pausing:
        came.is_pausing = 1
        _tell(s, came_by, now)
    _count(s, out, now)
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
    """The first packet of a queue leaves it, or NONE."""
    link = link_at(s, out)
    p = link.queue_head
    if p == NONE:
        return NONE
    packet = packet_at(s, p)
    came = link_at(s, packet.came_by)
    link.queue_head = packet.next
    _count(s, out, now)
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
        _tell(s, packet.came_by, now)
    return p


@compiled
def _is_marked(clock: Any, knobs: Any, queue_bytes: Any) -> Any:
    if queue_bytes > knobs.ecn_max_bytes:
        return True
    share = (queue_bytes - knobs.ecn_min_bytes) / (knobs.ecn_max_bytes - knobs.ecn_min_bytes)
    return uniform(clock) < share * knobs.ecn_max_ratio


@compiled
def _count(s: Any, out: Any, now: Any) -> None:
    """Until now the queue was as long as it is."""
    link = link_at(s, out)
    grain = min(link.queue_bytes >> s.grain_bits, s.num_grains - 1)
    spent_at(s, out * s.num_bins + bin_at(s, grain).value).value += now - link.seen_ps
    link.seen_ps = now


@compiled
def _tell(s: Any, came_by: Any, now: Any) -> None:
    """A frame to the sender of a link: stop, or go on. They alternate: where no more frames fit on the
    wire, one and its opposite before it cancel out."""
    came = link_at(s, came_by)
    if came.num_frames == NUM_FRAMES:
        came.num_frames -= 1
        return
    due = now + came.frame_ps
    frame_at(s, came_by * NUM_FRAMES + (came.frame_first + came.num_frames) % NUM_FRAMES).value = due
    came.num_frames += 1
    if came.num_frames == 1:
        push(s, due, 2 * s.num_links + came_by)


@compiled
def is_down(s: Any, out: Any, now: Any, start: Any, end: Any) -> Any:
    """Whether a link is down at some time from ``start`` to ``end``; ``now`` is not after ``start``."""
    link = link_at(s, out)
    while link.outage < link.last_outage and outage_at(s, link.outage).until_ps <= now:
        link.outage += 1
    for index in range(link.outage, link.last_outage):
        if outage_at(s, index).from_ps > end:
            break
        if outage_at(s, index).until_ps > start:
            return True
    return False
