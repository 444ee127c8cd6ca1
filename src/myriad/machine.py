"""What this machine is and has: its name, cores, memory, and which cores are near which memory.

Cores are those that this process may use. Functions that read the kernel's files take their root, so that a
test can give another one.
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
]

MACHINE = "MYRIAD_MACHINE"
"""The environment variable that names a machine where its host's name does not (a pod's). Empty: its nodes
are not machines of their own, and nothing about them is remembered beyond the run."""
_ID_CHARACTERS = 8
_SYS = Path("/sys")


@dataclass(frozen=True)
class MemoryNode:
    """A NUMA node: memory that some cores reach fastest."""

    index: int
    cpus: tuple[int, ...]
    """Its cores that this process may use."""


def machine_name(root: Path = Path("/")) -> str:
    """Return ``HOST/ID``, in which a host that was installed again has another ID; empty where the machine
    has no name of its own (see ``MACHINE``)."""
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
    """Return all memory of the machine, also what is in use."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_bytes(proc: Path = Path("/proc")) -> float:
    """Return the memory that programs can have without swapping; half of all where the kernel does not
    say."""
    try:
        text = (proc / "meminfo").read_text(encoding="ascii")
        lines = dict(line.split(":", 1) for line in text.splitlines())
        return 1024.0 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return 0.5 * memory_bytes()


def check_memory(what: str, num_bytes: float) -> None:
    """Raise `BadInputError` where ``what`` needs more memory than is available now: a line instead of a
    process that the kernel kills."""
    there = available_bytes()
    if num_bytes > there:
        allowed = f"at most {format_bytes(there)}, all that is free here: ask for less"
        raise BadInputError(f"memory for {what}", format_bytes(num_bytes), allowed)


def processor_name(proc: Path = Path("/proc")) -> str:
    """Return the processor's name as its maker writes it; the architecture's where the kernel gives none."""
    with suppress(OSError):
        for line in (proc / "cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def find_memory_nodes(sys: Path = _SYS) -> list[MemoryNode]:
    """Return the NUMA nodes with a core that this process may use; one node with all cores where the kernel
    lists none."""
    mine = os.sched_getaffinity(0)
    found = []
    for folder in (sys / "devices/system/node").glob("node[0-9]*"):
        cpus = _listed_cores(folder) & mine
        if cpus:
            found.append(MemoryNode(int(folder.name[4:]), tuple(sorted(cpus))))
    return sorted(found, key=lambda node: node.index) or [MemoryNode(0, tuple(sorted(mine)))]


def cores_near_device(pci_address: str, sys: Path = _SYS) -> Iterable[int]:
    """Return the cores on the NUMA node of a PCI device, as far as this process may use them; none where the
    kernel does not know the node, or the machine has one only.

    ``pci_address``: ``DOMAIN:BUS:DEVICE.FUNCTION`` in lower hexadecimal digits."""
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
