"""Run a probe in a process of its own, with a deadline.

A test may hang its process (a disk, a device), kill it (bad memory) or leave threads in it. The diagnosis
then continues and reports that.

    python -m myriad.doctor.probes.probe_process NAME DESCRIPTOR FOLDER     readings, one JSON object a line
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from myriad.doctor.diagnosis import Reading
from myriad.system.child_process import die_with_parent

__all__ = ["PROBES", "run_probe"]

PROBES = {
    "devices": ("what the accelerators' driver reports", 30.0),
    "memory": ("memory", 30.0),
    "disk": ("disk", 20.0),
    "network": ("network interfaces", 30.0),
    "rdma": ("RDMA ports", 300.0),
    "ranks": ("products, bits and all-to-all of ranks", 60.0),
    "gpu": ("GPUs", 120.0),
    "gpus": ("GPUs with each other", 240.0),
}
"""What each probe tests, and its time limit in seconds."""

_MOST_BYTES = 2**20


def run_probe(name: str, folder: Path, seconds: float | None = None) -> Iterator[Reading]:
    """Run a probe and yield its readings, and one more if it died or hung. ``seconds`` defaults to its limit
    in `PROBES`."""
    what, most = PROBES[name]
    reader, writer = os.pipe()
    words = [sys.executable, "-Pm", "myriad.doctor.probes.probe_process", name, str(writer), str(folder)]
    process = subprocess.Popen(
        words,
        pass_fds=[writer],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    os.close(writer)
    most = most if seconds is None else seconds
    try:
        text, ended = _read(reader, most)
        code = _code(process) if ended else None
    finally:
        os.close(reader)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # ranks too; one that hangs in the kernel is left behind
    yield from (Reading(**json.loads(line)) for line in text.split("\n")[:-1])
    if code != 0:
        problem = f"the test died with exit code {code}" if ended else f"no answer in {most:g} s: it hangs"
        yield Reading(name=what, problem=problem, remedy="look at the kernel's log")


def _code(process: "subprocess.Popen[bytes]") -> int | None:
    """Return the exit code of a process that has closed its end of the pipe."""
    with suppress(subprocess.TimeoutExpired):
        return process.wait(5.0)
    return None


def _read(reader: int, seconds: float) -> tuple[str, bool]:
    """Return the output, and whether it is complete."""
    text, end = b"", time.monotonic() + seconds
    while len(text) < _MOST_BYTES:
        ready, _, _ = select.select([reader], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return text.decode(), False
        part = os.read(reader, 2**16)
        if not part:
            return text.decode(), True
        text += part
    return text.decode(), False


def _readings(name: str, folder: Path) -> Iterator[Reading]:
    """Return the readings of a probe. Each probe imports only what it needs; torch only where it is used."""
    if name == "devices":
        from myriad.doctor.devices import check_devices, find_provider

        return iter(check_devices(find_provider()))
    if name == "memory":
        from myriad.doctor.probes.memory_probe import check_memory

        return check_memory()
    if name == "disk":
        from myriad.doctor.probes.host_probe import check_disk

        return check_disk(folder)
    if name == "network":
        from myriad.doctor.probes.network_probe import check_network

        return check_network()
    if name == "rdma":
        from myriad.doctor.probes.rdma_probe import check_rdma, count_gpus

        return check_rdma(num_gpus=count_gpus())
    if name == "gpus":
        from myriad.doctor.probes.collective_probe import check_gpus_together

        return check_gpus_together()
    if name == "ranks":
        from myriad.doctor.probes.rank_probe import check_ranks

        return check_ranks()
    from myriad.doctor.probes.gpu_probe import check_gpus

    return check_gpus()


def main(arguments: list[str]) -> None:
    """Write each reading as soon as it is known."""
    name, descriptor, folder = arguments
    die_with_parent(os.getppid())  # a diagnosis that is ended leaves none behind
    os.set_inheritable(int(descriptor), False)
    for reading in _readings(name, Path(folder)):
        os.write(int(descriptor), json.dumps(asdict(reading)).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
