"""First signs of a failing or hampered accelerator, from what it measures of itself. Pure.

    sign                           begins                                       ends
    thermal slowdown               the hardware or the driver lowers the clock because of heat
    power brake                    the power supply asks the hardware to slow down
    near its slowdown temperature  3 degrees below it, or less
    PCIe width, PCIe generation    below the highest of device and host, while it computes
    slower than its peers          a clock under 0.85 of the median of the node's other busy devices
    retirement pending             a memory page or row is replaced at the next reset
    memory wears out               pages retired or rows remapped have become more (once each time)

A sign begins when two looks in a row (ten seconds) show it, and ends after six without it, so that a device
at its limit is one warning. A software power cap is none: a device at full load is often at its limit of
power.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from myriad.resilience.doctor.device_state import DeviceState, DeviceVitals
from myriad.units import format_number

__all__ = ["GpuWarnings", "Warned"]

_LOOKS_TO_BEGIN, _LOOKS_TO_END = 2, 6
_SLOW_RATIO, _FEWEST_PEERS = 0.85, 2
_NEAR_CELSIUS = 3.0


@dataclass(frozen=True)
class Warned:
    """A sign that has begun or ended; or that came once."""

    device: int
    kind: str
    words: str
    over: bool | None = None
    """``None``: it does not last."""


@dataclass
class _Sign:
    words: str = ""
    num_seen: int = 0
    num_clear: int = 0
    reported: bool = False


@dataclass
class _Device:
    signs: dict[str, _Sign] = field(default_factory=dict)
    retired: int | None = None


class GpuWarnings:
    """The devices of one node."""

    def __init__(self) -> None:
        self._devices: dict[str, _Device] = {}

    def saw(self, states: Sequence[DeviceState]) -> list[Warned]:
        """Return what has begun or ended since the last look."""
        found: list[Warned] = []
        for state in states:
            if state.vitals is not None and not state.lost:
                device = self._devices.setdefault(state.bus or str(state.index), _Device())
                now = dict(_signs(state, states))
                found += self._changes(state.index, device, now)
                found += _worn(state.index, device, state.vitals)
        return found

    def _changes(self, index: int, device: _Device, now: Mapping[str, str]) -> Iterator[Warned]:
        for kind in {*now, *device.signs}:
            sign = device.signs.setdefault(kind, _Sign())
            if kind in now:
                sign.words, sign.num_seen, sign.num_clear = now[kind], sign.num_seen + 1, 0
                if sign.num_seen >= _LOOKS_TO_BEGIN and not sign.reported:
                    sign.reported = True
                    yield Warned(index, kind, sign.words, over=False)
                continue
            sign.num_clear += 1
            if not sign.reported:
                del device.signs[kind]
            elif sign.num_clear >= _LOOKS_TO_END:
                del device.signs[kind]
                yield Warned(index, kind, f"no {kind} any more", over=True)


def _worn(index: int, device: _Device, vitals: DeviceVitals) -> Iterator[Warned]:
    before, device.retired = device.retired, vitals.retired
    if before is not None and vitals.retired is not None and vitals.retired > before:
        more = vitals.retired - before
        words = f"{more} more memory page{'s' if more > 1 else ''} or rows replaced, {vitals.retired} in all"
        yield Warned(index, "memory wears out", words)


def _signs(state: DeviceState, states: Sequence[DeviceState]) -> Iterator[tuple[str, str]]:
    vitals = state.vitals
    assert vitals is not None
    reasons = vitals.throttle
    if hot := [name for name in reasons if "thermal" in name]:
        yield "thermal slowdown", f"{' and '.join(hot)}: {_heat(vitals)}{_clock(vitals)}"
    elif _is_near(vitals):
        yield (
            "near its slowdown temperature",
            f"{_heat(vitals)}, slows down at {vitals.slowdown_celsius:.0f} C",
        )
    if "hardware power brake" in reasons:
        yield "power brake", f"the power supply slows it down (power brake){_clock(vitals, ': ')}"
    elif "hardware slowdown" in reasons and not hot:
        yield "hardware slowdown", f"the hardware slows it down{_clock(vitals, ': ')}"
    if vitals.retirement_pending:
        yield "retirement pending", "a memory page or row is replaced at the next reset of the device"
    if not vitals.is_busy:
        return
    width, most = vitals.pcie_width, vitals.max_pcie_width
    if width is not None and most is not None and 0 < width < most:
        yield "PCIe width", f"PCIe x{width} instead of x{most}: reseat the device or its riser"
    generation, newest = vitals.pcie_generation, vitals.max_pcie_generation
    if generation is not None and newest is not None and 0 < generation < newest:
        yield "PCIe generation", f"PCIe generation {generation} instead of {newest} while it computes"
    if (usual := _peer_clock(state, states)) is not None and (
        vitals.sm_clock_mhz or usual
    ) < _SLOW_RATIO * usual:
        clock = f"{vitals.sm_clock_mhz:,.0f} MHz, the node's others {usual:,.0f} MHz"
        yield "slower than its peers", f"{clock}{_reasons(vitals)}"


def _peer_clock(state: DeviceState, states: Sequence[DeviceState]) -> float | None:
    """Median clock of the other devices of the same type that compute; ``None``: there are too few."""
    peers = [one for one in states if one is not state and one.name == state.name and one.vitals is not None]
    clocks = [one.vitals.sm_clock_mhz for one in peers if one.vitals is not None and one.vitals.is_busy]
    known = [clock for clock in clocks if clock]
    return median(known) if len(known) >= _FEWEST_PEERS else None


def _is_near(vitals: DeviceVitals) -> bool:
    limit = vitals.slowdown_celsius
    return limit is not None and limit > 0 and (vitals.temperature_celsius or 0.0) >= limit - _NEAR_CELSIUS


def _heat(vitals: DeviceVitals) -> str:
    degrees = vitals.temperature_celsius
    return "its temperature is not known" if degrees is None else f"{degrees:.0f} C"


def _clock(vitals: DeviceVitals, before: str = ", ") -> str:
    clock, most = vitals.sm_clock_mhz, vitals.max_sm_clock_mhz
    if clock is None:
        return ""
    return f"{before}{clock:,.0f} MHz" + (f" of {most:,.0f}" if most else "")


def _reasons(vitals: DeviceVitals) -> str:
    power = "" if vitals.power_watts is None else f", {format_number(vitals.power_watts)} W"
    return power + (f" ({', '.join(vitals.throttle)})" if vitals.throttle else "")
