"""Congestion control at the packet level: how a sender reacts to an acknowledgement, a mark or a loss.

The laws and numbers are those of `network.congestion_controls`. Each law sets two numbers of the flow:
`limit_packets`, the most packets in flight, and `pace_ps_per_byte`, the least time between packets (0: as
fast as the NIC). DCQCN sets only the second; Swift and the hybrid the first (and the second where the window
is below one packet: one packet each round trip / window); HPCC both (rate = window / base round trip).

DCQCN's timers are not events: when a flow sends or receives a CNP, the sender applies all timer steps since
the last time. A flow that waits for its rate is checked again whenever the rate would rise.
"""

from typing import Any

import numpy as np

from myriad.network.congestion_controls import Control, Dcqcn, Hpcc, Hybrid, Swift
from myriad.network.packets.packet_state import (
    compiled,
    flow_at,
    hop_at,
    knobs_of,
    link_at,
    packet_at,
    read_at,
    written_at,
)

__all__ = [
    "DCQCN",
    "HPCC",
    "HYBRID",
    "LINE_RATE",
    "SWIFT",
    "before_send",
    "control_knobs",
    "next_check_ps",
    "on_ack",
    "on_cnp",
    "on_loss",
    "start_flow",
]

LINE_RATE, DCQCN, SWIFT, HPCC, HYBRID = range(5)


@compiled
def start_flow(flow: Any, knobs: Any, now: Any) -> None:
    """Start a flow at line rate, with a window of what an empty network holds (HPCC), or with the given
    number of bytes in flight."""
    flow.limit_packets = knobs.most_packets
    flow.pace_ps_per_byte = 0.0
    flow.alpha, flow.rate, flow.target_rate = 1.0, flow.line_rate, flow.line_rate
    flow.cnp_ps, flow.cut_ps, flow.step_ps = -(1 << 60), -(1 << 60), now
    flow.round_trip_ps, flow.utilization = flow.base_ps, 1.0
    held = min(flow.base_ps / flow.line_ps_per_byte, knobs.start_bytes)
    if knobs.kind == DCQCN and knobs.start_bytes < np.inf:
        flow.is_cut, flow.alpha_from_ps, flow.timer_from_ps = 1, now, now
        _set_rate(flow, held / flow.base_ps * 1e12)
        flow.target_rate = flow.rate
    elif knobs.kind == HPCC:
        flow.reference = min(knobs.trip_ps / flow.line_ps_per_byte, knobs.start_bytes)
        _set_bytes(flow, knobs, flow.reference)
    elif knobs.kind == SWIFT or knobs.kind == HYBRID:
        _set_packets(flow, knobs, held / knobs.full_bytes, now)
        flow.former_window = flow.window


@compiled
def on_ack(s: Any, f: Any, p: Any, num_new: Any, now: Any) -> None:
    """React to an acknowledgement of ``num_new`` packets."""
    flow, knobs, packet = flow_at(s, f), knobs_of(s), packet_at(s, p)
    round_trip = now - packet.sent_ps
    if knobs.kind == SWIFT:
        _swift(flow, knobs, round_trip, num_new, now)
    elif knobs.kind == HPCC:
        _hpcc(s, f, p)
    elif knobs.kind == HYBRID:
        _hybrid(flow, knobs, round_trip, num_new, packet.is_marked, now)


@compiled
def on_loss(flow: Any, knobs: Any, now: Any) -> None:
    """React to a lost packet: Swift and the hybrid cut by the largest ratio, once per round trip (Swift,
    algorithm 1)."""
    if (knobs.kind == SWIFT or knobs.kind == HYBRID) and now - flow.cut_ps >= flow.round_trip_ps:
        flow.former_window = flow.window
        flow.cut_ps = now
        flow.step_ps = now
        flow.stage = 0
        _set_packets(flow, knobs, flow.window * (1 - knobs.largest_cut), now)


