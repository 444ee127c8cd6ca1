"""A packet-level simulation before its first event: the arrays of `myriad.network.packets_state`, filled.

Also says beforehand what a simulation needs, so that too much is refused before memory is taken.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from myriad.errors import BadInputError
from myriad.network.controls import Control, Hpcc
from myriad.network.fabric import Fabric
from myriad.network.flows import Flows, Paths
from myriad.network.packets_input import Faults, Transport
from myriad.network.packets_knobs import control_knobs
from myriad.network.packets_records import (
    CLOCK,
    FLOW,
    GRAIN_BITS,
    KNOBS,
    LINK,
    NONE,
    NUM_FRAMES,
    OUTAGE,
    PACKET,
    SWITCH,
    WRITTEN,
)
from myriad.network.packets_state import Arena, Records, State, arena_of
from myriad.network.switch_settings import SwitchSettings

__all__ = ["Needs", "Problem", "needs_of", "new_state"]

_PS = 1e12
_ACK_BYTES = 84
"""Least Ethernet frame with preamble and gap: an acknowledgement, and a pause frame."""
_BINS_PER_OCTAVE = 16
_INFINITE = float(1 << 60)


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
    fabric, full = problem.fabric, _full_bytes(problem)
    num_switches = fabric.num_vertices - fabric.num_ports
    buffers = num_switches * problem.switch_settings.buffer_bytes / full
    on_wires = (fabric.bytes_per_second * fabric.latency_seconds / full + 2).sum()
    back = _reply_ps(problem).max(initial=0) / _PS
    answers = (fabric.bytes_per_second[fabric.target < fabric.num_ports] * back / full + 2).sum()
    in_flight = float(np.minimum(problem.num_packets, problem.transport.most_packets).sum())
    return int(min(buffers + on_wires + answers, in_flight)) + 64


def new_state(problem: Problem, num_records: int) -> State:
    """Everything at rest, each flow's start pending."""
    fabric, flows = problem.fabric, problem.flows
    knobs = _knobs(problem)
    links, outages = _links(problem)
    records = _flows(problem, links, knobs)
    clock, heap = _clock(problem, records)
    ring = int(problem.ring_sizes.sum())
    bins = queue_bins(problem)
    state = State(
        clock=clock,
        knobs=knobs,
        heap=heap,
        links=links,
        flows=records,
        switches=np.zeros(fabric.num_vertices - fabric.num_ports, SWITCH),
        packets=np.zeros(0, PACKET),
        hops=problem.paths.link.astype(np.int32),
        written=np.zeros(0, WRITTEN),
        read=np.zeros(len(flows) * problem.num_written, WRITTEN),
        sent=np.zeros(ring, np.int32),
        lost=np.zeros(ring, np.int32),
        known=np.zeros(ring, np.uint8),
        frames=np.zeros(fabric.num_links * NUM_FRAMES, np.int64),
        outages=outages,
        bins=bins,
        spent=np.zeros(fabric.num_links * (int(bins[-1]) + 1), np.int64),
    )
    return with_records(problem, state, num_records)


def with_records(problem: Problem, state: State, num_records: int) -> State:
    """The same with more packet records."""
    old, clock = len(state.packets), state.clock[0]
    packets, written = np.zeros(num_records, PACKET), np.zeros(num_records * problem.num_written, WRITTEN)
    packets[:old], written[: len(state.written)] = state.packets, state.written
    packets["flow"][old:] = NONE
    packets["next"][old:] = np.arange(old + 1, num_records + 1)
    packets["next"][-1] = clock["free_head"]
    clock["free_head"] = old
    clock["num_free"] += num_records - old
    return state._replace(packets=packets, written=written)


def arena(problem: Problem, state: State) -> Arena:
    """What the loop gets."""
    return arena_of(state, problem.num_written, int(state.bins[-1]) + 1)


def bin_bytes(bins: npt.NDArray[np.int16]) -> npt.NDArray[np.float64]:
    """The queue that a bin of the histogram stands for: the middle of its range."""
    grain = 1 << GRAIN_BITS
    edges = np.searchsorted(bins, np.arange(bins[-1] + 2)) * float(grain)
    return np.where(np.arange(bins[-1] + 1) == 0, 0.0, (edges[:-1] + edges[1:]) / 2)


def _full_bytes(problem: Problem) -> int:
    return problem.transport.payload_bytes + problem.transport.header_bytes


def queue_bins(problem: Problem) -> npt.NDArray[np.int16]:
    """Bins as wide as a grain at first, then a sixteenth of an octave: within 2.2 % of the middle."""
    all_bytes = float(problem.num_packets.sum()) * _full_bytes(problem)
    num = (int(min(problem.switch_settings.buffer_bytes, all_bytes)) >> GRAIN_BITS) + 2
    scale = np.floor(_BINS_PER_OCTAVE * np.log2(np.maximum(np.arange(num), 1))).astype(np.int64)
    scale[0] = -1
    return np.cumsum(np.diff(scale, prepend=-1) > 0, dtype=np.int16)


def _reply_ps(problem: Problem) -> npt.NDArray[np.int64]:
    """(F) From the arrival of a packet to that of its acknowledgement: the same cables back."""
    fabric, link = problem.fabric, problem.paths.link ^ 1
    each = fabric.latency_seconds[link] + _ACK_BYTES / fabric.bytes_per_second[link]
    return _sum_by_flow(problem.paths, np.rint(each * _PS))


