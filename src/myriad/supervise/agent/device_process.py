"""``python -m myriad.supervise.agent.device_process NODE AGENT_PID SECONDS``: queries a node's devices.

It is a separate process, because a hung device driver blocks its caller in a state in which no signal ends
it. Each poll writes a line of JSON on the output, {"news": [], "warnings": [], "devices": []}: what is new
(mostly nothing) and the measurements of each device. A missing line is a sign, too.

`DeviceChanges` finds what is new. A device is known by its place on the bus: a lost one is missing from the
list, or at its end. Faults from before the watch are left to the doctor; a missing device is always reported.

`GpuWarnings` finds the first signs of a failing or throttled accelerator:

    sign                           begins                                       ends
    thermal slowdown               the hardware or the driver lowers the clock because of heat
    power brake                    the power supply asks the hardware to slow down
    near its slowdown temperature  3 degrees below it, or less
    PCIe width, PCIe generation    below the highest of device and host, while it computes
    slower than its peers          a clock under 0.85 of the median of the node's other busy devices
    retirement pending             a memory page or row is replaced at the next reset
    memory wears out               pages retired or rows remapped have become more (once each time)

A sign begins when two polls in a row (ten seconds) show it, and ends after six without it: a device at its
limit is one warning. A software power cap is not a sign: a device under full load is often at its power
limit.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from myriad.doctor.device_state import DeviceVitals
from myriad.doctor.devices import XIDS, DeviceProvider, DeviceState, FaultCause, Xid, provider_of
from myriad.system.child_process import die_with_parent
from myriad.units import format_number

__all__ = ["DeviceChange", "DeviceWarning", "main"]

_LOOKS_TO_BEGIN, _LOOKS_TO_END = 2, 6
_SLOW_RATIO, _FEWEST_PEERS = 0.85, 2
_NEAR_CELSIUS = 3.0


@dataclass(frozen=True)
class DeviceWarning:
    """A warning about a device that has begun, has ended, or occurred once."""

    device: int
    kind: str
    words: str
    over: bool | None = None
    """Whether the condition has ended; ``None``: it is an event that occurred once."""


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
    """Finds warning signs of the devices of one node."""

    def __init__(self) -> None:
        self._devices: dict[str, _Device] = {}

    def observe(self, states: Sequence[DeviceState]) -> list[DeviceWarning]:
        """Return what has begun or ended since the last poll."""
        found: list[DeviceWarning] = []
        for state in states:
            if state.vitals is not None and not state.lost:
                device = self._devices.setdefault(state.bus or str(state.index), _Device())
                now = dict(_signs(state, states))
                found += self._changes(state.index, device, now)
                found += _worn(state.index, device, state.vitals)
        return found

    def _changes(self, index: int, device: _Device, now: Mapping[str, str]) -> Iterator[DeviceWarning]:
        for kind in {*now, *device.signs}:
            sign = device.signs.setdefault(kind, _Sign())
            if kind in now:
                sign.words, sign.num_seen, sign.num_clear = now[kind], sign.num_seen + 1, 0
                if sign.num_seen >= _LOOKS_TO_BEGIN and not sign.reported:
                    sign.reported = True
                    yield DeviceWarning(index, kind, sign.words, over=False)
                continue
            sign.num_clear += 1
            if not sign.reported:
                del device.signs[kind]
            elif sign.num_clear >= _LOOKS_TO_END:
                del device.signs[kind]
                yield DeviceWarning(index, kind, f"no {kind} any more", over=True)


def _worn(index: int, device: _Device, vitals: DeviceVitals) -> Iterator[DeviceWarning]:
    before, device.retired = device.retired, vitals.retired
    if before is not None and vitals.retired is not None and vitals.retired > before:
        more = vitals.retired - before
        words = f"{more} more memory page{'s' if more > 1 else ''} or rows replaced, {vitals.retired} in all"
        yield DeviceWarning(index, "memory wears out", words)


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
    """Return the median clock of the other busy devices of the same type; ``None``: there are too few."""
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


_UNKNOWN = Xid("unknown", "look it up in NVIDIA's Xid catalog")
_FAILURES = 3
"""Number of successive polls at which the device driver did not answer until that is reported."""


@dataclass(frozen=True)
class DeviceChange:
    """A change of a device."""

    device: int
    """Device; -1: the device driver itself."""
    blame: FaultCause
    words: str
    lost: bool = False
    can_wait: bool = False


class DeviceChanges:
    """Finds what has changed about the devices of a node."""

    def __init__(self) -> None:
        self._known: dict[str, DeviceState] = {}
        """Last state of each device, by its place on the bus."""
        self._failures = 0

    def failed(self, problem: str) -> list[DeviceChange]:
        """Record that the device driver did not answer."""
        self._failures += 1
        words = f"the devices' driver cannot be asked: {problem}"
        return [DeviceChange(-1, "unknown", words)] if self._failures == _FAILURES else []

    def observe(self, states: Sequence[DeviceState]) -> list[DeviceChange]:
        """Return what has changed since the last states."""
        if self._known and not any(not state.lost for state in states) and not any(s.lost for s in states):
            return self.failed("it names no device any more")
        self._failures = 0
        now = {_place(state): state for state in states}
        found = [news for place, state in now.items() for news in self._about(place, state)]
        if not any(state.lost for state in states):
            gone = [state for place, state in self._known.items() if place not in now and not state.lost]
            found += [_lost(state.index) for state in gone]
            now |= {_place(state): state.model_copy(update={"lost": True}) for state in gone}
        self._known |= now
        return found

    def _about(self, place: str, state: DeviceState) -> Iterator[DeviceChange]:
        before = self._known.get(place, state.model_copy(update={"lost": False}))
        index = before.index
        for number in state.xids[len(before.xids) :]:
            xid = XIDS.get(number, _UNKNOWN)
            yield DeviceChange(index, xid.blame, f"Xid {number}: {xid.meaning}", can_wait=xid.can_wait)
        if (more := state.uncorrected_errors - before.uncorrected_errors) > 0:
            yield DeviceChange(
                index, "hardware", f"{more} uncorrectable memory error{'s' if more > 1 else ''}"
            )
        if state.remap_failed and not before.remap_failed:
            yield DeviceChange(index, "hardware", "a memory row could not be replaced")
        if state.lost and not before.lost:
            yield _lost(index)


def _place(state: DeviceState) -> str:
    return state.bus or str(state.index)


def _lost(index: int) -> DeviceChange:
    return DeviceChange(index, "hardware", "it no longer answers", lost=True)


def main(arguments: list[str]) -> int:
    """Query the devices until the process that started this one is gone."""
    node, parent, seconds = int(arguments[0]), int(arguments[1]), float(arguments[2])
    die_with_parent(parent)
    provider, news, warnings = provider_of(node), DeviceChanges(), GpuWarnings()
    while provider is not None:
        line = json.dumps(_poll(provider, news, warnings)) + "\n"
        os.write(1, line.encode())
        time.sleep(seconds)
    return 0


def _poll(provider: DeviceProvider, news: DeviceChanges, warnings: GpuWarnings) -> dict[str, Any]:
    try:
        states = provider.states()
    except (OSError, subprocess.SubprocessError) as error:
        return {"news": [asdict(one) for one in news.failed(str(error))], "warnings": [], "devices": []}
    return {
        "news": [asdict(one) for one in news.observe(states)],
        "warnings": [asdict(one) for one in warnings.observe(states)],
        "devices": [
            {"device": state.index, "name": state.name, **state.vitals.model_dump(exclude_none=True)}
            for state in states
            if state.vitals is not None and not state.lost
        ],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
