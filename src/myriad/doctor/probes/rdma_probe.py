"""RDMA inside one node, with the tools of `perftest`: each port to memory, to each GPU, and to the next port.

    each active port   ib_write_bw, ib_read_bw   port to memory of each memory node, and back
                       ib_write_lat              port to memory (the tool has no CUDA mode)
                       ib_write_bw --use_cuda    port into each GPU (GPUDirect), ib_read_bw out of it
    each pair          ib_write_bw               each port to the next one: every port sends and receives once

The kernel short-cuts a TCP connection to an address of the node itself. An RDMA loopback crosses PCIe and the
NIC's own engine. It reaches nearly the port's rate if PCIe is wide enough. Without a baseline the floor is 80
% of it for memory and half for GPUs, whose path may cross a processor.

A test that cannot run (no device, no tool, a tool without CUDA, no path between two rails) is a skipped item
with the reason, or a bad item if the baseline has a value for it. The output's units follow perftest's
README: ``MB/sec`` and ``MiB/sec`` are 2^20 bytes, ``Gb/sec`` are 10^9 bits.
"""

import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from myriad.comm.free_port import free_port
from myriad.doctor.diagnosis import Reading
from myriad.doctor.hardware import SYS, read_text
from myriad.errors import RunFailedError
from myriad.system.machine import MemoryNode, find_memory_nodes

__all__ = [
    "Latency",
    "RdmaPort",
    "check_rdma",
    "count_gpus",
    "find_ports",
    "parse_bandwidth",
    "parse_latency",
]

_TOOLS = ("ib_write_bw", "ib_read_bw", "ib_write_lat")
_MESSAGE_BYTES, _MESSAGES = 2**20, 1000
_SMALL_BYTES, _SMALL_MESSAGES = 64, 2000
_SECONDS = 20.0
"""Time limit of one transfer."""
_CONNECT_SECONDS = 5.0
_MOST_OUTPUT = 2**16
_MEMORY_RATIO, _GPU_RATIO = 0.8, 0.5
_UNITS = {"gb": 1e9 / 8, "mb": 2.0**20, "mib": 2.0**20}
_NO_CUDA = ("unrecognized option '--use_cuda", "CUDA is not supported", "invalid option")
_NO_MEMORY_REGION = "allocate MR"


@dataclass(frozen=True)
class RdmaPort:
    """A port of an RDMA device, as the kernel shows it."""

    device: str
    number: int
    is_active: bool
    state: str
    bytes_per_second: float
    """Rate of the link in each direction; 0: unknown."""
    hardware: str
    """Key in a baseline."""

    @property
    def name(self) -> str:
        """Name of the port in reports."""
        return f"{self.device} port {self.number}"


@dataclass(frozen=True)
class Latency:
    """Time of one message, in seconds."""

    typical: float
    p99: float


def find_ports(sys: Path = SYS) -> list[RdmaPort]:
    """Return all ports of all RDMA devices, active or not."""
    found = []
    for folder in sorted((sys / "class/infiniband").glob("*/ports/*")):
        device = folder.parents[1]
        state = read_text(folder / "state") or "unknown"
        rate = re.match(r"([\d.]+) *Gb/sec", read_text(folder / "rate") or "")
        vendor, model = (read_text(device / "device" / name) or "" for name in ("vendor", "device"))
        kind = f"{vendor.removeprefix('0x')}:{model.removeprefix('0x')}" if vendor else "virtual"
        found.append(
            RdmaPort(
                device=device.name,
                number=int(folder.name) if folder.name.isdigit() else 1,
                is_active="ACTIVE" in state,
                state=state.rpartition(":")[2].strip(),
                bytes_per_second=float(rate[1]) * 1e9 / 8 if rate else 0.0,
                hardware=f"rdma {device.name} {kind}",
            )
        )
    return found


def count_gpus(root: Path = Path("/proc/driver/nvidia/gpus")) -> int:
    """Return the number of GPUs that the driver shows, regardless of CUDA_VISIBLE_DEVICES."""
    with suppress(OSError):
        return sum(1 for _ in root.iterdir())
    return 0


def parse_bandwidth(output: str) -> float:
    """Return the average bytes per second of the last row that a bandwidth tool printed. Raises `ValueError`
    when there is none: the tool failed, or prints another table."""
    unit, column, found = 0.0, -1, None
    for line in output.splitlines():
        if "#bytes" in line:
            header = re.search(r"BW average\[(\w+)/sec\]", line)
            unit = _UNITS.get(header[1].lower(), 0.0) if header else 0.0
            column = len(re.findall(r"#\w+|BW peak\[", line)) if header else -1
        elif unit and re.fullmatch(r"[\d.\s]+", line) and len(line.split()) > column:
            found = float(line.split()[column]) * unit
    if found is None:
        raise ValueError("no row of results")
    return found


