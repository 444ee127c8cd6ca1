"""Senders of the fluid model: DCQCN by rate; Swift, HPCC and the hybrid by window (`congestion_controls`).

The DCQCN sender is the state machine of the paper (SIGCOMM 2015, section 3), not its mean: marks come one by
one, so flows differ; recovery, additive and hyper increase are as a NIC does them.

The fixed point of DCQCN is that of the mean (Zhu et al., ECN or Delay, CoNEXT 2016, section 3 and theorem
1): N flows share a link, each has C / N, and a mark probability p balances cuts and increases.
"""

import math
from typing import Any

from myriad.network.congestion_controls import PACKET_BYTES, Dcqcn, SwitchSettings
from myriad.network.fluid.fluid_queues import Senders
from myriad.network.numba_cache import compiled_inside

__all__ = [
    "dcqcn_on_cnp",
    "dcqcn_on_step",
    "fixed_point_bytes",
    "hpcc_on_ack",
    "hybrid_on_ack",
    "swift_on_ack",
]


@compiled_inside
def _scaling_seconds(control: Any, packets: float) -> float:
    """Return what a small window adds to the target."""
    low, high = 1 / math.sqrt(control.scaling_min_packets), 1 / math.sqrt(control.scaling_max_packets)
    slope = control.scaling_range_seconds / (low - high)
    return min(max(slope * (1 / math.sqrt(packets) - high), 0.0), control.scaling_range_seconds)


@compiled_inside
def _additive_increase(senders: Senders, control: Any, flow: int, acked: float) -> None:
    """Add `additive_packets` per round trip to the window."""
    window = max(senders.window[flow], PACKET_BYTES)
    senders.window[flow] += control.additive_packets * acked / window * PACKET_BYTES


@compiled_inside
def _clip_window(senders: Senders, control: Any, flow: int) -> None:
    least, most = control.min_packets * PACKET_BYTES, control.max_packets * PACKET_BYTES
    senders.window[flow] = min(max(senders.window[flow], least), most)


@compiled_inside
def swift_on_ack(
    senders: Senders, control: Any, flow: int, now: float, acked: float, delay: float, hops: int
) -> None:
    """Swift reacts to an acknowledgement."""
    target = control.base_target_seconds + hops * control.hop_target_seconds
    target += _scaling_seconds(control, senders.window[flow] / PACKET_BYTES)
    if delay < target:
        _additive_increase(senders, control, flow, acked)
    elif now - senders.cut_at[flow] >= delay:
        cut = min(control.beta * (delay - target) / delay, control.largest_cut_ratio)
        senders.window[flow] *= 1 - cut
        senders.cut_at[flow] = now
    _clip_window(senders, control, flow)


@compiled_inside
def hpcc_on_ack(
    senders: Senders, control: Any, flow: int, now: float, delay: float, load: float, base: float, part: float
) -> None:
    """HPCC reacts to an acknowledgement with telemetry; ``part`` is the share of a round trip since the last
    one. The rate follows the window; the bytes in flight are rounded up to whole packets."""
    senders.estimate[flow] += part * (load - senders.estimate[flow])
    times = senders.estimate[flow] / control.target_utilization_ratio
    is_full = times >= 1 or senders.timer_stage[flow] >= control.max_stage
    window = senders.reference[flow] / times if is_full else senders.reference[flow]
    least = control.min_bytes_per_second * base
    window = min(max(window + control.additive_bytes, least), senders.since[flow])
    senders.window[flow] = math.ceil(window / PACKET_BYTES) * PACKET_BYTES
    senders.rate[flow] = window / base
    if now - senders.raised_at[flow] >= delay:
        senders.raised_at[flow] = now
        senders.reference[flow] = window
        senders.timer_stage[flow] = 0 if is_full else senders.timer_stage[flow] + 1


@compiled_inside
def hybrid_on_ack(
    senders: Senders,
    control: Any,
    flow: int,
    now: float,
    acked: float,
    delay: float,
    base: float,
    is_marked: bool,
) -> None:
    """The hybrid reacts to an acknowledgement."""
    if is_marked:
        _cut_hybrid(senders, control, flow, now, delay, base)
    elif now - senders.cut_at[flow] >= delay:
        _additive_increase(senders, control, flow, acked)
        if now - senders.raised_at[flow] >= delay:
            senders.raised_at[flow] = now
            senders.timer_stage[flow] += 1
            if senders.timer_stage[flow] > control.recovery_steps:
                missing = senders.reference[flow] - senders.window[flow]
                senders.window[flow] += max(missing, 0.0) / 2
    _clip_window(senders, control, flow)


@compiled_inside
def _cut_hybrid(senders: Senders, control: Any, flow: int, now: float, delay: float, base: float) -> None:
    senders.timer_stage[flow] = 0
    if now - senders.cut_at[flow] < delay:
        return
    target = base * control.base_target_ratio
    target += _scaling_seconds(control, senders.window[flow] / PACKET_BYTES)
    if delay > target:
        senders.reference[flow] = senders.window[flow]
        senders.window[flow] *= max(target / delay, 1 - control.largest_cut_ratio)
    senders.cut_at[flow] = senders.raised_at[flow] = now


