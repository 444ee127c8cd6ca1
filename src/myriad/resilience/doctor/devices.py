"""What the driver of the accelerators reports: uncorrectable memory errors, Xid events, devices that are
gone.

    states = provider.states()              `SmiProvider` asks nvidia-smi and the kernel's log,
                                            `FileProvider` a file that whoever injects faults writes
    fault = fault_of(state)                 who is to blame, in words; None: nothing to say

An Xid is a number that NVIDIA's driver writes to the kernel's log. Some are what a wrong program causes and
say nothing about the device: evicting a node for them would empty the cluster of good nodes. `XIDS` is read
from NVIDIA's Xid catalog (docs.nvidia.com/deploy/xid-errors, "Analyzing Xid Errors with the Xid Catalog")
and its GPU debug guidelines; what it does not list is reported, and blamed on nobody.

`SmiProvider` has been run where there is no GPU only: its parsing is tested on texts in nvidia-smi's
format.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from pydantic import Field, TypeAdapter, ValidationError

from myriad.config import Config
from myriad.resilience.doctor.item import Reading

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
    "fault_of",
    "find_provider",
    "has_driver",
    "provider_of",
]

Blame = Literal["user", "hardware", "unknown"]


class Xid(NamedTuple):
    """A row of the table."""

    blame: Blame
    meaning: str
    can_wait: bool = False
    """What was at work goes on."""


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
"""By number; see the head of the module."""


class DeviceState(Config):
    """One device, as its driver sees it now."""

    index: int = Field(ge=0)
    """In the order of the node."""
    name: str = "unknown"
    """Type."""
    bus: str = ""
    """Its place, by which it is known when it no longer answers."""
    lost: bool = False
    """It no longer answers."""
    uncorrected_errors: int = Field(0, ge=0)
    """Uncorrectable memory errors since the driver was loaded."""
    remap_failed: bool = False
    """A memory row could not be replaced."""
    xids: tuple[int, ...] = ()
    """Reported since the node started, in their order."""


class DeviceFault(NamedTuple):
    """What is wrong with a device, and whose it is."""

    blame: Blame
    words: str


class DeviceProvider(Protocol):
    """Whoever knows the node's devices."""

    def states(self) -> Sequence[DeviceState]:
        """Of all of them; empty where there are none. Raises `OSError` when they cannot be asked."""
        ...


def fault_of(state: DeviceState) -> DeviceFault | None:
    """Hardware before everything else, then what nobody knows, then the user's."""
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
    """A reading for each device: a fault of hardware is a problem, others are told."""
    if provider is None:
        return [Reading(name="devices", skipped="no accelerator's driver, or no nvidia-smi, here")]
    try:
        states = provider.states()
    except (OSError, subprocess.SubprocessError) as error:
        return [Reading(name="devices", problem=f"the driver cannot be asked: {error}")]
    if not states:
        return [Reading(name="devices", problem="the driver is loaded but shows no device: look at its log")]
    return [_reading(state) for state in states]


def _reading(state: DeviceState) -> Reading:
    fault = fault_of(state)
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
    """A JSON list of `DeviceState`s in a file: devices for machines without any, whose faults are written
    there."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def states(self) -> Sequence[DeviceState]:
        """What the file says now; a file that says nothing sensible raises `OSError`."""
        with self._path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
        try:
            if len(text) > _MOST_BYTES:
                raise ValueError("too long")
            return _STATES.validate_python(json.loads(text))[:_MOST_DEVICES]
        except (ValidationError, ValueError, RecursionError):
            raise OSError(f"{self._path} holds no list of device states") from None


_QUERY = ("index", "name", "pci.bus_id", "ecc.errors.uncorrected.volatile.total")
_SECONDS = 10.0
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")
_LOST = re.compile(
    r"GPU\s*([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})[^\n]*(?:lost|fallen off)", re.IGNORECASE
)


class SmiProvider:
    """Asks ``nvidia-smi`` and reads the kernel's log, where this user may."""

    def __init__(self, program: str = "nvidia-smi", log: Path = Path("/dev/kmsg")) -> None:
        self._program, self._log = program, KernelLog(log)

    def states(self) -> Sequence[DeviceState]:
        """Raises `OSError` or ``subprocess.SubprocessError`` when it cannot be asked, or hangs."""
        rows = self._ask(f"--query-gpu={','.join(_QUERY)}")
        remapped = self._ask("--query-remapped-rows=gpu_bus_id,remapped_rows.failure")
        return parse_states(rows, remapped, self._log.read())

    def _ask(self, query: str) -> str:
        words = [self._program, query, "--format=csv,noheader,nounits"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS)
        return done.stdout + done.stderr


def parse_states(rows: str, remapped: str, log: str) -> list[DeviceState]:
    """Devices that answered, and after them those that are named as lost."""
    failed = {_bus(cells[0]) for cells in _cells(remapped, 2) if cells[1].lower() in ("1", "yes")}
    xids: dict[str, list[int]] = {}
    for bus, number in _XID.findall(log):
        xids.setdefault(_bus(bus), []).append(int(number))
    states = []
    for index, name, bus, errors in _cells(rows, len(_QUERY)):
        if index.isdigit():
            where = _bus(bus)
            states.append(
                DeviceState(
                    index=int(index),
                    name=name,
                    bus=where,
                    uncorrected_errors=int(errors) if errors.isdigit() else 0,
                    remap_failed=where in failed,
                    xids=tuple(xids.get(where, ())),
                )
            )
    lost = {_bus(bus) for bus in _LOST.findall(rows)}
    first = max((state.index for state in states), default=-1) + 1
    return states + [
        DeviceState(index=first + place, bus=bus, lost=True, xids=tuple(xids.get(bus, ())))
        for place, bus in enumerate(sorted(lost))
    ]


def _cells(text: str, count: int) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [row for row in rows if len(row) == count]


def _bus(text: str) -> str:
    """``00000000:3B:00.0`` and ``0000:3b:00`` are one place."""
    domain, _, rest = text.partition(":")
    return f"{domain[-4:]}:{rest.partition('.')[0]}".lower()


class KernelLog:
    """Its lines about Xids: those that the kernel still has, and from then on all."""

    def __init__(self, path: Path) -> None:
        self._path, self._handle = path, -1
        self._kept: list[str] = []

    def read(self) -> str:
        """All until now; empty where it may not be read."""
        with suppress(OSError):
            if self._handle < 0:
                self._handle = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            while (part := self._next()) is not None:
                self._kept += (line for line in part.splitlines() if _XID.search(line))
        return "\n".join(self._kept)

    def _next(self) -> str | None:
        """A line; ``None``: there is no more. Raises ``OSError``."""
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
"""Names, in the environment, a file for `FileProvider`, or a folder with ``node-K.json`` for each node:
devices for rehearsals, instead of those that are here."""


def provider_of(node: int) -> DeviceProvider | None:
    """Whoever is to be asked on a node."""
    if told := os.environ.get(DEVICES):
        path = Path(told)
        return FileProvider(path / f"node-{node}.json" if path.is_dir() else path)
    return find_provider()


def find_provider(root: Path = Path("/")) -> DeviceProvider | None:
    """That of the driver that is loaded here, if it can be asked."""
    return SmiProvider() if has_driver(root) and shutil.which("nvidia-smi") else None
