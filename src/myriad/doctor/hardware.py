"""The node's hardware as the kernel's files describe it.

Every function takes the root of these files, so that a test can pass another one.
"""

import fcntl
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from myriad.system.machine import num_cores, processor_name

__all__ = ["Nic", "cpu_key", "find_nics", "read_number", "read_text"]

_SIOCGIFADDR = 0x8915
SYS = Path("/sys")


@dataclass(frozen=True)
class Nic:
    """A network interface other than ``lo``."""

    name: str
    address: str
    """IPv4 address; empty if there is none."""
    hardware: str
    """Key in a baseline."""
    folder: Path
    is_physical: bool

    def number(self, name: str) -> float | None:
        """Return a number from the kernel's files of this NIC."""
        return read_number(self.folder / name)


def read_text(path: Path) -> str | None:
    """Return the stripped text of a file; ``None`` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def read_number(path: Path) -> float | None:
    """Return the number in a file; ``None`` if there is none."""
    with suppress(TypeError, ValueError):
        return float(read_text(path))  # type: ignore[arg-type]
    return None


def cpu_key(proc: Path = Path("/proc")) -> str:
    """Return ``cpu MODEL x CORES``: the processor and how many of its cores this process may use."""
    return f"cpu {processor_name(proc)} x {num_cores()}"


def find_nics(sys: Path = SYS) -> list[Nic]:
    """Return physical NICs and others with an address; no bridges or tunnels without one."""
    found = []
    for _, name in sorted(socket.if_nameindex(), key=lambda pair: pair[1]):
        folder, address = sys / "class/net" / name, _ipv4(name)
        is_physical = (folder / "device").exists()
        if name != "lo" and (is_physical or address):
            found.append(Nic(name, address, f"nic {name} {_kind(folder)}", folder, is_physical))
    return found


def _kind(folder: Path) -> str:
    vendor, device = read_text(folder / "device/vendor"), read_text(folder / "device/device")
    if vendor and device:
        return f"{vendor.removeprefix('0x')}:{device.removeprefix('0x')}"
    return "virtual"


def _ipv4(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return ""
