"""Network counters of a node: sampled every second, and every 10 ms on request. They show whether a transfer
reaches the limit of a link.

    sample     interfaces (netlink), TCP retransmissions (/proc/net), RDMA ports (/sys); files stay open,
               1 ms in all
    file       one line per sample, after a line that names the fields: {"fields": [...], "speed": ...}
               {"time": 1.5, "links": {"eth0": [...]}, "tcp": [...], "rdma": {"mlx5_0:1": [...]}}

Counters only grow, from an arbitrary start in the kernel; readers take differences.
`peaks` computes the peak rate of each link, relative to its limit, from samples.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from myriad.system.jsonl import append_lines
from myriad.telemetry.links.ethtool import link_bytes_per_second
from myriad.telemetry.links.netlink import Kernel, LinkCounters

__all__ = [
    "LINK_FIELDS",
    "RDMA_FIELDS",
    "TCP_FIELDS",
    "CounterFile",
    "CounterSample",
    "Counters",
    "sample_often",
]

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
"""Maximum size of a counter file. At one sample per second it holds most of a day; one older file is kept."""


@dataclass(frozen=True)
class CounterSample:
    """The counters of a node at one time."""

    time: float
    links: dict[str, tuple[int, ...]]
    """`LINK_FIELDS` of each interface."""
    tcp: tuple[int, ...] = ()
    """`TCP_FIELDS` of the node; empty if the kernel does not report them."""
    rdma: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """`RDMA_FIELDS` of each port."""


class Counters:
    """Reads the network counters of this node. It is not thread-safe."""

    def __init__(self, names: Iterable[str], *, sys: Path = Path("/sys"), proc: Path = Path("/proc")) -> None:
        """Open the counters of the interfaces ``names`` and of all RDMA ports."""
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
        """Return bytes per second, one way, of the links whose drivers report a speed."""
        found = {name: link_bytes_per_second(name) for name in self._names} | self._rates
        return {name: speed for name, speed in found.items() if speed > 0}

    def sample(self) -> CounterSample:
        """Read all counters now."""
        at = time.time()
        try:
            links = [] if self._kernel is None else list(self._kernel.ask(self._names))
        except OSError:
            links = []
        rdma = {name: tuple(map(_sum, columns)) for name, columns in self._ports.items()}
        return CounterSample(at, {link.name: _numbers(link) for link in links}, self._sample_tcp(), rdma)

    def _sample_tcp(self) -> tuple[int, ...]:
        snmp, netstat = (_table(kept.read()) for kept in self._tcp)
        if "RetransSegs" not in snmp:
            return ()
        return snmp["RetransSegs"], netstat.get("TCPTimeouts", 0)

    def close(self) -> None:
        """Close all files and the netlink socket."""
        if self._kernel is not None:
            self._kernel.close()
        kept = [one for columns in self._ports.values() for files in columns for one, _ in files]
        for file in [*self._tcp, *kept]:
            file.close()


class _Kept:
    """A kernel file that stays open between reads."""

    def __init__(self, path: Path) -> None:
        self._handle = _opened(lambda: os.open(path, os.O_RDONLY))

    def read(self) -> bytes:
        """Return the file's current content; empty if the file is missing."""
        try:
            return b"" if self._handle is None else os.pread(self._handle, _FILE_BYTES, 0)
        except OSError:
            return b""

    def close(self) -> None:
        """Close the counter file of the kernel."""
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
    """Parse the Tcp and TcpExt counters of /proc/net/snmp or netstat: a line of names, a line of numbers."""
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
    """Return the bytes per second in a rate file such as ``100 Gb/sec (4X EDR)``; 0 if it is unreadable."""
    try:
        number, unit = path.read_text().split()[:2]
        return float(number) * 1e9 / 8 if unit == "Gb/sec" else 0.0
    except (OSError, ValueError):
        return 0.0


class CounterFile:
    """A file of samples, one per line. At its size limit it is renamed over the previous file."""

    def __init__(self, path: Path, speeds: dict[str, float], most_bytes: int = MOST_LOG_BYTES) -> None:
        self._path, self._speeds, self._most_bytes = path, speeds, most_bytes

    def append(self, samples: Sequence[CounterSample]) -> None:
        """Append samples, and rotate the file at its limit. Raises ``OSError``."""
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


def sample_often(counters: Counters, seconds: float, every_seconds: float = 0.01) -> list[CounterSample]:
    """Sample for ``seconds`` at a fixed interval. Samples that are overdue are skipped."""
    began = time.monotonic()
    samples, due = [counters.sample()], began
    while due - began < seconds:
        due = max(due + every_seconds, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))
        samples.append(counters.sample())
    return samples


