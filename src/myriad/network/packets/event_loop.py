"""The event loop of a packet-level simulation.

An event is one entry of the heap; the loop takes the earliest. There are six kinds:

    free     a transmitter has sent a packet, and another packet waits for it
    arrival  a packet is at the switch at the end of a link
    frame    a pause or resume frame is at the sender of a link
    answer   an acknowledgement is at the sender of its flow
    wake     a flow begins, or may send again at its rate
    timeout  a flow's timer fires

A packet over h links without queues is h - 1 arrivals and one answer. Each queue that it waits in, NICs
included, adds one `free`, and each packet of a flow below line rate adds a `wake` or two. The arrival at the
target is not an event: nothing can come between it and the last transmitter, so the last transmitter
processes it. The start of a packet on a free link is not an event either.

Every event gives work to at most one link, which `_serve` serves.
"""

from typing import Any

import numba

from myriad.network.numba_cache import source_stamp
from myriad.network.packets.packet_links import (
    close_gap,
    discard,
    enqueue,
    is_down,
    push,
    take_queued,
    uniform,
)
from myriad.network.packets.packet_nics import take_packet
from myriad.network.packets.packet_recovery import acknowledge, fire_common_timer, receive, time_out, wake
from myriad.network.packets.packet_state import (
    NONE,
    NUM_FRAMES,
    clock_of,
    compiled,
    flow_at,
    frame_at,
    key_at,
    knobs_of,
    link_at,
    packet_at,
    written_at,
)

__all__ = ["FINISHED", "FULL", "PAUSED", "run"]

FINISHED, PAUSED, FULL = range(3)
"""Why the loop stopped: all flows are done; the given time is reached; no packet records or events are
left."""
_SPARE = 4
"""Packet records that one event can need."""


@compiled
def _loop(s: Any, until_ps: Any) -> Any:
    """Process events up to a time; return why the loop stopped."""
    clock = clock_of(s)
    num_links = s.num_links
    slot_mask = (1 << clock.slot_bits) - 1
    while clock.num_pending > 0 and clock.num_open > 0:
        if clock.num_free < _SPARE or clock.num_pending > clock.most_pending:
            return FULL
        now = key_at(s, 0).value >> clock.slot_bits
        if now > until_ps:
            return PAUSED
        slot = key_at(s, 0).value & slot_mask
        clock.now_ps = now
        clock.has_gap = 1
        clock.num_events += 1
        if slot < num_links:
            link_at(s, slot).is_waiting = 0
            out = slot
        elif slot < 2 * num_links:
            out = enqueue(s, slot - num_links, _take_arrived(s, slot - num_links), now)
        elif slot < 3 * num_links:
            out = _toggle_pause(s, slot - 2 * num_links, now)
        elif slot < s.first_wake:
            out = acknowledge(s, slot - s.first_answer, now)
        elif slot < s.first_timeout:
            out = wake(s, slot - s.first_wake, now)
        elif slot < s.common_timer:
            out = time_out(s, slot - s.first_timeout, now)
        else:
            out = fire_common_timer(s, now)
        if out != NONE:
            _serve(s, out, now)
        close_gap(s)
    return FINISHED


@compiled
def _take_arrived(s: Any, ingress: Any) -> Any:
    """Take the first packet of a wire, which has reached the end, and schedule the next."""
    link = link_at(s, ingress)
    p = link.wire_head
    link.wire_head = packet_at(s, p).next
    if link.wire_head != NONE:
        push(s, packet_at(s, link.wire_head).due_ps, s.num_links + ingress)
    return p


@compiled
def _toggle_pause(s: Any, out: Any, now: Any) -> Any:
    """Apply a pause frame: stop the link, or let it resume."""
    link = link_at(s, out)
    link.frame_first = (link.frame_first + 1) % NUM_FRAMES
    link.num_frames -= 1
    if link.num_frames > 0:
        push(s, frame_at(s, out * NUM_FRAMES + link.frame_first).value, 2 * s.num_links + out)
    if link.is_paused:
        link.is_paused = 0
        link.paused_ps += now - link.paused_since_ps
    else:
        link.is_paused = 1
        link.paused_since_ps = now
    return out


@compiled
def _serve(s: Any, out: Any, now: Any) -> None:
    """Send the next packet of a link, if it is free and not paused; schedule the next service if more
    wait."""
    link = link_at(s, out)
    if link.is_paused or link.is_waiting:
        return
    if link.free_ps <= now:
        p = take_packet(s, out, now) if link.from_switch == NONE else take_queued(s, out, now)
        if p == NONE:
            return
        _send(s, out, p, now)
    if link.queue_head != NONE or link.ready_head != NONE:
        link.is_waiting = 1
        push(s, link.free_ps, out)


@compiled
def _send(s: Any, out: Any, p: Any, now: Any) -> None:
    """Put a packet on a wire."""
    link, packet, knobs = link_at(s, out), packet_at(s, p), knobs_of(s)
    if packet.num_bytes == knobs.full_bytes:
        link.free_ps = now + link.full_ps
    else:
        link.free_ps = now + int(packet.num_bytes * link.ps_per_byte)
    link.sent_bytes += packet.num_bytes
    packet.due_ps = link.free_ps + link.latency_ps
    if s.num_hops > 0 and link.from_switch != NONE:
        _write_telemetry(s, link, p, packet.hop - flow_at(s, packet.flow).first_hop, now)
    if knobs.has_outages and is_down(s, out, now, now, link.free_ps):
        is_lost = True
    else:
        is_lost = link.loss_ratio > 0 and uniform(clock_of(s)) < link.loss_ratio
    if is_lost:
        link.num_losses += 1
        discard(s, p)
    elif link.to_switch == NONE:
        receive(s, p, packet.due_ps)
    else:
        _put_on_wire(s, out, p)


@compiled
def _write_telemetry(s: Any, link: Any, p: Any, hop: Any, now: Any) -> None:
    written = written_at(s, p * s.num_hops + hop)
    written.queue_bytes, written.sent_bytes, written.at_ps = link.queue_bytes, link.sent_bytes, now


@compiled
def _put_on_wire(s: Any, out: Any, p: Any) -> None:
    link, packet = link_at(s, out), packet_at(s, p)
    packet.next = NONE
    if link.wire_head == NONE:
        link.wire_head = p
        push(s, packet.due_ps, s.num_links + out)
    else:
        packet_at(s, link.wire_tail).next = p
    link.wire_tail = p


def _cached(stamp: int) -> Any:
    """Return the compiled loop, cached on disk (`network.numba_cache`)."""

    def run(s: Any, until_ps: Any) -> Any:
        return _loop(s, until_ps) if stamp >= 0 else FINISHED

    return numba.njit(cache=True, error_model="numpy", nogil=True)(run)


run = _cached(source_stamp(__file__))
"""Process events up to a time: `run(arena, until_ps)` returns why it stopped."""