@compiled
def on_cnp(flow: Any, knobs: Any, now: Any) -> None:
    """React to a CNP: DCQCN cuts the rate."""
    _catch_up(flow, knobs, now)
    flow.is_cnp_pending = 1
    if now - flow.cut_ps >= knobs.cut_interval_ps:
        _cut(flow, knobs, now)
    flow.alpha += knobs.gain * (1 - flow.alpha)
    flow.alpha_from_ps = now


@compiled
def _cut(flow: Any, knobs: Any, now: Any) -> None:
    if knobs.clamp_target or flow.has_increased or not flow.is_cut:
        flow.target_rate = flow.rate
    cut = min(flow.alpha / 2, knobs.largest_cut)
    _set_rate(flow, max(knobs.min_rate, flow.rate * (1 - cut)))
    flow.is_cut, flow.is_cnp_pending, flow.has_increased = 1, 0, 0
    flow.timer_steps, flow.byte_steps, flow.counted_bytes = 0, 0, 0
    flow.cut_ps = flow.timer_from_ps = now


@compiled
def before_send(flow: Any, knobs: Any, num_bytes: Any, now: Any) -> None:
    """Update DCQCN's rate and byte counter before a packet is sent."""
    if not flow.is_cut:
        return
    _catch_up(flow, knobs, now)
    if knobs.timer_only:
        return
    flow.counted_bytes += num_bytes
    if flow.counted_bytes >= knobs.increase_bytes:
        flow.counted_bytes = 0
        flow.byte_steps += 1
        _increase(flow, knobs)


@compiled
def next_check_ps(flow: Any, knobs: Any, now: Any) -> Any:
    """Return when to check again a flow that waits for its rate. If the rate rose meanwhile, the rest of the
    wait shrinks in proportion."""
    if knobs.kind != DCQCN or not flow.is_cut:
        return flow.next_send_ps
    pace = flow.pace_ps_per_byte
    _catch_up(flow, knobs, now)
    if flow.pace_ps_per_byte < pace:
        flow.next_send_ps = now + int((flow.next_send_ps - now) * (flow.pace_ps_per_byte / pace))
    return max(now, min(flow.next_send_ps, flow.timer_from_ps + knobs.increase_timer_ps))


@compiled
def _catch_up(flow: Any, knobs: Any, now: Any) -> None:
    """Apply all timer steps up to now: alpha decays, the rate rises."""
    if not flow.is_cut:
        return
    if flow.is_cnp_pending and now - flow.cut_ps >= knobs.cut_interval_ps:
        _cut(flow, knobs, now)
    num_decays = (now - flow.alpha_from_ps) // knobs.alpha_timer_ps
    if num_decays > 0:
        flow.alpha *= (1 - knobs.gain) ** num_decays
        flow.alpha_from_ps += num_decays * knobs.alpha_timer_ps
    while now - flow.timer_from_ps >= knobs.increase_timer_ps:
        flow.timer_from_ps += knobs.increase_timer_ps
        flow.timer_steps += 1
        _increase(flow, knobs)
        if flow.rate >= flow.line_rate:
            flow.timer_from_ps = now


@compiled
def _increase(flow: Any, knobs: Any) -> None:
    most, least, steps = max(flow.timer_steps, flow.byte_steps), flow.byte_steps, knobs.recovery_steps
    least = min(flow.timer_steps, least)
    if knobs.timer_only:
        least = flow.timer_steps - 1
    if least > steps:
        flow.target_rate += knobs.hyper
    elif most > steps:
        flow.target_rate += knobs.additive
    flow.target_rate = min(flow.target_rate, flow.line_rate)
    flow.has_increased = 1
    _set_rate(flow, (flow.rate + flow.target_rate) / 2)


@compiled
def _set_rate(flow: Any, rate: Any) -> None:
    # Halving the distance never reaches the line rate, so within a thousandth counts as reached.
    flow.rate = flow.line_rate if rate > 0.999 * flow.line_rate else rate
    flow.pace_ps_per_byte = 0.0 if flow.rate >= flow.line_rate else 1e12 / flow.rate