_WINDOW_SECONDS = 0.0095
"""Minimum window for a rate: one 10 ms sample. Samples that are closer together are merged, as the counters
of some drivers change in steps."""
_IDLE_BYTES_PER_SECOND = 1e5


@dataclass(frozen=True)
class LinkPeak:
    """Rates and losses of one link or RDMA port over a series of samples."""

    name: str
    sent_bytes_per_second: float
    received_bytes_per_second: float
    """Highest rate of any window."""
    mean_sent_bytes_per_second: float
    mean_received_bytes_per_second: float
    limit_bytes_per_second: float
    """Speed of the link one way; 0 if unknown."""
    lost: Mapping[str, int]
    """Nonzero counts of errors, drops and other losses."""

    @property
    def used_ratio(self) -> float:
        """Peak rate as a fraction of the limit; 0 if the limit is unknown."""
        most = max(self.sent_bytes_per_second, self.received_bytes_per_second)
        return most / self.limit_bytes_per_second if self.limit_bytes_per_second else 0.0


def peaks(samples: Sequence[CounterSample], speeds: Mapping[str, float]) -> list[LinkPeak]:
    """Return the peak of each link, busiest first."""
    found = [
        _peak(name, [(one.time, row) for one in samples if (row := table(one).get(name))], fields, speeds)
        for table, fields in ((_links, LINK_FIELDS), (_rdma, RDMA_FIELDS))
        for name in table(samples[-1])
    ]
    return sorted(found, key=lambda one: -(one.sent_bytes_per_second + one.received_bytes_per_second))


def _links(sample: CounterSample) -> dict[str, tuple[int, ...]]:
    return sample.links


def _rdma(sample: CounterSample) -> dict[str, tuple[int, ...]]:
    return sample.rdma


def _peak(
    name: str,
    rows: Sequence[tuple[float, tuple[int, ...]]],
    fields: Sequence[str],
    speeds: Mapping[str, float],
) -> LinkPeak:
    received, sent = fields.index("received_bytes"), fields.index("sent_bytes")
    (began, first), (ended, last) = rows[0], rows[-1]
    seconds = max(ended - began, 1e-9)
    losses = {
        field: last[at] - first[at]
        for at, field in enumerate(fields)
        if not field.endswith(("bytes", "packets")) and last[at] > first[at]
    }
    return LinkPeak(
        name,
        _most(rows, sent),
        _most(rows, received),
        (last[sent] - first[sent]) / seconds,
        (last[received] - first[received]) / seconds,
        speeds.get(name, 0.0),
        losses,
    )


def _most(rows: Sequence[tuple[float, tuple[int, ...]]], column: int) -> float:
    best, (since, before) = 0.0, rows[0]
    for at, row in rows[1:]:
        if at - since >= _WINDOW_SECONDS:
            best = max(best, (row[column] - before[column]) / (at - since))
            since, before = at, row
    return best


def describe_peaks(samples: Sequence[CounterSample], speeds: Mapping[str, float]) -> list[str]:
    """Describe the peaks in words. Idle links are left out."""
    lines = [
        _describe_peak(one)
        for one in peaks(samples, speeds)
        if max(one.sent_bytes_per_second, one.received_bytes_per_second) > _IDLE_BYTES_PER_SECOND
    ]
    first, last = samples[0].tcp, samples[-1].tcp
    again = last[TCP_FIELDS.index("retransmitted_segments")] - first[0] if first and last else 0
    lines = lines or ["nothing went over any link"]
    return [*lines, *([f"{again} segments of TCP were sent again"] if again else [])]


def _describe_peak(one: LinkPeak) -> str:
    limit = one.limit_bytes_per_second
    share = f", {one.used_ratio:.0%} of its {_rate(limit)}" if limit else "; its limit is unknown"
    text = (
        f"{one.name}: at most {_rate(one.sent_bytes_per_second)} sent"
        f" and {_rate(one.received_bytes_per_second)} received within 10 ms{share};"
        f" {_rate(one.mean_sent_bytes_per_second)} and {_rate(one.mean_received_bytes_per_second)} on average"
    )
    return text + "".join(f"; {count} {what.replace('_', ' ')}" for what, count in one.lost.items())


def _rate(bytes_per_second: float) -> str:
    for unit, scale in (("GB/s", 1e9), ("MB/s", 1e6)):
        if bytes_per_second >= scale:
            return f"{bytes_per_second / scale:.3g} {unit}"
    return f"{bytes_per_second / 1e3:.3g} kB/s"
