"""Flows end to end: what a receiver answers, what a sender resends, and when it gives up.

The receiver answers each packet at once. Answers travel back in a class of their own: they never queue, and
are lost only on a link that is down.

Go-back-N (InfiniBand reliable connection): the receiver discards a packet out of order and refuses it once,
until the missing one arrives; the sender goes back to that. Selective repeat (as in IRN, SIGCOMM 2018): the
receiver keeps it and reports what it has. Paths are first in, first out: a packet that was sent before an
acknowledged one and is not known to have arrived is lost, and is resent.

A timer runs while packets are in flight and restarts with each progress. When it fires, all packets in
flight are resent and the timeout grows by `backoff`; after `retries` timeouts in a row the flow aborts (a
queue pair in error).
"""

from typing import Any

from myriad.network.packets.packet_controls import DCQCN, on_ack, on_cnp, on_loss, start_flow
from myriad.network.packets.packet_links import discard, is_down, push
from myriad.network.packets.packet_nics import ARRIVED, KNOWN, resume_flow
from myriad.network.packets.packet_state import (
    ABORTED,
    BLOCKED,
    DONE,
    NONE,
    PACED,
    UNSTARTED,
    clock_of,
    compiled,
    flow_at,
    hop_at,
    knobs_of,
    known_at,
    lost_at,
    packet_at,
    pipe_at,
    sent_at,
)

__all__ = ["acknowledge", "fire_common_timer", "receive", "time_out", "wake"]


@compiled
def wake(s: Any, f: Any, now: Any) -> Any:
    """Start a flow, or let it send again at its rate. Return the link with work, or NONE."""
    flow = flow_at(s, f)
    if flow.state == UNSTARTED:
        flow.start_ps = now
        start_flow(flow, knobs_of(s), now)
        if flow.num_packets == 0:
            flow.state = DONE
            clock_of(s).num_open -= 1
            _complete_flow(s, f, now)
            return NONE
    elif flow.state != PACED or flow.wake_ps != now:
        return NONE
    flow.state = BLOCKED
    return resume_flow(s, f, now)


@compiled
def receive(s: Any, p: Any, now: Any) -> None:
    """Receive a packet at its target; its record becomes the answer."""
    packet = packet_at(s, p)
    flow, knobs = flow_at(s, packet.flow), knobs_of(s)
    if not _accept(s, flow, packet, knobs.is_selective):
        discard(s, p)
        return
    if packet.is_marked:
        flow.num_marks += 1
        if knobs.kind == DCQCN:
            # The answer carries the CNP; a mark within the CNP interval is not reported.
            packet.is_marked = now - flow.cnp_ps >= knobs.cnp_interval_ps
            if packet.is_marked:
                flow.cnp_ps = now
    if flow.num_received == flow.num_packets and flow.finish_ps < 0:
        _complete_flow(s, packet.flow, now)
    if knobs.has_outages and _is_answer_lost(s, flow, now):
        discard(s, p)
        return
    _send_answer(s, p, now)


@compiled
def _send_answer(s: Any, p: Any, now: Any) -> None:
    packet = packet_at(s, p)
    flow = flow_at(s, packet.flow)
    packet.acknowledged, packet.due_ps, packet.next = flow.received, now + flow.reply_ps, NONE
    packet.is_answer = 1
    pipe = pipe_at(s, flow.pipe)
    if pipe.head == NONE:
        pipe.head = p
        push(s, packet.due_ps, s.first_answer + flow.pipe)
    else:
        packet_at(s, pipe.tail).next = p
    pipe.tail = p


@compiled
def _accept(s: Any, flow: Any, packet: Any, is_selective: Any) -> Any:
    """Update the receiver with a packet; return whether it sends an answer."""
    sequence = packet.sequence
    if flow.state == ABORTED:
        flow.num_discarded += 1
        return False
    if sequence < flow.received:
        flow.num_discarded += 1
        return True
    if is_selective:
        _store_out_of_order(s, flow, sequence)
        return True
    if sequence == flow.received:
        flow.received += 1
        flow.num_received += 1
        flow.is_refused = 0
        return True
    flow.num_discarded += 1
    if flow.is_refused:
        return False
    flow.is_refused = packet.is_refusal = 1
    return True


@compiled
def _store_out_of_order(s: Any, flow: Any, sequence: Any) -> None:
    base, mask = flow.ring, flow.ring_mask
    if known_at(s, base + (sequence & mask)).value & ARRIVED:
        flow.num_discarded += 1
        return
    known_at(s, base + (sequence & mask)).value |= ARRIVED
    flow.num_received += 1
    while flow.received < flow.num_packets and known_at(s, base + (flow.received & mask)).value & ARRIVED:
        known_at(s, base + (flow.received & mask)).value &= KNOWN
        flow.received += 1


@compiled
def _complete_flow(s: Any, f: Any, now: Any) -> None:
    """Finish a flow that has fully arrived, and schedule the flows that wait for it."""
    flow = flow_at(s, f)
    flow.finish_ps = now
    child = flow.first_child
    while child != NONE:
        push(s, max(now, flow_at(s, child).start_ps), s.first_wake + child)
        child = flow_at(s, child).next_child


