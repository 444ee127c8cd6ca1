"""The folder of a run: free space, writing, syncing, and whether data reads back unchanged.

The probe runs in a process of its own, which may hang in the kernel with the disk that it tests.
"""

import errno
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from myriad.doctor.diagnosis import Reading
from myriad.doctor.hardware import cpu_key
from myriad.units import format_bytes

__all__ = ["check_disk"]

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
