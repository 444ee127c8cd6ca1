"""Accelerator faults from the driver: uncorrectable memory errors, Xid events, lost devices.

    states = provider.states()           `NvmlProvider` (nvidia-ml-py), `SmiProvider` (nvidia-smi), or
                                         `FileProvider`, a file that fault injection writes
    fault = diagnose_device(state)       the cause, in words; None: no fault

An Xid is a number that NVIDIA's driver writes to the kernel's log. Some Xids are caused by a wrong program
and say nothing about the device: evicting nodes for them would remove good nodes from the cluster. `XIDS`
follows NVIDIA's Xid catalog (docs.nvidia.com/deploy/xid-errors, "Analyzing Xid Errors with the Xid Catalog")
and its GPU debug guidelines; an Xid that the catalog does not list is reported with unknown cause.

Devices are read by NVML where its Python package is installed (`device_state`), else by nvidia-smi.
"""

import json
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from pydantic import TypeAdapter, ValidationError

from myriad.doctor.device_state import (
    DeviceState,
    DeviceVitals,
    NvmlProvider,
    bus_place,
    load_nvml,
    throttle_names,
)
from myriad.doctor.diagnosis import Reading

__all__ = [
    "DEVICES",
    "XIDS",
    "DeviceFault",
    "DeviceProvider",
    "DeviceState",
    "FileProvider",
    "SmiProvider",
    "Xid",
    "check_devices",
    "diagnose_device",
    "find_provider",
    "has_driver",
    "provider_of",
]

FaultCause = Literal["user", "hardware", "unknown"]


class Xid(NamedTuple):
    """Cause and meaning of an Xid."""

    blame: FaultCause
    meaning: str
    can_wait: bool = False
    """Running programs continue; the device can be reset later."""


XIDS: Mapping[int, Xid] = {
    13: Xid("user", "graphics engine exception: mostly an index out of bounds in a kernel"),
    31: Xid("user", "memory page fault: the program touched an address that is not its own"),
    43: Xid("user", "the program's channel was stopped after its own fault; the device is well"),
    45: Xid("user", "channels were torn down, as when a program is killed"),
    48: Xid("hardware", "uncorrectable (double-bit) memory error"),
    63: Xid(
        "hardware", "a memory row was remapped or a page retired; the device needs a reset", can_wait=True
    ),
    64: Xid("hardware", "a memory row could not be remapped"),
    74: Xid("hardware", "NVLink error"),
    79: Xid("hardware", "the device has fallen off the bus"),
    92: Xid("hardware", "a high rate of corrected memory errors", can_wait=True),
    94: Xid("hardware", "uncorrectable memory error, contained to one program"),
    95: Xid("hardware", "uncorrectable memory error, not contained"),
    119: Xid("hardware", "the device's own processor (GSP) does not answer"),
    120: Xid("hardware", "the device's own processor (GSP) has failed"),
}
"""Xids by number; see the head of the module."""


class DeviceFault(NamedTuple):
    """A fault of a device and its cause."""

    blame: FaultCause
    words: str


class DeviceProvider(Protocol):
    """A source of the states of the node's devices."""

    def states(self) -> Sequence[DeviceState]:
        """Return the states of all devices; empty if there are none. Raises `OSError` if the query fails."""
        ...


def diagnose_device(state: DeviceState) -> DeviceFault | None:
    """Return the fault of a device, if any: hardware first, then unknown causes, then the user's program."""
    if state.lost:
        return DeviceFault("hardware", "the device no longer answers: power-cycle the node")
    if state.remap_failed:
        return DeviceFault("hardware", "a memory row could not be replaced: replace the device")
    unknown = Xid("unknown", "look it up in NVIDIA's Xid catalog")
    found = {number: XIDS.get(number, unknown) for number in state.xids}
    for blame in ("hardware", "unknown", "user"):
        if named := [f"Xid {number}: {xid.meaning}" for number, xid in found.items() if xid.blame == blame]:
            return DeviceFault(blame, "; ".join(named))
    if state.uncorrected_errors:
        count = state.uncorrected_errors
        return DeviceFault("hardware", f"{count} uncorrectable memory errors: reset the device, then test it")
    return None


def check_devices(provider: DeviceProvider | None) -> list[Reading]:
    """Return a reading for each device; hardware faults are problems, other faults are notes."""
    if provider is None:
        return [
            Reading(name="devices", skipped="no accelerator's driver, or neither NVML nor nvidia-smi, here")
        ]
    try:
        states = provider.states()
    except (OSError, subprocess.SubprocessError) as error:
        return [Reading(name="devices", problem=f"the driver cannot be asked: {error}")]
    if not states:
        return [Reading(name="devices", problem="the driver is loaded but shows no device: look at its log")]
    return [_reading(state) for state in states]


def _reading(state: DeviceState) -> Reading:
    fault = diagnose_device(state)
    words = "" if fault is None else fault.words
    name, is_hardware = f"device {state.index}", fault is not None and fault.blame == "hardware"
    hint = f"{words} (not the device's fault)" if fault is not None and fault.blame == "user" else words
    return Reading(
        name=name, value=state.name, problem=words if is_hardware else "", note="" if is_hardware else hint
    )