@compiled
def _is_answer_lost(s: Any, flow: Any, now: Any) -> Any:
    """Return whether an answer meets a link that is down. Answers are short, so one moment is checked."""
    for hop in range(flow.first_hop, flow.last_hop + 1):
        if is_down(s, hop_at(s, hop).value ^ 1, clock_of(s).now_ps, now, now):
            return True
    return False


@compiled
def acknowledge(s: Any, number: Any, now: Any) -> Any:
    """Deliver a pipe's first answer to its flow's sender. Return the link with work, or NONE."""
    knobs, pipe = knobs_of(s), pipe_at(s, number)
    p = pipe.head
    packet = packet_at(s, p)
    f = packet.flow
    flow = flow_at(s, f)
    pipe.head = packet.next
    if packet.next != NONE:
        push(s, packet_at(s, packet.next).due_ps, s.first_answer + number)
    discard(s, p)
    if flow.state == DONE or flow.state == ABORTED:
        return NONE
    num_new, is_loss = _apply_answer(s, flow, packet, knobs.is_selective)
    if num_new > 0:
        flow.num_retries, flow.timeout_ps = 0, knobs.timeout_ps
        flow.deadline_ps = now + flow.timeout_ps
    if knobs.kind == DCQCN:
        if packet.is_marked:
            on_cnp(flow, knobs, now)
    elif is_loss:
        on_loss(flow, knobs, now)
    else:
        on_ack(s, f, p, num_new, now)
    if flow.acked == flow.num_packets:
        flow.state = DONE
        clock_of(s).num_open -= 1
        return NONE
    return resume_flow(s, f, now)


@compiled
def _apply_answer(s: Any, flow: Any, packet: Any, is_selective: Any) -> Any:
    """Update the sender with an answer; return the number of newly acknowledged packets and whether one is
    lost."""
    if is_selective:
        return _apply_selective_answer(s, flow, packet)
    num_new = max(0, packet.acknowledged - flow.acked)
    flow.acked += num_new
    flow.next_sequence = max(flow.next_sequence, flow.acked)
    if packet.is_refusal and packet.acknowledged == flow.acked:
        flow.next_sequence = flow.acked
        return num_new, True
    return num_new, False


@compiled
def _apply_selective_answer(s: Any, flow: Any, packet: Any) -> Any:
    base, mask = flow.ring, flow.ring_mask
    num_new, is_loss = 0, False
    place = base + (packet.sequence & mask)
    if packet.sequence >= flow.acked and not known_at(s, place).value & KNOWN:
        known_at(s, place).value |= KNOWN
        num_new = 1
    while flow.acked < packet.acknowledged or (
        flow.acked < flow.most_sequence and known_at(s, base + (flow.acked & mask)).value & KNOWN
    ):
        known_at(s, base + (flow.acked & mask)).value &= ARRIVED
        flow.acked += 1
    while flow.first_sent <= packet.order:
        is_loss |= _pop_in_flight(s, flow)
    return num_new, is_loss


@compiled
def _pop_in_flight(s: Any, flow: Any) -> Any:
    """Remove the oldest packet in flight; queue it for resending if it is not known to have arrived. Return
    whether it is lost."""
    base, mask = flow.ring, flow.ring_mask
    sequence = sent_at(s, base + (flow.first_sent & mask)).value
    flow.first_sent += 1
    if sequence < flow.acked or known_at(s, base + (sequence & mask)).value & KNOWN:
        return False
    lost_at(s, base + (flow.next_lost & mask)).value = sequence
    flow.next_lost += 1
    return True


@compiled
def fire_common_timer(s: Any, now: Any) -> Any:
    """Fire the first timer of the common list. Return the link with work, or NONE."""
    clock = clock_of(s)
    f = clock.timer_head
    following = flow_at(s, f).next_timer
    while following != NONE and flow_at(s, following).state >= DONE:
        following = flow_at(s, following).next_timer
    clock.timer_head = following
    if following != NONE:
        push(s, flow_at(s, following).timer_ps, s.common_timer)
    return time_out(s, f, now)


@compiled
def time_out(s: Any, f: Any, now: Any) -> Any:
    """Handle a flow's timer. Return the link with work, or NONE."""
    flow, knobs = flow_at(s, f), knobs_of(s)
    flow.has_timer = 0
    if flow.state == DONE or flow.state == ABORTED:
        return NONE
    in_flight = flow.next_sent - flow.first_sent if knobs.is_selective else flow.next_sequence - flow.acked
    if in_flight == 0:
        return NONE
    if flow.deadline_ps > now:
        flow.has_timer = 1
        push(s, flow.deadline_ps, s.first_timeout + f)
        return NONE
    flow.num_timeouts += 1
    flow.num_retries += 1
    if flow.num_retries > knobs.retries:
        flow.state = ABORTED
        clock_of(s).num_open -= 1
        return NONE
    flow.timeout_ps = int(flow.timeout_ps * knobs.backoff)
    if knobs.is_selective:
        while flow.first_sent < flow.next_sent:
            _pop_in_flight(s, flow)
    else:
        flow.next_sequence = flow.acked
    on_loss(flow, knobs, now)
    return resume_flow(s, f, now)
