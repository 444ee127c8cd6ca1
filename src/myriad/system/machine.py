"""Properties of this machine: name, cores, memory, which cores are near which memory, the user's folder.

Cores are those that this process may use. Functions that read the kernel's files take their root as an
argument, for tests.
"""

import os
import platform
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from myriad.errors import BadInputError
from myriad.units import format_bytes

__all__ = [
    "MACHINE",
    "MemoryNode",
    "available_bytes",
    "check_memory",
    "cores_near_device",
    "find_memory_nodes",
    "machine_name",
    "memory_bytes",
    "num_cores",
    "processor_name",
    "user_folder",
]

MACHINE = "MYRIAD_MACHINE"
"""Environment variable that names a machine whose host name does not identify it, such as a pod. If it is
empty, the nodes do not count as machines, and nothing about them is kept beyond the run."""
_ID_CHARACTERS = 8
_SYS = Path("/sys")


@dataclass(frozen=True)
class MemoryNode:
    """A NUMA node: memory, and the cores that reach it fastest."""

    index: int
    cpus: tuple[int, ...]
    """Cores of the node that this process may use."""


def machine_name(root: Path = Path("/")) -> str:
    """Return ``HOST/ID``; empty: the machine has no name (see ``MACHINE``). Reinstallation changes the ID."""
    given = os.environ.get(MACHINE)
    if given is not None:
        return given
    try:
        number = (root / "etc/machine-id").read_text().strip()[:_ID_CHARACTERS]
    except OSError:
        number = ""
    return socket.gethostname() + (f"/{number}" if number else "")


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def memory_bytes() -> int:
    """Return the total memory of the machine, in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_bytes(proc: Path = Path("/proc")) -> float:
    """Return the memory available without swapping, in bytes; if unknown, half of the total memory."""
    try:
        text = (proc / "meminfo").read_text(encoding="ascii")
        lines = dict(line.split(":", 1) for line in text.splitlines())
        return 1024.0 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return 0.5 * memory_bytes()


def check_memory(what: str, num_bytes: float) -> None:
    """Raise `BadInputError` if ``what`` needs more memory than is available now.

    Otherwise the kernel would kill the process without an error message."""
    there = available_bytes()
    if num_bytes > there:
        allowed = f"at most {format_bytes(there)}, all that is free here: ask for less"
        raise BadInputError(f"memory for {what}", format_bytes(num_bytes), allowed)


def processor_name(proc: Path = Path("/proc")) -> str:
    """Return the vendor's name of the processor, or else the name of the architecture."""
    with suppress(OSError):
        for line in (proc / "cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def find_memory_nodes(sys: Path = _SYS) -> list[MemoryNode]:
    """Return the NUMA nodes with a core that this process may use.

    If the kernel lists none, return one node with all cores."""
    mine = os.sched_getaffinity(0)
    found = []
    for folder in (sys / "devices/system/node").glob("node[0-9]*"):
        cpus = _listed_cores(folder) & mine
        if cpus:
            found.append(MemoryNode(int(folder.name[4:]), tuple(sorted(cpus))))
    return sorted(found, key=lambda node: node.index) or [MemoryNode(0, tuple(sorted(mine)))]


def cores_near_device(pci_address: str, sys: Path = _SYS) -> Iterable[int]:
    """Return the usable cores on the NUMA node of a PCI device.

    Return none if the kernel does not report the node, or the machine has only one. ``pci_address``:
    ``DOMAIN:BUS:DEVICE.FUNCTION`` in lower-case hexadecimal digits."""
    try:
        index = int((sys / "bus/pci/devices" / pci_address / "numa_node").read_text())
    except (OSError, ValueError):
        return ()
    nodes = find_memory_nodes(sys)
    return next((node.cpus for node in nodes if node.index == index and len(nodes) > 1), ())


def _listed_cores(folder: Path) -> set[int]:
    """Return the cores of a node's ``cpulist``: ``0-3,8`` is 0, 1, 2, 3 and 8."""
    try:
        text = (folder / "cpulist").read_text().strip()
    except OSError:
        return set()
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def user_folder() -> Path:
    """Return the folder for data that outlives runs: ``$XDG_DATA_HOME/myriad``, or in ~/.local/share."""
    data = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(data) / "myriad"
