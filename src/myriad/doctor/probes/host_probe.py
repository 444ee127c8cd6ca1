"""Limits, versions and the clock of this host, and the disk under the folder of a run.

No decision of Myriad uses another machine's clock. Clock checks are advisory: a clock that is off makes
logs of several nodes hard to compare. The kernel steers ``CLOCK_MONOTONIC`` and ``CLOCK_REALTIME`` alike;
if they diverge, the time was set. Nothing steers ``CLOCK_MONOTONIC_RAW``, so its difference to
``CLOCK_MONOTONIC`` shows how hard the clock is steered.

The disk's check (free space, writing, syncing, whether data reads back unchanged) runs in a process of its
own, which may hang in the kernel with the disk that it tests.
"""

import ctypes
import errno
import importlib.metadata
import os
import platform
import re
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from myriad import __version__
from myriad.doctor.diagnosis import Reading
from myriad.doctor.hardware import cpu_key, read_number, read_text
from myriad.units import format_bytes

__all__ = ["check_clock", "check_disk", "check_limits", "check_versions", "read_clocks"]

_LEAST_FILES, _LEAST_SHARED_BYTES = 1024, 2**26
_ROOT = Path("/")


def check_limits(root: Path = _ROOT) -> Iterator[Reading]:
    """Check open files, locked memory, shared memory, and the cgroup's memory."""
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
    """Check locked memory: RDMA registers its buffers as such; sockets do not."""
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
    """Check the tightest limit of this process's cgroup and its parents, version 1 or 2."""
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
    """Yield the versions that must be the same on all nodes."""
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
            remedy=f"install the {name} of the other nodes, or save a new baseline if all have changed",
        )


def _package(name: str) -> str:
    """Return the version of a package without importing it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


_STEP_SECONDS = 0.05
_STEERED_RATIO = 5e-4
"""The most that the kernel steers a clock; a higher rate means a broken timer."""
_UNSYNCHRONIZED, _ERROR_STATE = 0x40, 5


@dataclass(frozen=True)
class ClockTimes:
    """Three clocks at one moment, in seconds."""

    realtime: float
    monotonic: float
    raw: float


def read_clocks() -> ClockTimes:
    """Read the three clocks of this machine, one right after the other."""
    clocks = (time.CLOCK_REALTIME, time.CLOCK_MONOTONIC, time.CLOCK_MONOTONIC_RAW)
    return ClockTimes(*(time.clock_gettime(clock) for clock in clocks))


def check_clock(before: ClockTimes, after: ClockTimes) -> Iterator[Reading]:
    """Compare the clocks at two moments some seconds apart."""
    passed = after.monotonic - before.monotonic
    step = (after.realtime - before.realtime) - passed
    stepped = abs(step) > _STEP_SECONDS
    yield Reading(
        name="clock step",
        value=step,
        unit="s",
        problem="the time of day was set while this ran: times in logs jump" if stepped else "",
        note=f"in {passed:.1f} s; no decision uses it",
        advisory=True,
    )
    drift = passed / max(after.raw - before.raw, 1e-9) - 1
    yield Reading(
        name="clock drift",
        value=1e6 * drift,
        unit="ppm",
        problem="the clock runs far from its own crystal" if abs(drift) > _STEERED_RATIO else "",
        note="how hard it is steered; no decision uses it",
        advisory=True,
    )
    yield _synchronized()


class _Timex(ctypes.Structure):
    """The fields of the kernel's ``struct timex`` that are read; the rest is padding."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("room", ctypes.c_char * 256),
    )


def _synchronized() -> Reading:
    """Query the kernel; ``modes`` 0 changes nothing."""
    name, timex = "clock synchronized", _Timex()
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    except (OSError, AttributeError):
        state = -1
    if state < 0:
        return Reading(name=name, skipped="the kernel does not report it", advisory=True)
    lost = state == _ERROR_STATE or bool(timex.status & _UNSYNCHRONIZED)
    return Reading(
        name=name,
        value="no" if lost else "yes",
        problem="no time service steers the clock (chrony, ntpd): times in logs of nodes differ"
        if lost
        else "",
        note=f"off by at most {timex.maxerror / 1e3:.0f} ms by the kernel's estimate",
        advisory=True,
    )


