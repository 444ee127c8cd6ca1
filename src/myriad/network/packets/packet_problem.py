"""The input of a packet-level simulation, its checks, and an estimate of the memory that it needs.

An input that needs too much memory is refused before the memory is allocated.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from myriad.errors import BadInputError
from myriad.network.congestion_controls import PACKET_BYTES, Control, Hpcc, SwitchSettings
from myriad.network.fabric import Fabric, Flows, Numbers, Paths
from myriad.network.packets.packet_state import FLOW, LINK, NUM_FRAMES, PACKET, WRITTEN

__all__ = [
    "ACK_BYTES",
    "Faults",
    "PacketNeeds",
    "PacketProblem",
    "Series",
    "Transport",
    "bin_bytes",
    "estimate_needs",
    "queue_bins",
    "reply_ps",
    "sum_by_flow",
]


@dataclass(frozen=True)
class Transport:
    """How flows are cut into packets, and how lost packets are recovered."""

    recovery: Literal["go-back-n", "selective-repeat"] = "go-back-n"
    payload_bytes: int = PACKET_BYTES
    header_bytes: int = 82
    """RoCEv2 on the wire: preamble 8, Ethernet 14, IPv4 20, UDP 8, BTH 12, ICRC 4, FCS 4, gap 12."""
    timeout_seconds: float = 4.096e-6 * 2**14
    """Time without progress after which all packets in flight are resent: InfiniBand's timeout exponent
    14."""
    backoff: float = 1.0
    """Factor on the timeout after each timeout in a row; 1 as in InfiniBand."""
    retries: int = 7
    """Timeouts in a row before a flow aborts: InfiniBand's largest retry count."""
    most_packets: int = 16384
    """The most packets of a flow in flight, whatever its control allows."""

    def check(self) -> "Transport":
        """Check the values. Raises `BadInputError`."""
        if self.payload_bytes < 64:
            raise BadInputError("transport.payload_bytes", self.payload_bytes, "at least 64")
        if not self.timeout_seconds > 0:
            raise BadInputError("transport.timeout_seconds", self.timeout_seconds, "above 0")
        if self.backoff < 1:
            raise BadInputError("transport.backoff", self.backoff, "at least 1")
        if self.most_packets < 1:
            raise BadInputError("transport.most_packets", self.most_packets, "at least 1")
        return self


@dataclass(frozen=True)
class Faults:
    """Losses and down times of links."""

    loss_ratio: float | Numbers = 0.0
    """Loss probability of data packets: one for all links, or (L)."""
    outages: tuple[tuple[int, float, float], ...] = ()
    """(link, from seconds, until seconds): packets sent on the link in this time are lost; see
    `outage_of_cable`."""


def outage_of_cable(cable: int, start: float, end: float) -> tuple[tuple[int, float, float], ...]:
    """Return down times of both directions of a cable."""
    return (2 * cable, start, end), (2 * cable + 1, start, end)


@dataclass(frozen=True)
class Series:
    """Samples at equal intervals. If they exceed ``most_samples``, the period doubles and every other sample
    is dropped."""

    period_seconds: float
    links: tuple[int, ...] = ()
    flows: tuple[int, ...] = ()
    most_samples: int = 4096


ACK_BYTES = 84
"""Smallest Ethernet frame with preamble and gap: an acknowledgement or a pause frame."""
_PS_PER_SECOND = 1e12
_BINS_PER_OCTAVE = 16
_LONGEST_QUEUE_BYTES = 2**28


@dataclass(frozen=True)
class PacketProblem:
    """The input of a packet-level simulation."""

    fabric: Fabric
    flows: Flows
    paths: Paths
    control: Control | None
    switch_settings: SwitchSettings
    transport: Transport
    faults: Faults
    after: npt.NDArray[np.int32] | None
    start_packets: float
    seed: int

    @property
    def num_packets(self) -> npt.NDArray[np.int64]:
        """(F) Packets of each flow; 0 for flows that do not leave their port."""
        num = np.ceil(self.flows.num_bytes / self.transport.payload_bytes).astype(np.int64)
        return np.where(self.num_hops > 0, num, 0)

    @property
    def num_hops(self) -> npt.NDArray[np.int64]:
        """(F) Links of each flow's path."""
        return np.diff(self.paths.first)

    @property
    def is_selective(self) -> bool:
        """Whether only lost packets are resent."""
        return self.transport.recovery == "selective-repeat"

    @property
    def num_written(self) -> int:
        """Telemetry entries of a packet."""
        return int(self.num_hops.max(initial=1)) if isinstance(self.control, Hpcc) else 0

    @property
    def ring_sizes(self) -> npt.NDArray[np.int64]:
        """(F) Selective repeat: packets whose state a flow keeps, a power of two."""
        most = np.clip(self.num_packets, 1, self.transport.most_packets)
        return (1 << np.ceil(np.log2(most)).astype(np.int64)) if self.is_selective else np.zeros_like(most)

    @property
    def full_bytes(self) -> int:
        """Bytes of a full packet on a wire."""
        return self.transport.payload_bytes + self.transport.header_bytes

    @property
    def most_queue_bytes(self) -> int:
        """The longest queue that quantiles resolve; longer ones count as this length."""
        all_bytes = float(self.num_packets.sum()) * self.full_bytes
        return int(min(self.switch_settings.buffer_bytes, all_bytes, _LONGEST_QUEUE_BYTES))

    @property
    def grain_bits(self) -> int:
        """Queue lengths are counted in grains of 2^grain_bits bytes, so that their table fits in the
        cache."""
        return max(8, self.most_queue_bytes.bit_length() - 16)

    @property
    def num_slots(self) -> int:
        """The most pending events: three for each link, three for each flow, one for all timers."""
        return 3 * (self.fabric.num_links + len(self.flows)) + 1

    @property
    def last_ps(self) -> int:
        """The latest time that fits in a 63-bit key beside the slot."""
        return (1 << (63 - self.num_slots.bit_length())) - 1

    def check(self) -> "PacketProblem":
        """Check the input. Raises `BadInputError`."""
        self.transport.check()
        start, last = float(self.flows.start_seconds.max(initial=0)), self.last_ps / _PS_PER_SECOND
        if start >= last:
            raise BadInputError("flows.start_seconds", start, f"below {last:.4g} s with so many flows")
        most = int(self.num_packets.max(initial=0))
        if most >= 2**31:
            raise BadInputError(
                "flows.num_bytes", float(self.flows.num_bytes.max()), "fewer than 2^31 packets"
            )
        fabric, first = self.fabric, self.paths.first
        begins, ends = fabric.source[self.paths.link], fabric.target[self.paths.link]
        flow = np.repeat(np.arange(len(self.flows)), self.num_hops)
        inner = np.arange(len(flow)) > first[flow]
        wrong = np.where(inner, (begins != np.roll(ends, 1)) | (begins < fabric.num_ports), False)
        wrong |= ~inner & (begins != self.flows.source[flow])
        last = np.arange(len(flow)) == first[flow + 1] - 1
        wrong |= last & (ends != self.flows.target[flow])
        if wrong.any():
            allowed = "links that lead from its source over switches to its target"
            raise BadInputError("paths", int(flow[np.argmax(wrong)]), allowed)
        return self