@compiled
def _set_packets(flow: Any, knobs: Any, window: Any, now: Any) -> None:
    window = min(max(window, knobs.min_window), knobs.max_window)
    flow.window = window
    flow.limit_packets = min(max(1, int(window)), knobs.most_packets)
    # The next send time counts from the last packet. It holds while the window is below one packet, and is
    # void above (swift.cpp, send_packets).
    if window >= 1:
        flow.pace_ps_per_byte, flow.next_send_ps = 0.0, min(flow.next_send_ps, now)
        return
    pace = flow.round_trip_ps / (window * knobs.full_bytes)
    if flow.pace_ps_per_byte == 0:
        flow.next_send_ps += int(knobs.full_bytes * pace)
    flow.pace_ps_per_byte = pace


@compiled
def _set_bytes(flow: Any, knobs: Any, window: Any) -> None:
    most = knobs.trip_ps / flow.line_ps_per_byte
    window = min(max(window, knobs.min_rate * knobs.trip_ps * 1e-12), most)
    flow.window = window
    flow.limit_packets = min(int(np.ceil(window / knobs.full_bytes)), knobs.most_packets)
    flow.pace_ps_per_byte = 0.0 if window >= most else knobs.trip_ps / window


@compiled
def _flow_scaling(knobs: Any, window: Any) -> Any:
    """Return what a small window adds to the target."""
    more = knobs.scaling_slope / np.sqrt(window) - knobs.scaling_offset
    return min(max(more, 0.0), knobs.scaling_range_ps)


@compiled
def _additive_increase(knobs: Any, window: Any, num_new: Any) -> Any:
    """Return the window after one additive increase, scaled to a round trip."""
    return window + knobs.additive * num_new / max(window, 1.0)


@compiled
def _swift(flow: Any, knobs: Any, round_trip: Any, num_new: Any, now: Any) -> None:
    flow.round_trip_ps = round_trip
    window = flow.window
    target = knobs.base_target_ps + knobs.hop_target_ps * (flow.num_hops - 1) + _flow_scaling(knobs, window)
    if round_trip < target:
        window = _additive_increase(knobs, window, num_new)
    elif now - flow.cut_ps >= round_trip:
        flow.cut_ps = now
        window *= max(1 - knobs.beta * (round_trip - target) / round_trip, 1 - knobs.largest_cut)
    _set_packets(flow, knobs, window, now)


@compiled
def _hybrid(flow: Any, knobs: Any, round_trip: Any, num_new: Any, is_marked: Any, now: Any) -> None:
    flow.round_trip_ps = round_trip
    window = flow.window
    is_due = now - flow.cut_ps >= round_trip
    if is_marked:
        flow.stage = 0
        target = knobs.base_target_ratio * flow.base_ps + _flow_scaling(knobs, window)
        if is_due and round_trip > target:
            flow.former_window = window
            window *= max(target / round_trip, 1 - knobs.largest_cut)
        if is_due:
            flow.cut_ps = flow.step_ps = now
    elif is_due:
        window = _additive_increase(knobs, window, num_new)
        if now - flow.step_ps >= round_trip:
            flow.step_ps = now
            flow.stage += 1
            if flow.stage > knobs.recovery_steps:
                window += max(flow.former_window - window, 0.0) / 2
    _set_packets(flow, knobs, window, now)


@compiled
def _hpcc(s: Any, f: Any, p: Any) -> None:
    """Apply algorithm 1 of the paper."""
    flow, knobs = flow_at(s, f), knobs_of(s)
    utilization = _measure(s, f, p)
    if utilization < 0:
        flow.renewed_sequence = flow.next_sequence
        return
    renews = packet_at(s, p).sequence >= flow.renewed_sequence
    if utilization >= knobs.eta or flow.stage >= knobs.max_stage:
        window = flow.reference / (utilization / knobs.eta) + knobs.additive
        stage = 0
    else:
        window = flow.reference + knobs.additive
        stage = flow.stage + 1
    before = flow.pace_ps_per_byte
    _set_bytes(flow, knobs, window)
    # The rest of the wait since the last packet scales with the rate (rdma-hw.cc, ChangeRate).
    flow.next_send_ps += int(knobs.full_bytes * (flow.pace_ps_per_byte - before))
    if renews:
        flow.stage, flow.reference = stage, flow.window
        flow.renewed_sequence = flow.next_sequence


