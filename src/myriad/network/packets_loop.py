"""The loop of a packet-level simulation: the next event, and the link that it gives work to.

An event is one entry of the heap, taken out in the order of time. There are six:

    free     a transmitter has sent a packet, and something waits for it
    arrival  a packet is at the switch at the end of a link
    frame    a switch's word to stop, or to go on, is at the sender of a link
    answer   an acknowledgement is at the sender of its flow
    wake     a flow begins, or may send again at its rate
    timeout  a flow's timer rings

A packet over h links with no queue anywhere is h - 1 arrivals and one answer; each queue that it waits in, NICs
included, is one `free` more, each packet of a flow below line rate one `wake`. Arrival at the target is no event:
nothing can come between it and the last transmitter, so it is settled there. So is the start of a packet on a
link that is free.

Whatever happens, it ends in at most one link that may have work. That link is served at one place.
"""

from typing import Any

from myriad.network.packets_flows import acknowledge, receive, take_turn, time_out, wake
from myriad.network.packets_heap import close_gap, push
from myriad.network.packets_links import discard, enqueue, is_down, take_queued, uniform
from myriad.network.packets_state import NONE, compiled, inlined

__all__ = ["FINISHED", "FULL", "PAUSED", "run"]

FINISHED, PAUSED, FULL = range(3)
"""Nothing is left to do; the time asked for is reached; there are no packet records left."""
_SPARE = 4
"""Records that one event can need."""


@compiled
def run(s: Any, until_ps: Any) -> Any:
    """Events up to a time. Says why it stopped."""
    clock, heap = s.clock[0], s.heap
    num_links, num_flows = s.links.shape[0], s.flows.shape[0]
    slot_mask = (1 << clock.slot_bits) - 1
    while clock.num_pending > 0 and clock.num_open > 0:
        if clock.num_free < _SPARE:
            return FULL
        now = heap[0] >> clock.slot_bits
        if now > until_ps:
            return PAUSED
        slot = heap[0] & slot_mask
        clock.now_ps = now
        clock.has_gap = 1
        clock.num_events += 1
        if slot < num_links:
            s.links[slot].is_waiting = 0
            out = slot
        elif slot < 2 * num_links:
            out = enqueue(s, slot - num_links, _take_arrived(s, slot - num_links), now)
        elif slot < 3 * num_links:
            out = _toggle(s, slot - 2 * num_links, now)
        elif slot < 3 * num_links + num_flows:
            out = acknowledge(s, slot - 3 * num_links, now)
        elif slot < 3 * num_links + 2 * num_flows:
            out = wake(s, slot - 3 * num_links - num_flows, now)
        else:
            out = time_out(s, slot - 3 * num_links - 2 * num_flows, now)
        if out != NONE:
            _serve(s, out, now)
        close_gap(heap, clock)
    return FINISHED


@inlined
def _take_arrived(s: Any, came_by: Any) -> Any:
    """The first packet on a wire is at its end."""
    link = s.links[came_by]
    p = link.wire_head
    link.wire_head = s.packets[p].next
    if link.wire_head != NONE:
        push(s.heap, s.clock[0], s.packets[link.wire_head].due_ps, s.links.shape[0] + came_by)
    return p


@inlined
def _toggle(s: Any, out: Any, now: Any) -> Any:
    """A pause frame."""
    link = s.links[out]
    link.frame_first = (link.frame_first + 1) % s.frames.shape[1]
    link.num_frames -= 1
    if link.num_frames > 0:
        push(s.heap, s.clock[0], s.frames[out, link.frame_first], 2 * s.links.shape[0] + out)
    if link.is_paused:
        link.is_paused = 0
        link.paused_ps += now - link.paused_since_ps
    else:
        link.is_paused = 1
        link.paused_since_ps = now
    return out


@inlined
def _serve(s: Any, out: Any, now: Any) -> None:
    """A link sends what is next, if it is free and may; and asks to be served again, if more waits."""
    link = s.links[out]
    if link.is_paused or link.is_waiting:
        return
    if link.free_ps <= now:
        p = take_turn(s, out, now) if link.from_switch == NONE else take_queued(s, out, now)
        if p == NONE:
            return
        _send(s, out, p, now)
    if link.queue_head != NONE or link.ready_head != NONE:
        link.is_waiting = 1
        push(s.heap, s.clock[0], link.free_ps, out)


@inlined
def _send(s: Any, out: Any, p: Any, now: Any) -> None:
    """A packet goes onto a wire."""
    link, packet, knobs = s.links[out], s.packets[p], s.knobs[0]
    if packet.num_bytes == knobs.full_bytes:
        link.free_ps = now + link.full_ps
    else:
        link.free_ps = now + int(packet.num_bytes * link.ps_per_byte)
    link.sent_bytes += packet.num_bytes
    packet.due_ps = link.free_ps + link.latency_ps
    if s.written.shape[0] > 1 and link.from_switch != NONE:
        _write(s.written, link, p, packet.hop - s.flows[packet.flow].first_hop, now)
    if knobs.has_outages and is_down(s.links, s.outages, out, now, now, link.free_ps):
        is_lost = True
    else:
        is_lost = link.loss_ratio > 0 and uniform(s.clock[0]) < link.loss_ratio
    if is_lost:
        link.num_losses += 1
        discard(s, p)
    elif link.to_switch == NONE:
        receive(s, p, packet.due_ps)
    else:
        _put_on_wire(s, out, p)


@compiled
def _write(written: Any, link: Any, p: Any, hop: Any, now: Any) -> None:
    written[p, hop, 0] = link.queue_bytes
    written[p, hop, 1] = link.sent_bytes
    written[p, hop, 2] = now


@inlined
def _put_on_wire(s: Any, out: Any, p: Any) -> None:
    link, packet = s.links[out], s.packets[p]
    packet.next = NONE
    if link.wire_head == NONE:
        link.wire_head = p
        push(s.heap, s.clock[0], packet.due_ps, s.links.shape[0] + out)
    else:
        s.packets[link.wire_tail].next = p
    link.wire_tail = p