def parse_latency(output: str) -> Latency:
    """Return the typical latency and the 99th percentile of the last row of a latency tool. Raises
    `ValueError` when there is none."""
    rows: list[list[str]] = []
    names: list[str] = []
    for line in output.splitlines():
        if "#bytes" in line:
            names = re.findall(r"#\w+|t_\w+\[usec\]|[\d.]+% percentile\[usec\]", line)
        elif names and re.fullmatch(r"[\d.\s]+", line) and len(line.split()) >= len(names) > 0:
            rows.append(line.split())
    try:
        typical, p99 = (names.index(name) for name in ("t_typical[usec]", "99% percentile[usec]"))
        return Latency(float(rows[-1][typical]) * 1e-6, float(rows[-1][p99]) * 1e-6)
    except (ValueError, IndexError):
        raise ValueError("no row of results") from None


# Readings


def check_rdma(sys: Path = SYS, *, num_gpus: int = 0) -> Iterator[Reading]:
    """Yield the readings that the head of this module lists; a skipped one where nothing can be tested."""
    ports = find_ports(sys)
    if not ports:
        yield Reading(name="RDMA", skipped="no RDMA device (/sys/class/infiniband is empty)")
        return
    for port in ports:
        yield from _check_port(port)
    active = [port for port in ports if port.is_active]
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        yield Reading(name="RDMA transfers", skipped=f"no {', '.join(missing)} here: install perftest")
        return
    memory = find_memory_nodes(sys)
    for port in active:
        for node in memory:
            yield from _to_memory(port, node)
        yield _latency(port, memory[0])
        if not num_gpus:
            yield Reading(name=f"{port.name} to GPU", skipped="no GPU here")
        for gpu in range(num_gpus):
            yield from _to_gpu(port, gpu, memory[0])
    yield from _between(active, memory[0])


def _check_port(port: RdmaPort) -> Iterator[Reading]:
    if not port.is_active:
        yield Reading(name=f"{port.name} state", skipped=f"{port.state}: assumed unused")
        return
    yield Reading(name=f"{port.name} state", value=port.state, hardware=port.hardware)
    yield Reading(
        name=f"{port.name} rate",
        value=port.bytes_per_second or None,
        unit="bytes/s",
        skipped="" if port.bytes_per_second else "the driver reports none",
        hardware=port.hardware,
        remedy="it came up with fewer lanes or an older rate: reseat cable and transceiver",
    )


def _to_memory(port: RdmaPort, node: MemoryNode) -> Iterator[Reading]:
    narrow = "compare PCIe width and speed (lspci -vv) and which memory node the NIC hangs on"
    floor = _MEMORY_RATIO * port.bytes_per_second or None
    for tool, name in (("ib_write_bw", "to"), ("ib_read_bw", "from")):
        title = f"{port.name} {name} memory node {node.index}"
        yield _bandwidth(title, port, port, tool, node, (), floor, narrow)


def _to_gpu(port: RdmaPort, gpu: int, node: MemoryNode) -> Iterator[Reading]:
    far = "see how the NIC reaches the GPU (nvidia-smi topo -m), ACS and PCIe relaxed ordering"
    floor = _GPU_RATIO * port.bytes_per_second or None
    for tool, name in (("ib_write_bw", "to"), ("ib_read_bw", "from")):
        title = f"{port.name} {name} GPU {gpu}"
        options = (f"--use_cuda={gpu}",)
        found = _bandwidth(title, port, port, tool, node, options, floor, far)
        if _NO_MEMORY_REGION in found.skipped:  # without nvidia-peermem the kernel may export the memory
            found = _bandwidth(title, port, port, tool, node, (*options, "--use_cuda_dmabuf"), floor, far)
        yield found


def _between(ports: Sequence[RdmaPort], node: MemoryNode) -> Iterator[Reading]:
    if len(ports) < 2:
        yield Reading(name="RDMA port to port", skipped="fewer than two active ports")
        return
    remedy = "compare with the other pairs: the port that is slow in two of them is the one"
    for port, target in zip(ports, [*ports[1:], ports[0]], strict=True):
        rate = min(port.bytes_per_second, target.bytes_per_second)
        title = f"{port.name} to {target.name}"
        yield _bandwidth(
            title, port, target, "ib_write_bw", node, (), _MEMORY_RATIO * rate or None, remedy, other=target
        )


