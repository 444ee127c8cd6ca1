"""Counters of a node's network: each second always, each 10 ms when asked; whether a transfer reaches the
limit of a link can be seen in them.

    one look   interfaces (by netlink), TCP's retransmissions (/proc/net), ports of RDMA (/sys): what is open
               stays open, 0.1 ms in all
    a file     one line a look, after a line that says what its numbers are: {"fields": [...], "speed": ...}
               {"time": 1.5, "links": {"eth0": [...]}, "tcp": [...], "rdma": {"mlx5_0:1": [...]}}

Numbers only grow, from whenever the kernel began to count; what a reader wants are differences.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from myriad.jsonl import append_lines
from myriad.telemetry.links import Kernel, LinkCounters, link_bytes_per_second

__all__ = ["LINK_FIELDS", "RDMA_FIELDS", "TCP_FIELDS", "CounterFile", "Counters", "Sample", "sample_often"]

LINK_FIELDS = (
    "received_bytes",
    "sent_bytes",
    "received_packets",
    "sent_packets",
    "errors",
    "drops",
    "carrier_changes",
)
TCP_FIELDS = ("retransmitted_segments", "timeouts")
RDMA_FIELDS = ("received_bytes", "sent_bytes", "errors", "drops", "retransmissions")
_RDMA_FILES: tuple[tuple[tuple[str, int], ...], ...] = (
    (("counters/port_rcv_data", 4),),  # counted in words of four bytes
    (("counters/port_xmit_data", 4),),
    (("counters/port_rcv_errors", 1), ("counters/symbol_error", 1)),
    (("counters/port_xmit_discards", 1),),
    (("hw_counters/packet_seq_err", 1), ("hw_counters/local_ack_timeout_err", 1)),
)
_FILE_BYTES = 2**16
_MOST_LINKS = 32
MOST_LOG_BYTES = 8 * 2**20
"""Of a file of seconds: most of a day; as much again of those before is kept."""


@dataclass(frozen=True)
class Sample:
    """One look."""

    time: float
    links: dict[str, tuple[int, ...]]
    """`LINK_FIELDS` of each interface."""
    tcp: tuple[int, ...] = ()
    """`TCP_FIELDS` of the node; none: not told."""
    rdma: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """`RDMA_FIELDS` of each port."""


class Counters:
    """Reads those of this node. Not for two threads at once."""

    def __init__(self, names: Iterable[str], *, sys: Path = Path("/sys"), proc: Path = Path("/proc")) -> None:
        """``names``: of the interfaces that count."""
        self._names = list(dict.fromkeys(names))[:_MOST_LINKS]
        self._kernel = _opened(Kernel)
        self._tcp = [_Kept(proc / "net" / name) for name in ("snmp", "netstat")]
        ports = sorted((sys / "class/infiniband").glob("*/ports/*"))[:_MOST_LINKS]
        self._ports = {
            f"{port.parts[-3]}:{port.name}": [
                [(_Kept(port / name), scale) for name, scale in files] for files in _RDMA_FILES
            ]
            for port in ports
        }
        self._rates = {f"{port.parts[-3]}:{port.name}": _rdma_rate(port / "rate") for port in ports}

    def speeds(self) -> dict[str, float]:
        """Bytes per second, one way, of links whose drivers say so."""
        found = {name: link_bytes_per_second(name) for name in self._names} | self._rates
        return {name: speed for name, speed in found.items() if speed > 0}

    def look(self) -> Sample:
        """Now."""
        at = time.time()
        try:
            links = [] if self._kernel is None else list(self._kernel.ask(self._names))
        except OSError:
            links = []
        rdma = {name: tuple(map(_sum, columns)) for name, columns in self._ports.items()}
        return Sample(at, {link.name: _numbers(link) for link in links}, self._look_at_tcp(), rdma)

    def _look_at_tcp(self) -> tuple[int, ...]:
        snmp, netstat = (_table(kept.read()) for kept in self._tcp)
        if "RetransSegs" not in snmp:
            return ()
        return snmp["RetransSegs"], netstat.get("TCPTimeouts", 0)

    def close(self) -> None:
        """For good."""
        if self._kernel is not None:
            self._kernel.close()
        kept = [one for columns in self._ports.values() for files in columns for one, _ in files]
        for file in [*self._tcp, *kept]:
            file.close()


class _Kept:
    """A file of the kernel's that stays open."""

    def __init__(self, path: Path) -> None:
        self._handle = _opened(lambda: os.open(path, os.O_RDONLY))

    def read(self) -> bytes:
        """All of it as it is now; nothing where it is not."""
        try:
            return b"" if self._handle is None else os.pread(self._handle, _FILE_BYTES, 0)
        except OSError:
            return b""

    def close(self) -> None:
        """For good."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def _opened(open_it: Callable[[], Any]) -> Any:
    try:
        return open_it()
    except OSError:
        return None


def _numbers(link: LinkCounters) -> tuple[int, ...]:
    return tuple(getattr(link, name) for name in LINK_FIELDS)


def _sum(files: Sequence[tuple[_Kept, int]]) -> int:
    return sum(int(text) * scale for kept, scale in files if (text := kept.read().strip()).isdigit())


def _table(data: bytes) -> dict[str, int]:
    """Of /proc/net/snmp and netstat: a line of names, a line of numbers; of Tcp and TcpExt."""
    found: dict[str, int] = {}
    lines = data.decode(errors="replace").splitlines()
    for names, numbers in zip(lines[::2], lines[1::2], strict=False):
        if names.startswith(("Tcp:", "TcpExt:")):
            found |= {
                name: int(number)
                for name, number in zip(names.split()[1:], numbers.split()[1:], strict=False)
                if number.isdigit()
            }
    return found


def _rdma_rate(path: Path) -> float:
    """``100 Gb/sec (4X EDR)``."""
    try:
        number, unit = path.read_text().split()[:2]
        return float(number) * 1e9 / 8 if unit == "Gb/sec" else 0.0
    except (OSError, ValueError):
        return 0.0


class CounterFile:
    """Lines of looks; when it has grown to its limit it becomes the one before, which is replaced."""

    def __init__(self, path: Path, speeds: dict[str, float], most_bytes: int = MOST_LOG_BYTES) -> None:
        self._path, self._speeds, self._most_bytes = path, speeds, most_bytes

    def append(self, samples: Sequence[Sample]) -> None:
        """Raises ``OSError``."""
        lines = [json.dumps(asdict(sample)) for sample in samples]
        size = self._path.stat().st_size if self._path.exists() else 0
        if size > self._most_bytes:
            self._path.replace(self._path.with_suffix(f".before{self._path.suffix}"))
            size = 0
        if not size:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lines.insert(0, json.dumps(self._head()))
        append_lines(self._path, lines)

    def _head(self) -> dict[str, Any]:
        fields = {"links": LINK_FIELDS, "tcp": TCP_FIELDS, "rdma": RDMA_FIELDS}
        return {"fields": fields, "speed_bytes_per_second": self._speeds}


def sample_often(counters: Counters, seconds: float, every_seconds: float = 0.01) -> list[Sample]:
    """Looks for as long, at a steady pace; of looks that come too late one is left out."""
    began = time.monotonic()
    samples, due = [counters.look()], began
    while due - began < seconds:
        due = max(due + every_seconds, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))
        samples.append(counters.look())
    return samples
