"""What a packet-level simulation is given, whether it makes sense, and what it will need.

Too much is refused by an estimate before memory is taken.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from myriad.errors import BadInputError
from myriad.network.controls import Control, Hpcc
from myriad.network.fabric import Fabric
from myriad.network.flows import Flows, Paths
from myriad.network.packets.input import Faults, Transport
from myriad.network.packets.records import FLOW, LINK, NUM_FRAMES, PACKET, WRITTEN
from myriad.network.switch_settings import SwitchSettings

__all__ = ["ACK_BYTES", "Needs", "Problem", "bin_bytes", "needs_of", "queue_bins", "reply_ps", "sum_by_flow"]

ACK_BYTES = 84
"""Least Ethernet frame with preamble and gap: an acknowledgement, and a pause frame."""
_PS = 1e12
_BINS_PER_OCTAVE = 16
_LONGEST_QUEUE_BYTES = 2**28


@dataclass(frozen=True)
class Problem:
    """All that is given."""

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
        """(F) Of each flow; none where it does not leave its port."""
        num = np.ceil(self.flows.num_bytes / self.transport.payload_bytes).astype(np.int64)
        return np.where(self.num_hops > 0, num, 0)

    @property
    def num_hops(self) -> npt.NDArray[np.int64]:
        """(F)"""
        return np.diff(self.paths.first)

    @property
    def is_selective(self) -> bool:
        """Whether only what was lost is sent again."""
        return self.transport.recovery == "selective-repeat"

    @property
    def num_written(self) -> int:
        """Places for telemetry per packet."""
        return int(self.num_hops.max(initial=1)) if isinstance(self.control, Hpcc) else 0

    @property
    def ring_sizes(self) -> npt.NDArray[np.int64]:
        """(F) Selective repeat: packets whose fate a flow keeps, a power of two."""
        most = np.clip(self.num_packets, 1, self.transport.most_packets)
        return (1 << np.ceil(np.log2(most)).astype(np.int64)) if self.is_selective else np.zeros_like(most)

    @property
    def full_bytes(self) -> int:
        """Of a full packet on a wire."""
        return self.transport.payload_bytes + self.transport.header_bytes

    @property
    def most_queue_bytes(self) -> int:
        """Of what is told apart in quantiles of queues; longer ones count as that."""
        all_bytes = float(self.num_packets.sum()) * self.full_bytes
        return int(min(self.switch_settings.buffer_bytes, all_bytes, _LONGEST_QUEUE_BYTES))

    @property
    def grain_bits(self) -> int:
        """Queues are counted in grains: so many bits that a table of them stays in the cache."""
        return max(8, self.most_queue_bytes.bit_length() - 16)

    @property
    def num_slots(self) -> int:
        """At most: three of a link, three of a flow, one for all timers."""
        return 3 * (self.fabric.num_links + len(self.flows)) + 1

    @property
    def last_ps(self) -> int:
        """The latest time that a pending event can have, beside its slot, in 63 bits."""
        return (1 << (63 - self.num_slots.bit_length())) - 1

    def check(self) -> "Problem":
        """Raises `BadInputError`."""
        self.transport.check()
        start, last = float(self.flows.start_seconds.max(initial=0)), self.last_ps / _PS
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
class Needs:
    """What a simulation takes, before it runs."""

    num_packet_hops: int
    """Packets times the links they go over, each packet once."""
    most_records: int
    """Packet records in use at once."""
    num_bytes: int
    """Memory of all arrays."""

    def check(self, num_flows: int, max_bytes: float) -> None:
        """Raises `BadInputError`."""
        if self.num_bytes > max_bytes:
            need, may = self.num_bytes / 1e9, max_bytes / 1e9
            raise BadInputError("flows", num_flows, f"fewer: these need {need:.3g} GB, {may:.3g} may be used")


def needs_of(problem: Problem) -> Needs:
    """The estimate."""
    fabric, num, hops = problem.fabric, problem.num_packets, problem.num_hops
    most = _most_in_fabric(problem)
    written = WRITTEN.itemsize * problem.num_written
    fixed = fabric.num_links * (LINK.itemsize + 8 * NUM_FRAMES + 8 * (int(queue_bins(problem)[-1]) + 1))
    fixed += len(problem.flows) * (FLOW.itemsize + 24 + written) + int(problem.ring_sizes.sum()) * 9
    records = most * (PACKET.itemsize + written)
    return Needs(int((num * hops).sum()), most, fixed + records)


def _most_in_fabric(problem: Problem) -> int:
    """In buffers, on wires and, since answers wait nowhere, what the last links bring during the way back;
    and no more than all that flows may have in flight, if nothing is sent twice."""
    fabric, full = problem.fabric, problem.full_bytes
    num_switches = fabric.num_vertices - fabric.num_ports
    buffers = num_switches * problem.switch_settings.buffer_bytes / full
    on_wires = (fabric.bytes_per_second * fabric.latency_seconds / full + 2).sum()
    back = reply_ps(problem).max(initial=0) / _PS
    answers = (fabric.bytes_per_second[fabric.target < fabric.num_ports] * back / full + 2).sum()
    in_flight = float(np.minimum(problem.num_packets, problem.transport.most_packets).sum())
    return int(min(buffers + on_wires + answers, in_flight)) + 64


def queue_bins(problem: Problem) -> npt.NDArray[np.int16]:
    """Bin of a queue by its grains: as wide as a grain at first, then a sixteenth of an octave."""
    num = (problem.most_queue_bytes >> problem.grain_bits) + 2
    scale = np.floor(_BINS_PER_OCTAVE * np.log2(np.maximum(np.arange(num), 1))).astype(np.int64)
    scale[0] = -1
    return np.cumsum(np.diff(scale, prepend=-1) > 0, dtype=np.int16)


def reply_ps(problem: Problem) -> npt.NDArray[np.int64]:
    """(F) Picoseconds from the arrival of a packet to that of its acknowledgement: the same cables back."""
    fabric, link = problem.fabric, problem.paths.link ^ 1
    each = fabric.latency_seconds[link] + ACK_BYTES / fabric.bytes_per_second[link]
    return sum_by_flow(problem.paths, np.rint(each * _PS))


def sum_by_flow(paths: Paths, each: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """(F) Of what each link of each path has."""
    total = np.concatenate([[0], np.cumsum(each)])
    return (total[paths.first[1:]] - total[paths.first[:-1]]).astype(np.int64)


def bin_bytes(problem: Problem, bins: npt.NDArray[np.int16]) -> npt.NDArray[np.float64]:
    """The queue that a bin of the histogram stands for: the middle of its range."""
    grain = 1 << problem.grain_bits
    edges = np.searchsorted(bins, np.arange(bins[-1] + 2)) * float(grain)
    return np.where(np.arange(bins[-1] + 1) == 0, 0.0, (edges[:-1] + edges[1:]) / 2)