def _bandwidth(
    title: str,
    source: RdmaPort,
    target: RdmaPort,
    tool: str,
    node: MemoryNode,
    target_options: Sequence[str],
    floor: float | None,
    remedy: str,
    other: RdmaPort | None = None,
) -> Reading:
    common = ["--report_gbits", "-s", str(_MESSAGE_BYTES), "-n", str(_MESSAGES), "-F"]
    try:
        output = _transfer(tool, source, target, node, common, target_options)
        rate = parse_bandwidth(output)
    except (RunFailedError, ValueError) as error:
        return _not_measured(title, source, str(error), "no path between the two ports" if other else "")
    return Reading(
        name=title,
        value=rate,
        unit="bytes/s",
        floor=floor,
        hardware=source.hardware,
        note=f"{tool}{''.join(f' {option}' for option in target_options)}",
        remedy=remedy,
    )


def _latency(port: RdmaPort, node: MemoryNode) -> Reading:
    title, options = f"{port.name} latency", ["-s", str(_SMALL_BYTES), "-n", str(_SMALL_MESSAGES), "-F"]
    try:
        found = parse_latency(_transfer("ib_write_lat", port, port, node, options, ()))
    except (RunFailedError, ValueError) as error:
        return _not_measured(title, port, str(error), "")
    note = f"{_SMALL_BYTES} bytes, 99 %: {1e6 * found.p99:.3g} us"
    return Reading(name=title, value=found.typical, unit="s", note=note, advisory=True)


def _not_measured(title: str, port: RdmaPort, error: str, means: str) -> Reading:
    """Return a skipped reading with the reason; it is bad if the baseline has a value."""
    if any(word in error for word in _NO_CUDA):
        why = "this perftest was built without CUDA"
    elif _NO_MEMORY_REGION in error:
        why = f"the NIC cannot register the GPU's memory: load nvidia-peermem ({error})"
    else:
        why = f"{means}: {error}" if means else f"the tool failed: {error}"
    return Reading(name=title, skipped=why, hardware=port.hardware)


# The tools


def _transfer(
    tool: str,
    source: RdmaPort,
    target: RdmaPort,
    node: MemoryNode,
    options: Sequence[str],
    target_options: Sequence[str],
) -> str:
    """Run a tool against itself, both ends on the cores of ``node``, and return what its client prints.
    Raises `RunFailedError` with the last words of the end that failed."""
    tcp = str(free_port("127.0.0.1"))
    first, second = (
        [tool, "-d", port.device, "-i", str(port.number), "-p", tcp, *options] for port in (target, source)
    )
    end = time.monotonic() + _SECONDS
    with _process([*first, *target_options], node) as server, suppress(subprocess.TimeoutExpired):
        try:
            _await_listening(server, int(tcp))
            with _process([*second, "127.0.0.1"], node) as client:
                try:
                    output, _ = client.communicate(timeout=max(0.1, end - time.monotonic()))
                finally:
                    client.kill()
            if client.returncode == 0:
                return output[-_MOST_OUTPUT:]
            with suppress(subprocess.TimeoutExpired):
                server.wait(1.0)
            theirs = "" if server.poll() is None else server.communicate()[0]
            raise RunFailedError(_last_words(theirs if server.returncode else output))
        finally:
            server.kill()
    raise RunFailedError(f"{tool} did not end in {_SECONDS:g} s")


def _process(words: Sequence[str], node: MemoryNode) -> "subprocess.Popen[str]":
    """Start a tool on the cores of a memory node: what it touches first is that node's memory."""
    started: list[subprocess.Popen[str] | OSError] = []

    def start() -> None:
        os.sched_setaffinity(0, node.cpus)  # of this thread, which the child inherits
        try:
            started.append(
                subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                )
            )
        except OSError as error:
            started.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    if isinstance(started[0], OSError):
        raise RunFailedError(f"{words[0]} cannot be started: {started[0].strerror}")
    return started[0]


def _await_listening(server: "subprocess.Popen[str]", port: int) -> None:
    """Wait until the server listens, without connecting: it takes one connection only."""
    end, wanted = time.monotonic() + _CONNECT_SECONDS, f":{port:04X}"
    while time.monotonic() < end:
        if server.poll() is not None:
            raise RunFailedError(_last_words(server.communicate()[0]))
        tables = "".join(read_text(Path(f"/proc/net/{name}")) or "" for name in ("tcp", "tcp6"))
        if any(row[1].endswith(wanted) and row[3] == "0A" for row in _rows(tables)):
            return
        time.sleep(0.02)
    raise RunFailedError(f"the server did not listen within {_CONNECT_SECONDS:g} s")


def _rows(table: str) -> Iterator[list[str]]:
    return (row for line in table.splitlines() if len(row := line.split()) > 3)


def _last_words(output: str) -> str:
    """Return the line that says what is wrong, of what a tool printed."""
    lines = [" ".join(line.split()) for line in output.splitlines() if re.search(r"[A-Za-z]", line)]
    marked = [line for line in lines if re.search(r"unrecognized|Couldn't|Unable|Failed|[Ee]rror", line)]
    return (marked or lines or ["it printed nothing"])[0][:200]