# Providers

_MOST_BYTES, _MOST_DEVICES = 2**20, 1024
_STATES = TypeAdapter(list[DeviceState])


class FileProvider:
    """Reads a JSON list of `DeviceState`s from a file: simulated devices, into which fault injection writes
    faults."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def states(self) -> Sequence[DeviceState]:
        """Return the states in the file. Raises `OSError` if the file is invalid."""
        with self._path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
        try:
            if len(text) > _MOST_BYTES:
                raise ValueError("too long")
            return _STATES.validate_python(json.loads(text))[:_MOST_DEVICES]
        except (ValidationError, ValueError, RecursionError):
            raise OSError(f"{self._path} holds no list of device states") from None


_QUERY = ("index", "name", "pci.bus_id", "ecc.errors.uncorrected.volatile.total")
_REMAPPED = ("gpu_bus_id", "correctable", "uncorrectable", "pending", "failure")
_REASONS = ("clocks_throttle_reasons.active", "clocks_event_reasons.active")
"""The same field by its name up to driver 535 and after; newer drivers still accept the old name."""
_VITALS = (
    *("pci.bus_id", "temperature.gpu", "temperature.memory", "power.draw", "enforced.power.limit"),
    *("clocks.sm", "clocks.max.sm", "pcie.link.gen.current", "pcie.link.gen.max"),
    *("pcie.link.width.current", "pcie.link.width.max", "ecc.errors.corrected.volatile.total"),
    *("retired_pages.single_bit_ecc.count", "retired_pages.double_bit.count", "retired_pages.pending"),
    *("utilization.gpu", "memory.used", "memory.total"),
)
"""Queried separately, so that an old driver that lacks one of these fields still reports errors."""
_SECONDS = 10.0
_MOST_XIDS = 1000
"""The most Xids kept for one device: a program can cause thousands a minute, and each query searches all."""
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")
_LOST = re.compile(
    r"GPU\s*([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})[^\n]*(?:lost|fallen off)", re.IGNORECASE
)


class SmiProvider:
    """Queries ``nvidia-smi`` and reads the kernel's log if this user may."""

    def __init__(self, program: str = "nvidia-smi", log: Path = Path("/dev/kmsg")) -> None:
        self._program, self._log = program, KernelLog(log)
        self._reasons = _REASONS[0]

    def states(self) -> Sequence[DeviceState]:
        """Return all devices. Raises `OSError` or ``subprocess.SubprocessError`` if nvidia-smi fails or
        hangs."""
        rows = self._ask(f"--query-gpu={','.join(_QUERY)}")
        vitals = self._ask_vitals()
        names = [_REMAPPED[0], *(f"remapped_rows.{name}" for name in _REMAPPED[1:])]
        remapped = self._ask(f"--query-remapped-rows={','.join(names)}")
        return parse_states(rows, remapped, self._log.read(), vitals)

    def _ask_vitals(self) -> str:
        text = self._ask(f"--query-gpu={','.join((*_VITALS, self._reasons))}")
        if self._reasons in text and self._reasons == _REASONS[0]:  # the error names it: no such field
            self._reasons = _REASONS[1]
            text = self._ask(f"--query-gpu={','.join((*_VITALS, self._reasons))}")
        return text

    def _ask(self, query: str) -> str:
        words = [self._program, query, "--format=csv,noheader,nounits"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS)
        return done.stdout + done.stderr


def parse_states(rows: str, remapped: str, log: str, vitals: str = "") -> list[DeviceState]:
    """Return the devices that answered, then those reported as lost. ``rows``, ``remapped`` and ``vitals``
    are the outputs of nvidia-smi for the three queries; ``log`` has lines of the kernel's log."""
    remaps = {bus_place(cells[0]): cells for cells in _cells(remapped, len(_REMAPPED), 2)}
    failed = {place for place, cells in remaps.items() if _is_yes(cells[-1])}
    measured = {bus_place(cells[0]): cells for cells in _cells(vitals, len(_VITALS) + 1)}
    xids = parse_xids(log)
    states = []
    for index, name, bus, errors in _cells(rows, len(_QUERY)):
        if index.isdigit():
            where = bus_place(bus)
            cells, remap = measured.get(where), remaps.get(where, [])
            states.append(
                DeviceState(
                    index=int(index),
                    name=name,
                    bus=where,
                    uncorrected_errors=int(errors) if errors.isdigit() else 0,
                    remap_failed=where in failed,
                    xids=tuple(xids.get(where, ())),
                    vitals=None if cells is None else _vitals(cells, remap),
                )
            )
    lost = {bus_place(bus) for bus in _LOST.findall(rows)}
    first = max((state.index for state in states), default=-1) + 1
    return states + [
        DeviceState(index=first + place, bus=bus, lost=True, xids=tuple(xids.get(bus, ())))
        for place, bus in enumerate(sorted(lost))
    ]


