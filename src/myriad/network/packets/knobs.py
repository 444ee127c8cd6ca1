"""The numbers of a control as the loop reads them: picoseconds, packets or bytes, one row for all
controls."""

from myriad.network.controls import Control, Dcqcn, Hpcc, Hybrid, Swift
from myriad.network.packets.controls import DCQCN, HPCC, HYBRID, LINE_RATE, SWIFT

__all__ = ["control_knobs"]

_PS = 1e12


def control_knobs(control: Control | None) -> dict[str, float]:
    match control:
        case None:
            return {"kind": LINE_RATE}
        case Dcqcn():
            return _dcqcn_knobs(control)
        case Swift():
            return {
                "kind": SWIFT,
                "base_target_ps": control.base_target_seconds * _PS,
                "hop_target_ps": control.hop_target_seconds * _PS,
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
        "alpha_timer_ps": control.alpha_timer_seconds * _PS,
        "cnp_interval_ps": control.cnp_interval_seconds * _PS,
        "cut_interval_ps": control.cut_interval_seconds * _PS,
        "largest_cut": control.largest_cut_ratio,
        "increase_timer_ps": control.increase_timer_seconds * _PS,
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
    slope = control.scaling_range_seconds * _PS / (low - high)
    return {
        "scaling_range_ps": control.scaling_range_seconds * _PS,
        "scaling_slope": slope,
        "scaling_offset": slope * high,
        "additive": control.additive_packets,
        "largest_cut": control.largest_cut_ratio,
        "min_window": control.min_packets,
        "max_window": control.max_packets,
    }