def _sum_by_flow(paths: Paths, each: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    total = np.concatenate([[0], np.cumsum(each)])
    return (total[paths.first[1:]] - total[paths.first[:-1]]).astype(np.int64)


def _links(problem: Problem) -> tuple[Records, Records]:
    fabric = problem.fabric
    links = np.zeros(fabric.num_links, LINK)
    for name in ("queue_head", "queue_tail", "wire_head", "wire_tail", "ready_head", "ready_tail"):
        links[name] = NONE
    links["ps_per_byte"] = _PS / fabric.bytes_per_second
    links["full_ps"] = np.rint(links["ps_per_byte"] * _full_bytes(problem))
    links["latency_ps"] = np.rint(fabric.latency_seconds * _PS)
    links["from_switch"] = np.maximum(fabric.source - fabric.num_ports, NONE)
    links["to_switch"] = np.maximum(fabric.target - fabric.num_ports, NONE)
    back = np.arange(fabric.num_links) ^ 1
    links["frame_ps"] = links["latency_ps"][back] + np.rint(links["ps_per_byte"][back] * _ACK_BYTES)
    links["loss_ratio"] = problem.faults.loss_ratio
    outages = np.array(sorted(problem.faults.outages), dtype=np.float64).reshape(-1, 3)
    which = outages[:, 0].astype(np.int64)
    links["outage"] = np.searchsorted(which, np.arange(fabric.num_links), "left")
    links["last_outage"] = np.searchsorted(which, np.arange(fabric.num_links), "right")
    down = np.zeros(len(outages), OUTAGE)
    down["from_ps"], down["until_ps"] = np.rint(outages[:, 1:].T * _PS)
    return links, down


def _flows(problem: Problem, links: Records, knobs: Records) -> Records:
    flows, paths, num = problem.flows, problem.paths, problem.num_packets
    records = np.zeros(len(flows), FLOW)
    for name in ("next_ready", "reply_head", "reply_tail", "first_child", "next_child", "finish_ps"):
        records[name] = NONE
    records["first_hop"], records["last_hop"] = paths.first[:-1], paths.first[1:] - 1
    records["num_hops"], records["num_packets"] = problem.num_hops, num
    payload = problem.transport.payload_bytes
    rest = np.ceil(flows.num_bytes - (num - 1) * payload)
    records["last_bytes"] = np.where(num > 0, rest + problem.transport.header_bytes, 0)
    records["nic"] = paths.link[np.minimum(paths.first[:-1], max(0, len(paths.link) - 1))]
    records["reply_ps"] = _reply_ps(problem)
    there = _sum_by_flow(paths, links["full_ps"][paths.link] + links["latency_ps"][paths.link])
    records["base_ps"] = there + records["reply_ps"]
    records["line_ps_per_byte"] = links["ps_per_byte"][records["nic"]]
    records["line_rate"] = _PS / records["line_ps_per_byte"]
    records["timeout_ps"] = knobs["timeout_ps"][0]
    records["start_ps"] = np.rint(flows.start_seconds * _PS)
    sizes = problem.ring_sizes
    records["ring"], records["ring_mask"] = np.cumsum(sizes) - sizes, np.maximum(sizes - 1, 0)
    _set_children(problem, records)
    return records


def _set_children(problem: Problem, records: Records) -> None:
    if problem.after is None:
        return
    for flow in np.flatnonzero(problem.after >= 0)[::-1]:
        parent = problem.after[flow]
        records["next_child"][flow] = records["first_child"][parent]
        records["first_child"][parent] = flow


def _clock(problem: Problem, records: Records) -> tuple[Records, npt.NDArray[np.int64]]:
    num_links, num_flows = problem.fabric.num_links, len(records)
    num_slots = 3 * (num_links + num_flows)
    clock = np.zeros(1, CLOCK)
    bits = int(num_slots).bit_length()
    clock["slot_bits"], clock["last_ps"], clock["free_head"] = bits, (1 << (63 - bits)) - 1, NONE
    clock["num_open"] = num_flows
    clock["random"] = np.uint64(problem.seed)
    _check_times(problem, float(clock["last_ps"][0]) / _PS)
    begin = np.arange(num_flows) if problem.after is None else np.flatnonzero(problem.after < 0)
    slots = 3 * num_links + num_flows + begin
    heap = np.zeros(num_slots, np.int64)
    heap[: len(begin)] = np.sort((records["start_ps"][begin] << bits) | slots)
    clock["num_pending"] = len(begin)
    return clock, heap


def _check_times(problem: Problem, last_seconds: float) -> None:
    start = float(problem.flows.start_seconds.max(initial=0))
    if start >= last_seconds:
        raise BadInputError("flows.start_seconds", start, f"below {last_seconds:.4g} s with so many flows")


def _knobs(problem: Problem) -> Records:
    knobs = np.zeros(1, KNOBS)
    settings, transport, control = problem.switch_settings, problem.transport, problem.control
    values = {
        "full_bytes": _full_bytes(problem),
        "ecn_min_bytes": settings.ecn_min_bytes,
        "ecn_max_bytes": settings.ecn_max_bytes,
        "ecn_max_ratio": settings.ecn_max_ratio,
        "xoff_bytes": settings.pfc_xoff_bytes,
        "xon_bytes": settings.pfc_xon_bytes,
        "buffer_bytes": settings.buffer_bytes,
        "timeout_ps": transport.timeout_seconds * _PS,
        "backoff": transport.backoff,
        "retries": transport.retries,
        "is_selective": problem.is_selective,
        "has_outages": bool(problem.faults.outages),
        "most_packets": transport.most_packets,
        **control_knobs(control),
    }
    for name, value in values.items():
        knobs[name] = value
    return knobs
