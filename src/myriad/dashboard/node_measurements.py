"""Read the newest measurements of each node: network counters and accelerators.

    RUN/counters/node-N.jsonl     network counters (`NodeCounters`)
    RUN/counters/gpus-N.jsonl     accelerators (`GpuSampleReader`), for `myriad top` and Prometheus

Only the last lines are read, so many nodes are cheap. Files may be torn, invalid or of another version.
"""

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from myriad.system.whole_file import parse_json

__all__ = ["GpuSample", "GpuSampleReader", "NodeCounters", "NodeSample", "gpu_sentence"]

_NAME = re.compile(r"node-(\d{1,6})\.jsonl")
_HEAD_BYTES, _TAIL_BYTES = 2**14, 2**15
_MOST_NODES, _MOST_SECONDS = 16384, 60.0


@dataclass(frozen=True)
class NodeSample:
    """The newest network counters of one node. Invalid values are left out."""

    time: float
    links: dict[str, dict[str, int]]
    """Counters of interfaces and RDMA ports: field to number."""
    tcp: dict[str, int]
    speeds: dict[str, float] = field(default_factory=dict)
    """Link speeds in bytes per second, one way."""
    rates: dict[str, dict[str, float]] = field(default_factory=dict)
    """Growth of each counter per second since the previous sample, by link; key ``tcp`` for TCP."""


class NodeCounters:
    """The network counters of one run. It keeps the last samples, so that a rotated file causes no gap."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._heads: dict[int, tuple[int, dict[str, Any]]] = {}
        """Inode and first line of each node's file."""
        self._samples: dict[int, NodeSample] = {}

    def newest(self) -> dict[int, NodeSample]:
        """Return the newest counters by node."""
        for node, path in self._paths():
            try:
                sample = self._read(node, path)
            except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
                continue
            if sample is not None:
                self._samples[node] = sample
        return dict(sorted(self._samples.items()))

    def _paths(self) -> list[tuple[int, Path]]:
        try:
            names = os.listdir(self._folder)
        except OSError:
            return []
        found = [(int(match[1]), self._folder / name) for name in names if (match := _NAME.fullmatch(name))]
        return sorted(found)[:_MOST_NODES]

    def _read(self, node: int, path: Path) -> NodeSample | None:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(handle)
            known = self._heads.get(node)
            if known is None or known[0] != status.st_ino:
                text = os.pread(handle, _HEAD_BYTES, 0).partition(b"\n")[0]
                known = self._heads[node] = status.st_ino, parse_json(text)
            tail = os.pread(handle, _TAIL_BYTES, max(0, status.st_size - _TAIL_BYTES))
        finally:
            os.close(handle)
        lines = tail[: tail.rfind(b"\n") + 1].splitlines()
        newest = _sample(known[1], parse_json(lines[-1])) if lines else None
        if newest is None or len(lines) < 3 or (before := _sample(known[1], parse_json(lines[-2]))) is None:
            return newest
        return replace(newest, rates=_rates(before, newest))


def _sample(head: dict[str, Any], line: dict[str, Any]) -> NodeSample | None:
    if "links" not in line:
        return None
    fields = head["fields"]
    links = {
        name: _named(fields[kind], numbers)
        for kind in ("links", "rdma")
        for name, numbers in line[kind].items()
    }
    speeds = {str(name): float(speed) for name, speed in head["speed_bytes_per_second"].items()}
    return NodeSample(float(line["time"]), links, _named(fields["tcp"], line["tcp"]), speeds)


def _rates(before: NodeSample, now: NodeSample) -> dict[str, dict[str, float]]:
    seconds = now.time - before.time
    if not 0 < seconds < _MOST_SECONDS:
        return {}
    both = ({**one.links, "tcp": one.tcp} for one in (before, now))
    old, new = both
    return {
        name: {key: max(0, count - old[name].get(key, count)) / seconds for key, count in counts.items()}
        for name, counts in new.items()
        if name in old
    }


def _named(names: list[str], numbers: list[int]) -> dict[str, int]:
    return {str(name): int(number) for name, number in zip(names, numbers, strict=False)}


_GPU_FILE = re.compile(r"gpus-(\d{1,6})\.jsonl")
_GPU_TAIL_BYTES = 2**16
_MOST_GPUS, _LARGEST = 1024, 1e15
_HINDRANCES = (
    "hardware slowdown",
    "software thermal slowdown",
    "hardware thermal slowdown",
    "hardware power brake",
)
"""Throttle reasons that indicate a fault; idling and power capping are normal."""


@dataclass(frozen=True)
class GpuSample:
    """The devices of one node at one time; a field is ``None`` if the driver does not report it."""

    time: float
    count: int
    name: str
    hottest_celsius: float | None
    power_watts: float | None
    """Power of all devices together."""
    lowest_clock_ratio: float | None
    """Lowest ratio of clock to maximum clock among the devices that compute."""
    narrow_links: int
    """Number of computing devices on fewer PCIe lanes than they support."""
    retired: int | None
    """Memory pages retired or rows remapped, of all devices."""
    throttled: Mapping[str, int] = field(default_factory=dict)
    """Number of devices by throttle reason that indicates a fault."""


class GpuSampleReader:
    """The newest measurements of each node. If a file cannot be read, the previous ones stay."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._samples: dict[int, GpuSample] = {}

    def newest(self) -> dict[int, GpuSample]:
        """Return the newest measurements by node."""
        try:
            names = os.listdir(self._folder)
        except OSError:
            return self._samples
        found = sorted((int(match[1]), name) for name in names if (match := _GPU_FILE.fullmatch(name)))
        for node, name in found[:_MOST_NODES]:
            try:
                self._samples[node] = _read_gpus(_last_line(self._folder / name))
            except (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError):
                continue
        return dict(sorted(self._samples.items()))


def _last_line(path: Path) -> Any:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        size = os.fstat(handle).st_size
        tail = os.pread(handle, _GPU_TAIL_BYTES, max(0, size - _GPU_TAIL_BYTES))
    finally:
        os.close(handle)
    return parse_json(tail[: tail.rfind(b"\n") + 1].splitlines()[-1])


def _read_gpus(line: Any) -> GpuSample:
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
    return GpuSample(
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


def gpu_sentence(samples: Mapping[int, GpuSample]) -> str:
    """Return the state of all devices in one line; empty if there are none."""
    count = sum(one.count for one in samples.values())
    if not count:
        return ""
    heats = {node: one.hottest_celsius for node, one in samples.items() if one.hottest_celsius is not None}
    powers = [one.power_watts for one in samples.values() if one.power_watts is not None]
    parts = [f"{count} x {next(one.name for one in samples.values() if one.count) or 'device'}"]
    if heats:
        node = max(heats, key=lambda one: heats[one])
        parts.append(f"hottest {heats[node]:.0f} C (node {node})")
    if powers:
        parts.append(f"{sum(powers) / 1e3:.1f} kW")
    if clocks := {
        n: one.lowest_clock_ratio for n, one in samples.items() if one.lowest_clock_ratio is not None
    }:
        node = min(clocks, key=lambda one: clocks[one])
        parts.append(f"lowest clock {clocks[node]:.0%} (node {node})")
    reasons = sum((Counter(one.throttled) for one in samples.values()), Counter[str]())
    parts += [f"{number} in {reason}" for reason, number in reasons.most_common()]
    if narrow := sum(one.narrow_links for one in samples.values()):
        parts.append(f"{narrow} on fewer PCIe lanes")
    return ", ".join(parts)