@compiled_inside
def dcqcn_on_cnp(senders: Senders, control: Any, flow: int, now: float) -> None:
    """DCQCN reacts to a marked packet, unless its receiver sent a CNP within the interval."""
    if now - senders.cnp_at[flow] < control.cnp_interval_seconds and senders.cnp_at[flow] >= 0:
        return
    senders.cnp_at[flow] = now
    senders.is_waiting[flow] = True
    _decay_estimate(senders, control, flow, now)
    _cut_if_due(senders, control, flow, now)
    senders.estimate[flow] += control.gain * (1 - senders.estimate[flow])
    senders.aged_at[flow] = now


@compiled_inside
def _cut_if_due(senders: Senders, control: Any, flow: int, now: float) -> None:
    first = senders.cut_at[flow] < 0
    if not first and now - senders.cut_at[flow] < control.cut_interval_seconds:
        return
    if control.clamp_target or first or senders.timer_stage[flow] + senders.byte_stage[flow] > 0:
        senders.reference[flow] = senders.rate[flow]
    cut = min(senders.estimate[flow] / 2, control.largest_cut_ratio)
    senders.rate[flow] = max(senders.rate[flow] * (1 - cut), control.min_bytes_per_second)
    senders.timer_stage[flow] = senders.byte_stage[flow] = senders.since[flow] = 0
    senders.cut_at[flow] = senders.raised_at[flow] = now
    senders.is_waiting[flow] = False


@compiled_inside
def dcqcn_on_step(senders: Senders, control: Any, flow: int, now: float, sent: float, line: float) -> None:
    """Advance DCQCN's timers and byte counter by one step."""
    if senders.is_waiting[flow]:
        _cut_if_due(senders, control, flow, now)
    _decay_estimate(senders, control, flow, now)
    if now - senders.raised_at[flow] >= control.increase_timer_seconds:
        senders.raised_at[flow] += control.increase_timer_seconds
        senders.timer_stage[flow] += 1
        _increase_rate(senders, control, flow, line)
    senders.since[flow] += sent
    if not control.timer_only and senders.since[flow] >= control.increase_bytes:
        senders.since[flow] -= control.increase_bytes
        senders.byte_stage[flow] += 1
        _increase_rate(senders, control, flow, line)


@compiled_inside
def _decay_estimate(senders: Senders, control: Any, flow: int, now: float) -> None:
    while now - senders.aged_at[flow] >= control.alpha_timer_seconds:
        senders.aged_at[flow] += control.alpha_timer_seconds
        senders.estimate[flow] *= 1 - control.gain


@compiled_inside
def _increase_rate(senders: Senders, control: Any, flow: int, line: float) -> None:
    timer, counter, steps = senders.timer_stage[flow], senders.byte_stage[flow], control.fast_recovery_steps
    is_hyper = timer > steps + 1 if control.timer_only else min(timer, counter) > steps
    if max(timer, counter) > steps:
        more = control.hyper_bytes_per_second if is_hyper else control.additive_bytes_per_second
        senders.reference[flow] = min(senders.reference[flow] + more, line)
    senders.rate[flow] = (senders.rate[flow] + senders.reference[flow]) / 2


def fixed_point_bytes(
    control: Dcqcn, settings: SwitchSettings, num_flows: int, bytes_per_second: float
) -> float:
    """Return the queue length at which DCQCN with the paper's counters settles; above Kmax all packets are
    marked."""
    marked = _mark_probability(control, num_flows, bytes_per_second)
    span = settings.ecn_max_bytes - settings.ecn_min_bytes
    return settings.ecn_min_bytes + min(marked / settings.ecn_max_ratio, 1.0) * span


def approximate_mark_probability(control: Dcqcn, num_flows: int, bytes_per_second: float) -> float:
    """Theorem 1 of CoNEXT 2016, for small p: p^3 = R_AI / (tau' R^2) x (1 / B + 1 / (T R))^2, R = C / N."""
    rate = bytes_per_second / num_flows / PACKET_BYTES
    raised = control.additive_bytes_per_second / PACKET_BYTES
    each = PACKET_BYTES / control.increase_bytes + 1 / (control.increase_timer_seconds * rate)
    return float((raised / (control.alpha_timer_seconds * rate**2) * each**2) ** (1 / 3))


def _mark_probability(control: Dcqcn, num_flows: int, bytes_per_second: float) -> float:
    """Bisect for the probability at which cuts balance increases; above it cuts outweigh them."""
    rate = bytes_per_second / num_flows / PACKET_BYTES
    low, high = 1e-12, 1 - 1e-9
    for _ in range(100):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if _balance(control, rate, middle) > 0 else (middle, high)
    return low


def _balance(control: Dcqcn, rate: float, marked: float) -> float:
    """Return cuts minus increases of the target, in packets/s per s, at a constant rate: equations 5 to 7 of
    CoNEXT 2016 with all derivatives 0."""
    unmarked = 1 - marked
    tau = control.cnp_interval_seconds
    hit = 1 - unmarked ** (tau * rate)
    alpha = 1 - unmarked ** (control.alpha_timer_seconds * rate)
    events = additive = 0.0
    for packets in (control.increase_bytes / PACKET_BYTES, control.increase_timer_seconds * rate):
        again = unmarked**packets
        each = rate * marked * again / (1 - again) if again < 1 else rate / packets
        events += each
        additive += each * again**control.fast_recovery_steps
    above = rate * alpha / tau * hit / events
    return above / tau * hit - control.additive_bytes_per_second / PACKET_BYTES * additive
