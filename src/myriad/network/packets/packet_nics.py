"""NICs: which flow sends next.

A NIC has no queue. When its link is free, the next ready flow sends one packet if its window and its rate
allow it, and moves behind the other ready flows: at once, or when its rate allows the next packet. A flow
whose window is full, or that has nothing to send, is blocked until an answer or its timer.
"""

from typing import Any

from myriad.network.packets.packet_controls import DCQCN, before_send, next_check_ps
from myriad.network.packets.packet_links import push
from myriad.network.packets.packet_state import (
    BLOCKED,
    NONE,
    PACED,
    READY,
    clock_of,
    compiled,
    flow_at,
    knobs_of,
    known_at,
    link_at,
    lost_at,
    packet_at,
    sent_at,
)

__all__ = ["ARRIVED", "KNOWN", "resume_flow", "take_packet"]

ARRIVED, KNOWN = 1, 2
"""Selective repeat, flags of a packet: the receiver has it; the sender knows that."""


@compiled
def _may_send(flow: Any, is_selective: Any) -> Any:
    if is_selective:
        if flow.next_sent - flow.first_sent >= flow.limit_packets:
            return False
        if flow.first_lost != flow.next_lost:
            return True
        return flow.next_sequence < flow.num_packets and flow.next_sequence - flow.acked <= flow.ring_mask
    return flow.next_sequence < flow.num_packets and flow.next_sequence - flow.acked < flow.limit_packets


@compiled
def _append_ready(s: Any, f: Any) -> None:
    """Append flow f to the ready flows of its NIC."""
    flow = flow_at(s, f)
    link = link_at(s, flow.nic)
    flow.state, flow.next_ready = READY, NONE
    if link.ready_head == NONE:
        link.ready_head = f
    else:
        flow_at(s, link.ready_tail).next_ready = f
    link.ready_tail = f


@compiled
def resume_flow(s: Any, f: Any, now: Any) -> Any:
    """Make a blocked flow ready or paced if it may send now. Return the link with work, or NONE."""
    flow = flow_at(s, f)
    if flow.state == PACED:
        return _wake_earlier(s, f, now)
    if flow.state != BLOCKED or not _may_send(flow, knobs_of(s).is_selective):
        return NONE
    if flow.next_send_ps > now:
        flow.state = PACED
        flow.wake_ps = next_check_ps(flow, knobs_of(s), now)
        push(s, flow.wake_ps, s.first_wake + f)
        return NONE
    _append_ready(s, f)
    return flow.nic


@compiled
def _wake_earlier(s: Any, f: Any, now: Any) -> Any:
    """Wake a paced flow earlier if its rate has risen; the old wake event stays and has no effect. Return
    the link with work, or NONE."""
    flow = flow_at(s, f)
    if flow.next_send_ps >= flow.wake_ps:
        return NONE
    if flow.next_send_ps <= now:
        _append_ready(s, f)
        return flow.nic
    flow.wake_ps = flow.next_send_ps
    push(s, flow.wake_ps, s.first_wake + f)
    return NONE


@compiled
def take_packet(s: Any, out: Any, now: Any) -> Any:
    """Return a packet of the next ready flow, or NONE."""
    link, knobs = link_at(s, out), knobs_of(s)
    while link.ready_head != NONE:
        f = link.ready_head
        flow = flow_at(s, f)
        link.ready_head = flow.next_ready
        if flow.state != READY:
            continue
        flow.state = BLOCKED
        sequence = _next_to_send(s, flow, knobs.is_selective)
        if sequence == NONE:
            continue
        p = _make_packet(s, f, sequence, now)
        num_bytes = packet_at(s, p).num_bytes
        if knobs.kind == DCQCN:
            before_send(flow, knobs, num_bytes, now)
        flow.next_send_ps = now + int(num_bytes * flow.pace_ps_per_byte)
        free = now + int(num_bytes * link.ps_per_byte)
        resume_flow(s, f, free)
        return p
    return NONE


@compiled
def _next_to_send(s: Any, flow: Any, is_selective: Any) -> Any:
    """Return the next sequence number and count it as sent; NONE if the window is full or all is sent."""
    if not _may_send(flow, is_selective):
        return NONE
    sequence = flow.next_sequence
    if not is_selective:
        flow.next_sequence += 1
        return sequence
    base, mask = flow.ring, flow.ring_mask
    while flow.first_lost != flow.next_lost:
        sequence = lost_at(s, base + (flow.first_lost & mask)).value
        flow.first_lost += 1
        if sequence >= flow.acked and not known_at(s, base + (sequence & mask)).value & KNOWN:
            sent_at(s, base + (flow.next_sent & mask)).value = sequence
            flow.next_sent += 1
            return sequence
    if flow.next_sequence >= flow.num_packets or flow.next_sequence - flow.acked > mask:
        return NONE
    sequence = flow.next_sequence
    flow.next_sequence += 1
    sent_at(s, base + (flow.next_sent & mask)).value = sequence
    flow.next_sent += 1
    return sequence


@compiled
def _make_packet(s: Any, f: Any, sequence: Any, now: Any) -> Any:
    clock, flow, knobs = clock_of(s), flow_at(s, f), knobs_of(s)
    p = clock.free_head
    packet = packet_at(s, p)
    clock.free_head = packet.next
    clock.num_free -= 1
    packet.flow, packet.sequence, packet.hop, packet.sent_ps = f, sequence, flow.first_hop, now
    packet.num_bytes = flow.last_bytes if sequence == flow.num_packets - 1 else knobs.full_bytes
    packet.order, packet.is_marked, packet.is_refusal, packet.is_answer = flow.next_sent - 1, 0, 0, 0
    flow.num_sent += 1
    if sequence < flow.most_sequence:
        flow.num_resent += 1
    else:
        flow.most_sequence = sequence + 1
    if not flow.has_timer or sequence == flow.acked or flow.next_sent - flow.first_sent == 1:
        flow.deadline_ps = now + flow.timeout_ps
    if not flow.has_timer:
        flow.has_timer = 1
        _set_timer(s, f)
    return p


@compiled
def _set_timer(s: Any, f: Any) -> None:
    """Set a flow's timer. Nearly all timers run equally long, so they fire in the order in which they were
    set: one list, and only its first is an event. A timer that a timeout has lengthened is an event of its
    own."""
    clock, flow = clock_of(s), flow_at(s, f)
    if flow.timeout_ps != knobs_of(s).timeout_ps:
        push(s, flow.deadline_ps, s.first_timeout + f)
        return
    flow.timer_ps, flow.next_timer = flow.deadline_ps, NONE
    if clock.timer_head == NONE:
        clock.timer_head = f
        push(s, flow.timer_ps, s.common_timer)
    else:
        flow_at(s, clock.timer_tail).next_timer = f
    clock.timer_tail = f
