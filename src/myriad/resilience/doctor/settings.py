"""What limits this process, and which versions it runs: read, not measured."""

import importlib.metadata
import os
import platform
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from myriad import __version__
from myriad.resilience.doctor.hardware import cpu_key, read_number, read_text
from myriad.resilience.doctor.item import Reading
from myriad.units import format_bytes

__all__ = ["check_limits", "check_versions"]

_LEAST_FILES, _LEAST_SHARED_BYTES = 1024, 2**26
_ROOT = Path("/")


def check_limits(root: Path = _ROOT) -> Iterator[Reading]:
    """Open files, locked memory, shared memory, the cgroup's memory."""
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = f"{files} open files are too few: ulimit -n {hard if hard > 0 else 65536}"
    yield Reading(
        name="open files",
        value=float(files) if files >= 0 else "unlimited",
        unit="files",
        problem=low if 0 <= files < _LEAST_FILES else "",
        note="a rank needs one for each peer it talks to; a driver one for each node",
    )
    yield _locked_memory(root)
    yield _shared_memory(root)
    yield _cgroup_memory(root)


def _locked_memory(root: Path) -> Reading:
    """RDMA registers its buffers as locked memory; sockets do not."""
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    rdma = (root / "sys/class/infiniband").is_dir() and any((root / "sys/class/infiniband").iterdir())
    small = f"{format_bytes(locked)} may be locked, and RDMA is here: ulimit -l unlimited"
    return Reading(
        name="locked memory",
        value=float(locked) if locked >= 0 else "unlimited",
        unit="bytes",
        problem=small if rdma and locked >= 0 else "",
        note="" if rdma else "no RDMA device needs it",
    )


def _shared_memory(root: Path) -> Reading:
    place = root / "dev/shm"
    try:
        found = os.statvfs(place)
    except OSError as error:
        problem = f"no shared memory at {place} ({error.strerror}): mount a tmpfs there"
        return Reading(name="shared memory", problem=problem)
    free = found.f_bavail * found.f_frsize
    small = f"{format_bytes(free)} free in {place}: remove what ended runs left, or give the container more"
    return Reading(
        name="shared memory",
        value=float(free),
        unit="bytes",
        problem=small if free < _LEAST_SHARED_BYTES else "",
        note="free; the loader's ring and snapshots live there",
    )


def _cgroup_memory(root: Path) -> Reading:
    """Of this process's group and its parents, the tightest; also of version 1."""
    tightest: tuple[float, float] | None = None
    for folder, limit, used in _groups(root):
        most, now = read_number(folder / limit), read_number(folder / used)
        if (
            most is not None
            and now is not None
            and (tightest is None or most - now < tightest[0] - tightest[1])
        ):
            tightest = most, now
    if tightest is None or tightest[0] > 2**60:  # version 1 says "none" by a large number
        return Reading(name="cgroup memory", value="unlimited", note="the node's memory is the limit")
    most, now = tightest
    problem = (
        f"{format_bytes(now)} of {format_bytes(most)} used: the kernel will kill a rank; raise the limit"
    )
    return Reading(
        name="cgroup memory",
        value=most,
        unit="bytes",
        problem=problem if now > 0.95 * most else "",
        note=f"{format_bytes(now)} of it used",
    )


def _groups(root: Path) -> Iterator[tuple[Path, str, str]]:
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = base / path.lstrip("/")
        yield from ((one, *names) for one in (folder, *folder.parents) if one.is_relative_to(base))


def check_versions(root: Path = _ROOT) -> Iterator[Reading]:
    """Those that must be the same on all nodes."""
    driver = re.search(r"Kernel Module\D*([\d.]+)", read_text(root / "proc/driver/nvidia/version") or "")
    found = {
        "myriad": __version__,
        "Python": platform.python_version(),
        "torch": _package("torch"),
        "NCCL": _package("nvidia-nccl-cu13") or _package("nvidia-nccl-cu12"),
        "GPU driver": driver[1] if driver else "",
        "kernel": platform.release(),
    }
    for name, version in found.items():
        yield Reading(
            name=f"version of {name}",
            value=version or None,
            skipped="" if version else "not here",
            hardware=cpu_key(),
            remedy=f"install the {name} of the other nodes, or save the baseline anew if all have changed",
        )


def _package(name: str) -> str:
    """Without importing it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