def parse_xids(log: str) -> dict[str, list[int]]:
    """Return the Xids of each PCI address, in order."""
    xids: dict[str, list[int]] = {}
    for bus, number in _XID.findall(log):
        xids.setdefault(bus_place(bus), []).append(int(number))
    return xids


def _vitals(cells: Sequence[str], remap: Sequence[str]) -> DeviceVitals:
    """Parse ``cells``, the values of `_VITALS` and the throttle reasons, and ``remap``, those of `_REMAPPED`
    if the device has them."""
    found = dict(zip((*_VITALS, "reasons"), cells, strict=True))

    def number(name: str) -> float | None:
        return _number(found[name])

    def whole(name: str) -> int | None:
        value = _number(found[name])
        return None if value is None else int(value)

    use, used, memory = number("utilization.gpu"), number("memory.used"), number("memory.total")
    counts = [_number(cell) for cell in remap[1:3]] if len(remap) == len(_REMAPPED) else []
    if len(counts) < 2 or None in counts:
        counts = [number("retired_pages.single_bit_ecc.count"), number("retired_pages.double_bit.count")]
    known = [count for count in counts if count is not None]
    reasons = found["reasons"]
    return DeviceVitals(
        temperature_celsius=number("temperature.gpu"),
        memory_celsius=number("temperature.memory"),
        power_watts=number("power.draw"),
        power_limit_watts=number("enforced.power.limit"),
        sm_clock_mhz=number("clocks.sm"),
        max_sm_clock_mhz=number("clocks.max.sm"),
        throttle=throttle_names(int(reasons, 16)) if re.fullmatch(r"0x[0-9a-fA-F]{1,16}", reasons) else (),
        pcie_generation=whole("pcie.link.gen.current"),
        max_pcie_generation=whole("pcie.link.gen.max"),
        pcie_width=whole("pcie.link.width.current"),
        max_pcie_width=whole("pcie.link.width.max"),
        corrected_errors=whole("ecc.errors.corrected.volatile.total"),
        retired=int(sum(known)) if known else None,
        retirement_pending=_is_yes(found["retired_pages.pending"]) or any(map(_is_yes, remap[3:4])),
        utilization_ratio=None if use is None else use / 100,
        memory_used_bytes=None if used is None else int(used * 2**20),
        memory_bytes=None if memory is None else int(memory * 2**20),
    )


def _number(text: str) -> float | None:
    """Return a plain number; ``None`` for other text ("[N/A]", "[Requested functionality has been
    deprecated]")."""
    return float(text) if re.fullmatch(r"-?\d{1,12}(\.\d{1,6})?", text) else None


def _is_yes(text: str) -> bool:
    return text.lower() in ("1", "yes")


def _cells(text: str, *counts: int) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [row for row in rows if len(row) in counts]


class KernelLog:
    """The lines about Xids in the kernel's log: those that it still has, and all later ones."""

    def __init__(self, path: Path) -> None:
        self._path, self._handle = path, -1
        self._kept: list[str] = []
        self._num_kept = Counter[str]()

    def read(self) -> str:
        """Return all lines until now, for each device the first `_MOST_XIDS`; empty if the log is not
        readable."""
        with suppress(OSError):
            if self._handle < 0:
                self._handle = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            while (part := self._next()) is not None:
                self._kept += filter(self._is_kept, part.splitlines())
        return "\n".join(self._kept)

    def _is_kept(self, line: str) -> bool:
        found = _XID.search(line)
        if found is None:
            return False
        self._num_kept[found[1]] += 1
        return self._num_kept[found[1]] <= _MOST_XIDS

    def _next(self) -> str | None:
        """Return the next line; ``None`` at the end. Raises ``OSError``."""
        try:
            return os.read(self._handle, 8192).decode(errors="replace") or None
        except BlockingIOError:
            return None
        except BrokenPipeError:  # lines were overwritten before they were read: it goes on behind them
            return ""


def has_driver(root: Path = Path("/")) -> bool:
    """Whether NVIDIA's driver is loaded."""
    return (root / "proc/driver/nvidia/version").exists()


DEVICES = "MYRIAD_DEVICES"
"""Environment variable with a file for `FileProvider`, or a folder with ``node-K.json`` for each node:
simulated devices instead of real ones."""


def provider_of(node: int) -> DeviceProvider | None:
    """Return the provider of a node."""
    if given := os.environ.get(DEVICES):
        path = Path(given)
        return FileProvider(path / f"node-{node}.json" if path.is_dir() else path)
    return find_provider()


def find_provider(root: Path = Path("/")) -> DeviceProvider | None:
    """Return the provider for the loaded driver, if it can be queried: NVML where its package is installed,
    else nvidia-smi."""
    if not has_driver(root):
        return None
    if (nvml := load_nvml()) is not None:
        log = KernelLog(Path("/dev/kmsg"))
        return NvmlProvider(nvml, lambda: parse_xids(log.read()))
    return SmiProvider() if shutil.which("nvidia-smi") else None
