"""A DCQCN sender of the fluid model, and the rate at which DCQCN comes to rest.

The sender is the machine of the paper (SIGCOMM 2015, section 3), not its mean: marks come one by one, so that
flows differ, and recovery, additive and hyper increase are as a NIC does them.

The fixed point is that of the mean (Zhu et al., ECN or Delay, CoNEXT 2016, section 3 and theorem 1): N flows
share a link, each has C / N, and the probability of a mark p holds cuts and increases in balance.
"""

from typing import Any

import numba

from myriad.network.controls import Dcqcn
from myriad.network.fluid.state import Senders
from myriad.network.switch_settings import PACKET_BYTES, SwitchSettings

__all__ = ["approximate_mark_probability", "fixed_point_bytes", "hear_dcqcn", "tick_dcqcn"]


@numba.njit()
def hear_dcqcn(senders: Senders, control: Any, flow: int, now: float) -> None:
    """A marked packet: its CNP, unless one was sent a moment ago."""
    if now - senders.heard_at[flow] < control.cnp_interval_seconds and senders.heard_at[flow] >= 0:
        return
    senders.heard_at[flow] = now
    senders.is_waiting[flow] = True
    _age(senders, control, flow, now)
    _cut_if_due(senders, control, flow, now)
    senders.estimate[flow] += control.gain * (1 - senders.estimate[flow])
    senders.aged_at[flow] = now


@numba.njit()
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


@numba.njit()
def tick_dcqcn(senders: Senders, control: Any, flow: int, now: float, sent: float, line: float) -> None:
    """What timers and the byte counter do in one step."""
    if senders.is_waiting[flow]:
        _cut_if_due(senders, control, flow, now)
    _age(senders, control, flow, now)
    if now - senders.raised_at[flow] >= control.increase_timer_seconds:
        senders.raised_at[flow] += control.increase_timer_seconds
        senders.timer_stage[flow] += 1
        _raise(senders, control, flow, line)
    senders.since[flow] += sent
    if not control.timer_only and senders.since[flow] >= control.increase_bytes:
        senders.since[flow] -= control.increase_bytes
        senders.byte_stage[flow] += 1
        _raise(senders, control, flow, line)


@numba.njit()
def _age(senders: Senders, control: Any, flow: int, now: float) -> None:
    while now - senders.aged_at[flow] >= control.alpha_timer_seconds:
        senders.aged_at[flow] += control.alpha_timer_seconds
        senders.estimate[flow] *= 1 - control.gain


@numba.njit()
def _raise(senders: Senders, control: Any, flow: int, line: float) -> None:
    timer, counter, steps = senders.timer_stage[flow], senders.byte_stage[flow], control.fast_recovery_steps
    is_hyper = timer > steps + 1 if control.timer_only else min(timer, counter) > steps
    if max(timer, counter) > steps:
        more = control.hyper_bytes_per_second if is_hyper else control.additive_bytes_per_second
        senders.reference[flow] = min(senders.reference[flow] + more, line)
    senders.rate[flow] = (senders.rate[flow] + senders.reference[flow]) / 2


def fixed_point_bytes(
    control: Dcqcn, settings: SwitchSettings, num_flows: int, bytes_per_second: float
) -> float:
    """The queue in which DCQCN with the paper's counters comes to rest; all marked above Kmax."""
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
    """Halving between nothing and all: cuts outweigh increases from the fixed point on."""
    rate = bytes_per_second / num_flows / PACKET_BYTES
    low, high = 1e-12, 1 - 1e-9
    for _ in range(100):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if _balance(control, rate, middle) > 0 else (middle, high)
    return low


def _balance(control: Dcqcn, rate: float, marked: float) -> float:
    """Cuts less increases of the target, packets/s per s, where the rate itself is at rest: equations 5 to 7
    of CoNEXT 2016 with all derivatives 0."""
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