@dataclass(frozen=True)
class PacketNeeds:
    """Memory and work of a simulation, before it runs."""

    num_packet_hops: int
    """Packets times the links they take, without resends."""
    most_records: int
    """The most packet records in use at once."""
    num_bytes: int
    """Memory of all arrays."""

    def check(self, num_flows: int, max_bytes: float) -> None:
        """Check the need against a limit. Raises `BadInputError`."""
        if self.num_bytes > max_bytes:
            need, may = self.num_bytes / 1e9, max_bytes / 1e9
            raise BadInputError(
                "flows", num_flows, f"too many: they need {need:.3g} GB, and the limit is {may:.3g} GB"
            )


def estimate_needs(problem: PacketProblem) -> PacketNeeds:
    """Return the estimated needs."""
    fabric, num, hops = problem.fabric, problem.num_packets, problem.num_hops
    most = _most_in_fabric(problem)
    written = WRITTEN.itemsize * problem.num_written
    fixed = fabric.num_links * (LINK.itemsize + 8 * NUM_FRAMES + 8 * (int(queue_bins(problem)[-1]) + 1))
    fixed += len(problem.flows) * (FLOW.itemsize + 24 + written) + int(problem.ring_sizes.sum()) * 9
    records = most * (PACKET.itemsize + written)
    return PacketNeeds(int((num * hops).sum()), most, fixed + records)


def _most_in_fabric(problem: PacketProblem) -> int:
    """Return the most packets in buffers, on wires and (answers do not queue) on the way back from the last
    links; at most what flows may have in flight, without resends."""
    fabric, full = problem.fabric, problem.full_bytes
    num_switches = fabric.num_vertices - fabric.num_ports
    buffers = num_switches * problem.switch_settings.buffer_bytes / full
    on_wires = (fabric.bytes_per_second * fabric.latency_seconds / full + 2).sum()
    back = reply_ps(problem).max(initial=0) / _PS_PER_SECOND
    answers = (fabric.bytes_per_second[fabric.target < fabric.num_ports] * back / full + 2).sum()
    in_flight = float(np.minimum(problem.num_packets, problem.transport.most_packets).sum())
    return int(min(buffers + on_wires + answers, in_flight)) + 64


def queue_bins(problem: PacketProblem) -> npt.NDArray[np.int16]:
    """Return the bin of each queue length in grains: one grain wide at first, then a sixteenth of an
    octave."""
    num = (problem.most_queue_bytes >> problem.grain_bits) + 2
    scale = np.floor(_BINS_PER_OCTAVE * np.log2(np.maximum(np.arange(num), 1))).astype(np.int64)
    scale[0] = -1
    return np.cumsum(np.diff(scale, prepend=-1) > 0, dtype=np.int16)


def reply_ps(problem: PacketProblem) -> npt.NDArray[np.int64]:
    """Return (F) picoseconds from a packet's arrival to that of its acknowledgement, over the same cables."""
    fabric, link = problem.fabric, problem.paths.link ^ 1
    each = fabric.latency_seconds[link] + ACK_BYTES / fabric.bytes_per_second[link]
    return sum_by_flow(problem.paths, np.rint(each * _PS_PER_SECOND))


def sum_by_flow(paths: Paths, each: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Return (F) the sum of a value over the links of each path."""
    total = np.concatenate([[0], np.cumsum(each)])
    return (total[paths.first[1:]] - total[paths.first[:-1]]).astype(np.int64)


def bin_bytes(problem: PacketProblem, bins: npt.NDArray[np.int16]) -> npt.NDArray[np.float64]:
    """Return the queue length of each bin of the histogram: the middle of its range."""
    grain = 1 << problem.grain_bits
    edges = np.searchsorted(bins, np.arange(bins[-1] + 2)) * float(grain)
    return np.where(np.arange(bins[-1] + 1) == 0, 0.0, (edges[:-1] + edges[1:]) / 2)
