"""Senders of the fluid model that keep a window: Swift, HPCC and the hybrid (formulas: `controls`)."""

import math
from typing import Any

import numba

from myriad.network.fluid.state import Senders
from myriad.network.switch_settings import PACKET_BYTES

__all__ = ["hear_hpcc", "hear_hybrid", "hear_swift"]


@numba.njit()
def _scaling_seconds(control: Any, packets: float) -> float:
    """What a small window adds to the target."""
    low, high = 1 / math.sqrt(control.scaling_min_packets), 1 / math.sqrt(control.scaling_max_packets)
    slope = control.scaling_range_seconds / (low - high)
    return min(max(slope * (1 / math.sqrt(packets) - high), 0.0), control.scaling_range_seconds)


@numba.njit()
def _add(senders: Senders, control: Any, flow: int, acked: float) -> None:
    """`additive_packets` per round trip."""
    window = max(senders.window[flow], PACKET_BYTES)
    senders.window[flow] += control.additive_packets * acked / window * PACKET_BYTES


@numba.njit()
def _bound(senders: Senders, control: Any, flow: int) -> None:
    least, most = control.min_packets * PACKET_BYTES, control.max_packets * PACKET_BYTES
    senders.window[flow] = min(max(senders.window[flow], least), most)


@numba.njit()
def hear_swift(
    senders: Senders, control: Any, flow: int, now: float, acked: float, delay: float, hops: int
) -> None:
    """An acknowledgement."""
    target = control.base_target_seconds + hops * control.hop_target_seconds
    target += _scaling_seconds(control, senders.window[flow] / PACKET_BYTES)
    if delay < target:
        _add(senders, control, flow, acked)
    elif now - senders.cut_at[flow] >= delay:
        cut = min(control.beta * (delay - target) / delay, control.largest_cut_ratio)
        senders.window[flow] *= 1 - cut
        senders.cut_at[flow] = now
    _bound(senders, control, flow)


@numba.njit()
def hear_hpcc(
    senders: Senders, control: Any, flow: int, now: float, delay: float, load: float, base: float, part: float
) -> None:
    """An acknowledgement with what switches wrote; ``part``: the share of a round trip since the last. The
    rate is that of the window; on its way is what packets make of it, the last of which need not fit."""
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


@numba.njit()
def hear_hybrid(
    senders: Senders,
    control: Any,
    flow: int,
    now: float,
    acked: float,
    delay: float,
    base: float,
    is_marked: bool,
) -> None:
    """An acknowledgement."""
    if is_marked:
        _cut_hybrid(senders, control, flow, now, delay, base)
    elif now - senders.cut_at[flow] >= delay:
        _add(senders, control, flow, acked)
        if now - senders.raised_at[flow] >= delay:
            senders.raised_at[flow] = now
            senders.timer_stage[flow] += 1
            if senders.timer_stage[flow] > control.recovery_steps:
                missing = senders.reference[flow] - senders.window[flow]
                senders.window[flow] += max(missing, 0.0) / 2
    _bound(senders, control, flow)


@numba.njit()
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
