"""What this node is made of, as the kernel's own files say it. Every function takes their root, so that a
test can give another one."""

import fcntl
import os
import platform
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MemoryNode", "Nic", "cpu_key", "find_memory_nodes", "find_nics", "read_number", "read_text"]

_SIOCGIFADDR = 0x8915
SYS = Path("/sys")


@dataclass(frozen=True)
class MemoryNode:
    """Memory that some cores reach fastest (a NUMA node)."""

    index: int
    cpus: tuple[int, ...]
    """Those that this process may use."""


@dataclass(frozen=True)
class Nic:
    """A network interface other than ``lo``."""

    name: str
    address: str
    """IPv4; empty without one."""
    hardware: str
    """Key in a baseline."""
    folder: Path
    is_physical: bool

    def number(self, name: str) -> float | None:
        """A number that the kernel keeps of it."""
        return read_number(self.folder / name)


def read_text(path: Path) -> str | None:
    """Stripped; ``None`` where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def read_number(path: Path) -> float | None:
    """``None`` where there is none."""
    with suppress(TypeError, ValueError):
        return float(read_text(path))  # type: ignore[arg-type]
    return None


def cpu_key(proc: Path = Path("/proc")) -> str:
    """``cpu MODEL x CORES``: cores that this process may use."""
    lines = (read_text(proc / "cpuinfo") or "").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"cpu {names[0] if names else platform.machine()} x {len(os.sched_getaffinity(0))}"


def find_memory_nodes(sys: Path = SYS) -> list[MemoryNode]:
    """Those with a core that this process may use; one with all of them where the kernel tells nothing."""
    mine = os.sched_getaffinity(0)
    found = []
    for folder in sorted(
        (sys / "devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:])
    ):
        cpus = _parse_list(read_text(folder / "cpulist") or "") & mine
        if cpus:
            found.append(MemoryNode(int(folder.name[4:]), tuple(sorted(cpus))))
    return found or [MemoryNode(0, tuple(sorted(mine)))]


def _parse_list(text: str) -> set[int]:
    """``0-3,8`` is 0, 1, 2, 3, 8."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def find_nics(sys: Path = SYS) -> list[Nic]:
    """Physical ones, and others that have an address; none that is neither (bridges, unused tunnels)."""
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