@compiled
def _measure(s: Any, f: Any, p: Any) -> Any:
    """Return the utilization of the fullest link of the path, averaged over a round trip; -1 for the first
    acknowledgement."""
    flow, knobs = flow_at(s, f), knobs_of(s)
    most, most_span = 0.0, 1.0
    for hop in range(1, flow.num_hops):
        ps_per_byte = link_at(s, hop_at(s, flow.first_hop + hop).value).ps_per_byte
        now, then = written_at(s, p * s.num_hops + hop), read_at(s, f * s.num_hops + hop)
        span = max(now.at_ps - then.at_ps, 1)
        sent = (now.sent_bytes - then.sent_bytes) * ps_per_byte / span
        waiting = min(now.queue_bytes, then.queue_bytes) * ps_per_byte / knobs.trip_ps
        if waiting + sent > most:
            most, most_span = waiting + sent, float(span)
        then.queue_bytes, then.sent_bytes, then.at_ps = now.queue_bytes, now.sent_bytes, now.at_ps
    if not flow.is_measured:
        flow.is_measured = 1
        return -1.0
    share = min(most_span, knobs.trip_ps) / knobs.trip_ps
    flow.utilization += share * (most - flow.utilization)
    return flow.utilization


_PS_PER_SECOND = 1e12


def control_knobs(control: Control | None) -> dict[str, float]:
    match control:
        case None:
            return {"kind": LINE_RATE}
        case Dcqcn():
            return _dcqcn_knobs(control)
        case Swift():
            return {
                "kind": SWIFT,
                "base_target_ps": control.base_target_seconds * _PS_PER_SECOND,
                "hop_target_ps": control.hop_target_seconds * _PS_PER_SECOND,
                "beta": control.beta,
                **_window_knobs(control),
            }
        case Hybrid():
            return {
                "kind": HYBRID,
                "base_target_ratio": control.base_target_ratio,
                "recovery_steps": control.recovery_steps,
                **_window_knobs(control),
            }
        case Hpcc():
            return {
                "kind": HPCC,
                "eta": control.target_utilization_ratio,
                "max_stage": control.max_stage,
                "additive": control.additive_bytes,
                "min_rate": control.min_bytes_per_second,
            }


def _dcqcn_knobs(control: Dcqcn) -> dict[str, float]:
    return {
        "kind": DCQCN,
        "gain": control.gain,
        "alpha_timer_ps": control.alpha_timer_seconds * _PS_PER_SECOND,
        "cnp_interval_ps": control.cnp_interval_seconds * _PS_PER_SECOND,
        "cut_interval_ps": control.cut_interval_seconds * _PS_PER_SECOND,
        "largest_cut": control.largest_cut_ratio,
        "increase_timer_ps": control.increase_timer_seconds * _PS_PER_SECOND,
        "increase_bytes": control.increase_bytes,
        "recovery_steps": control.fast_recovery_steps,
        "additive": control.additive_bytes_per_second,
        "hyper": control.hyper_bytes_per_second,
        "min_rate": control.min_bytes_per_second,
        "clamp_target": control.clamp_target,
        "timer_only": control.timer_only,
    }


def _window_knobs(control: Swift | Hybrid) -> dict[str, float]:
    """Swift, SIGCOMM 2020: range x (1 / sqrt(w) - 1 / sqrt(max)) / (1 / sqrt(min) - 1 /
    sqrt(max))."""
    low, high = control.scaling_min_packets**-0.5, control.scaling_max_packets**-0.5
    slope = control.scaling_range_seconds * _PS_PER_SECOND / (low - high)
    return {
        "scaling_range_ps": control.scaling_range_seconds * _PS_PER_SECOND,
        "scaling_slope": slope,
        "scaling_offset": slope * high,
        "additive": control.additive_packets,
        "largest_cut": control.largest_cut_ratio,
        "min_window": control.min_packets,
        "max_window": control.max_packets,
    }
