"""A packet-level simulation before its first event: the arrays of `myriad.network.packets.state`, filled."""

import numpy as np
import numpy.typing as npt

from myriad.network.packets.knobs import control_knobs
from myriad.network.packets.problem import ACK_BYTES, Problem, queue_bins, reply_ps, sum_by_flow
from myriad.network.packets.records import (
    CLOCK,
    FLOW,
    KNOBS,
    LINK,
    NONE,
    NUM_FRAMES,
    OUTAGE,
    PACKET,
    PIPE,
    SWITCH,
    WRITTEN,
    rows,
)
from myriad.network.packets.state import Arena, Records, State, arena_of

__all__ = ["arena", "new_state", "with_more"]

_PS = 1e12


def new_state(problem: Problem, num_records: int) -> State:
    """Everything at rest, each flow's start pending."""
    fabric, flows = problem.fabric, problem.flows
    knobs = _knobs(problem)
    links, outages = _links(problem)
    records = _flows(problem, links, knobs)
    knobs["trip_ps"] = records["base_ps"].max(initial=0)
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
        pipes=np.full(_num_pipes(records), NONE, np.int32).repeat(2).view(PIPE),
        packets=rows(0, PACKET),
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
    return _with_records(problem, state, num_records)


def with_more(problem: Problem, state: State) -> State:
    """The same with room for more events, if it lacks that, else with more packet records."""
    if state.clock["num_pending"][0] <= state.clock["most_pending"][0]:
        return _with_records(problem, state, 2 * len(state.packets))
    state.clock["most_pending"] += problem.num_slots
    return state._replace(heap=np.concatenate([state.heap, np.zeros(problem.num_slots, np.int64)]))


def _with_records(problem: Problem, state: State, num_records: int) -> State:
    old, clock = len(state.packets), state.clock[0]
    packets, written = rows(num_records, PACKET), np.zeros(num_records * problem.num_written, WRITTEN)
    packets[:old], written[: len(state.written)] = state.packets, state.written
    packets["flow"][old:] = NONE
    packets["next"][old:] = np.arange(old + 1, num_records + 1)
    packets["next"][-1] = clock["free_head"]
    clock["free_head"] = old
    clock["num_free"] += num_records - old
    return state._replace(packets=packets, written=written)


def arena(problem: Problem, state: State) -> Arena:
    """What the loop gets."""
    return arena_of(state, problem.num_written, int(state.bins[-1]) + 1, problem.grain_bits)


def _links(problem: Problem) -> tuple[Records, Records]:
    fabric = problem.fabric
    links = rows(fabric.num_links, LINK)
    for name in ("queue_head", "queue_tail", "wire_head", "wire_tail", "ready_head", "ready_tail"):
        links[name] = NONE
    links["ps_per_byte"] = _PS / fabric.bytes_per_second
    links["full_ps"] = np.rint(links["ps_per_byte"] * problem.full_bytes)
    links["latency_ps"] = np.rint(fabric.latency_seconds * _PS)
    links["from_switch"] = np.maximum(fabric.source - fabric.num_ports, NONE)
    links["to_switch"] = np.maximum(fabric.target - fabric.num_ports, NONE)
    back = np.arange(fabric.num_links) ^ 1
    links["frame_ps"] = links["latency_ps"][back] + np.rint(links["ps_per_byte"][back] * ACK_BYTES)
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
    records = rows(len(flows), FLOW)
    for name in ("next_ready", "next_timer", "first_child", "next_child", "finish_ps"):
        records[name] = NONE
    records["first_hop"], records["last_hop"] = paths.first[:-1], paths.first[1:] - 1
    records["num_hops"], records["num_packets"] = problem.num_hops, num
    payload = problem.transport.payload_bytes
    rest = np.ceil(flows.num_bytes - (num - 1) * payload)
    records["last_bytes"] = np.where(num > 0, rest + problem.transport.header_bytes, 0)
    records["nic"] = paths.link[np.minimum(paths.first[:-1], max(0, len(paths.link) - 1))]
    records["reply_ps"] = reply_ps(problem)
    there = sum_by_flow(paths, links["full_ps"][paths.link] + links["latency_ps"][paths.link])
    records["base_ps"] = there + records["reply_ps"]
    records["line_ps_per_byte"] = links["ps_per_byte"][records["nic"]]
    records["line_rate"] = _PS / records["line_ps_per_byte"]
    records["timeout_ps"] = knobs["timeout_ps"][0]
    records["start_ps"] = np.rint(flows.start_seconds * _PS)
    sizes = problem.ring_sizes
    records["ring"], records["ring_mask"] = np.cumsum(sizes) - sizes, np.maximum(sizes - 1, 0)
    records["pipe"] = _pipes(problem, records)
    _set_children(problem, records)
    return records


def _pipes(problem: Problem, records: Records) -> npt.NDArray[np.int64]:
    """(F) Number of the answers' pipe: of those that come from the same link and travel equally long."""
    last = problem.paths.link[np.maximum(records["last_hop"], 0)] if len(problem.paths.link) else 0
    ends = np.stack([np.broadcast_to(last, len(records)), records["reply_ps"]])
    return np.unique(ends, axis=1, return_inverse=True)[1].reshape(-1)


def _num_pipes(records: Records) -> int:
    return int(records["pipe"].max(initial=-1)) + 1


def _set_children(problem: Problem, records: Records) -> None:
    if problem.after is None:
        return
    for flow in np.flatnonzero(problem.after >= 0)[::-1]:
        parent = problem.after[flow]
        records["next_child"][flow] = records["first_child"][parent]
        records["first_child"][parent] = flow


def _clock(problem: Problem, records: Records) -> tuple[Records, npt.NDArray[np.int64]]:
    num_links, num_flows, num_pipes = problem.fabric.num_links, len(records), _num_pipes(records)
    num_slots = problem.num_slots
    clock = np.zeros(1, CLOCK)
    bits = num_slots.bit_length()
    clock["slot_bits"], clock["last_ps"], clock["free_head"] = bits, problem.last_ps, NONE
    clock["num_open"] = num_flows
    clock["random"] = np.uint64(problem.seed)
    clock["timer_head"] = NONE
    begin = np.arange(num_flows) if problem.after is None else np.flatnonzero(problem.after < 0)
    slots = 3 * num_links + num_pipes + begin
    heap = np.zeros(2 * num_slots, np.int64)
    clock["most_pending"] = num_slots
    heap[: len(begin)] = np.sort((records["start_ps"][begin] << bits) | slots)
    clock["num_pending"] = len(begin)
    return clock, heap


def _knobs(problem: Problem) -> Records:
    knobs = np.zeros(1, KNOBS)
    settings, transport, control = problem.switch_settings, problem.transport, problem.control
    values = {
        "full_bytes": problem.full_bytes,
        "start_bytes": problem.start_packets * problem.full_bytes,
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