_WRITE_BYTES, _BLOCK_BYTES = 2**26, 2**22
_SYNCS = 5
_LEAST_FREE_BYTES, _LEAST_FREE_FILES = 2**30, 1000
_LEAST_BYTES_PER_SECOND, _LEAST_SYNCS_PER_SECOND = 2e7, 2.0
_MOST_SECONDS = 3.0


def check_disk(folder: Path) -> Iterator[Reading]:
    """Check the disk of ``folder``, to which the run writes, or of its nearest existing parent."""
    place = folder.absolute()
    while not place.is_dir():
        place = place.parent
    yield _free(place)
    try:
        with tempfile.TemporaryFile(dir=place, prefix=".myriad-doctor-") as file:
            yield from _write(file.fileno(), place)
    except OSError as error:
        what = {errno.ENOSPC: "the disk is full", errno.EROFS: "the disk can only be read"}
        problem = f"{place}: {what.get(error.errno or 0, error.strerror)}"
        remedy = "free space there, or use another folder; if it became read-only, see the kernel's log"
        yield Reading(name="disk write", problem=problem, remedy=remedy)


def _free(place: Path) -> Reading:
    found = os.statvfs(place)
    free, files = found.f_bavail * found.f_frsize, found.f_favail
    problem = ""
    if free < _LEAST_FREE_BYTES:
        problem = (
            f"{format_bytes(free)} free in {place}: remove old runs or checkpoints (myriad checkpoint prune)"
        )
    elif found.f_files and files < _LEAST_FREE_FILES:
        problem = f"room for {files} more files in {place}: remove files"
    return Reading(
        name="disk free space", value=float(free), unit="bytes", problem=problem, note=f"in {place}"
    )


def _write(handle: int, place: Path) -> Iterator[Reading]:
    block = os.urandom(_BLOCK_BYTES)
    start, written = time.perf_counter(), 0
    while written < _WRITE_BYTES and time.perf_counter() - start < _MOST_SECONDS:
        written += os.write(handle, block[written % _BLOCK_BYTES :])
    os.fsync(handle)
    yield Reading(
        name="disk write",
        value=written / (time.perf_counter() - start),
        unit="bytes/s",
        floor=_LEAST_BYTES_PER_SECOND,
        hardware=cpu_key(),
        note=f"{format_bytes(written)} in {place}, synced",
        remedy="look for others writing there, a rebuilding array, a failing disk",
    )
    wrong = _read_back(handle, block, written)
    bad = f"{wrong} blocks came back different in {place}: take the disk out of use"
    yield Reading(
        name="disk read back", value=float(wrong), unit="wrong blocks", problem=bad if wrong else ""
    )
    yield _sync(handle)


def _read_back(handle: int, block: bytes, written: int) -> int:
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)  # from the disk, where the file system allows it
    return sum(
        os.pread(handle, min(_BLOCK_BYTES, written - start), start)
        != block[: min(_BLOCK_BYTES, written - start)]
        for start in range(0, written, _BLOCK_BYTES)
    )


def _sync(handle: int) -> Reading:
    seconds = []
    for number in range(_SYNCS):
        start = time.perf_counter()
        os.pwrite(handle, bytes([number]) * 4096, 0)
        os.fsync(handle)
        seconds.append(time.perf_counter() - start)
        if sum(seconds) > _MOST_SECONDS:
            break
    return Reading(
        name="disk sync",
        value=1 / max(statistics.median(seconds), 1e-9),
        unit="/s",
        floor=_LEAST_SYNCS_PER_SECOND,
        note="4 KiB written and synced",
        remedy="a journal is synced before each decision: keep it on a quicker disk",
    )
