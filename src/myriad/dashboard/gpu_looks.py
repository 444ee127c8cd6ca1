"""What the accelerators of each node measured last, from the ends of RUN/counters/gpus-N.jsonl: one summary a
node, for `myriad top` and Prometheus. Files may be torn, foreign or of another version."""

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from myriad.whole_file import parse_json

__all__ = ["GpuLook", "GpuLooks", "gpu_sentence"]

_NAME = re.compile(r"gpus-(\d{1,6})\.jsonl")
_TAIL_BYTES = 2**16
_MOST_NODES, _MOST_GPUS, _LARGEST = 16384, 1024, 1e15
_HINDRANCES = (
    "hardware slowdown",
    "software thermal slowdown",
    "hardware thermal slowdown",
    "hardware power brake",
)
"""Throttle reasons that show something wrong; an idle or power-capped device is as it should be."""


@dataclass(frozen=True)
class GpuLook:
    """The devices of one node at one moment; ``None``: their driver does not say."""

    time: float
    count: int
    name: str
    hottest_celsius: float | None
    power_watts: float | None
    """Power of all devices together."""
    lowest_clock_ratio: float | None
    """Clock by the highest clock, of the device where it is lowest among those that compute."""
    narrow_links: int
    """Devices that compute on fewer PCIe lanes than they could."""
    retired: int | None
    """Memory pages retired or rows remapped, of all devices."""
    throttled: Mapping[str, int] = field(default_factory=dict)
    """Throttle reason that shows something wrong, to the number of devices."""


class GpuLooks:
    """The newest look at each node; a file that cannot be read now leaves the last look."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._looks: dict[int, GpuLook] = {}

    def newest(self) -> dict[int, GpuLook]:
        """Return the looks, by node."""
        try:
            names = os.listdir(self._folder)
        except OSError:
            return self._looks
        found = sorted((int(match[1]), name) for name in names if (match := _NAME.fullmatch(name)))
        for node, name in found[:_MOST_NODES]:
            try:
                self._looks[node] = _look(_last_line(self._folder / name))
            except (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError):
                continue
        return dict(sorted(self._looks.items()))


def _last_line(path: Path) -> Any:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        size = os.fstat(handle).st_size
        tail = os.pread(handle, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
    finally:
        os.close(handle)
    return parse_json(tail[: tail.rfind(b"\n") + 1].splitlines()[-1])


def _look(line: Any) -> GpuLook:
    gpus: Sequence[Mapping[str, Any]] = [one for one in line["gpus"][:_MOST_GPUS] if isinstance(one, dict)]
    busy = [one for one in gpus if (_number(one, "utilization_ratio") or 0.0) >= 0.5]
    ratios = [
        clock / most
        for one in busy
        if (clock := _number(one, "sm_clock_mhz")) and (most := _number(one, "max_sm_clock_mhz"))
    ]
    heats, powers = _known(gpus, "temperature_celsius"), _known(gpus, "power_watts")
    retired = _known(gpus, "retired")
    narrow = [
        one for one in busy if (_number(one, "pcie_width") or 1e9) < (_number(one, "max_pcie_width") or 0)
    ]
    reasons = Counter(
        str(reason) for one in gpus for reason in one.get("throttle", ()) if reason in _HINDRANCES
    )
    return GpuLook(
        time=float(line["time"]),
        count=len(gpus),
        name=str(gpus[0].get("name", ""))[:64] if gpus else "",
        hottest_celsius=max(heats, default=None),
        power_watts=sum(powers) if powers else None,
        lowest_clock_ratio=min(ratios, default=None),
        narrow_links=len(narrow),
        retired=int(sum(retired)) if retired else None,
        throttled=dict(reasons),
    )


def _known(gpus: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [value for one in gpus if (value := _number(one, name)) is not None]


def _number(gpu: Mapping[str, Any], name: str) -> float | None:
    value = gpu.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if value is not None and is_number and abs(value) < _LARGEST else None


def gpu_sentence(looks: Mapping[int, GpuLook]) -> str:
    """Return the state of all devices in one line; empty: there are none."""
    count = sum(one.count for one in looks.values())
    if not count:
        return ""
    heats = {node: one.hottest_celsius for node, one in looks.items() if one.hottest_celsius is not None}
    powers = [one.power_watts for one in looks.values() if one.power_watts is not None]
    parts = [f"{count} x {next(one.name for one in looks.values() if one.count) or 'device'}"]
    if heats:
        node = max(heats, key=lambda one: heats[one])
        parts.append(f"hottest {heats[node]:.0f} C (node {node})")
    if powers:
        parts.append(f"{sum(powers) / 1e3:.1f} kW")
    if clocks := {
        n: one.lowest_clock_ratio for n, one in looks.items() if one.lowest_clock_ratio is not None
    }:
        node = min(clocks, key=lambda one: clocks[one])
        parts.append(f"lowest clock {clocks[node]:.0%} (node {node})")
    reasons = sum((Counter(one.throttled) for one in looks.values()), Counter[str]())
    parts += [f"{number} in {reason}" for reason, number in reasons.most_common()]
    if narrow := sum(one.narrow_links for one in looks.values()):
        parts.append(f"{narrow} on fewer PCIe lanes")
    return ", ".join(parts)
