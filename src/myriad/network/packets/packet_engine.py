"""The packet simulator: queues, marks, pauses, loss and link down times, packet by packet, and the results.

    simulate_packets(fabric, flows, paths, control, switch_settings) -> PacketResult

It is the third and finest level, for up to about 256 hosts and a hundred million packet hops. The parts:
`packet_links` (switches and wires), `packet_nics` and `packet_recovery` (senders and receivers),
`packet_controls` (congestion control), `event_loop` (what an event is). The same input gives the same result.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from myriad.network.congestion_controls import Control, SwitchSettings
from myriad.network.fabric import Fabric, Flows, Numbers, Paths
from myriad.network.packets.event_loop import FULL, PAUSED, run
from myriad.network.packets.packet_controls import control_knobs
from myriad.network.packets.packet_problem import (
    ACK_BYTES,
    Faults,
    PacketProblem,
    Series,
    Transport,
    bin_bytes,
    estimate_needs,
    queue_bins,
    reply_ps,
    sum_by_flow,
)
from myriad.network.packets.packet_state import (
    ABORTED,
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
    Arena,
    PacketState,
    Records,
    arena_of,
    rows,
)

__all__ = ["PacketResult", "PacketSamples", "simulate_packets"]

_Ints = npt.NDArray[np.int64]
_SECONDS_PER_PS = 1e-12
_FIRST_RECORDS = 4096
"""Packet records at the start: few enough for the second-level cache."""


@dataclass(frozen=True, eq=False)
class PacketSamples:
    """Queues and flows over time: S samples."""

    seconds: Numbers
    queue_bytes: Numbers
    """(samples, chosen links) Bytes queued at each link."""
    arrived_bytes: Numbers
    """(S, chosen flows) Payload."""
    bytes_per_second: Numbers
    """(S, chosen flows) Rate that the control allows; infinite: line rate."""


@dataclass(frozen=True, eq=False)
class PacketResult:
    """The result of a packet-level simulation. Arrays: F flows, L links."""

    finish_seconds: Numbers
    """(F) When the last byte arrived; NaN if it did not."""
    goodput_bytes_per_second: Numbers
    """(F) Payload over the time from the flow's start to its finish; NaN if it did not finish."""
    is_aborted: npt.NDArray[np.bool_]
    """(F) Whether its sender gave up."""
    num_sent: _Ints
    """(F) Packets sent, resends included."""
    num_resent: _Ints
    """(F) Number of packets that each flow retransmitted."""
    num_arrived: _Ints
    """(F) Different packets that arrived and were kept."""
    num_discarded: _Ints
    """(F) Packets that arrived out of order or twice and were discarded."""
    num_timeouts: _Ints
    num_marked: _Ints
    """(F) Packets that arrived with a mark."""
    queue_p50_bytes: Numbers
    """(L) Over the time of the simulation, within 2.2 %, or a 32768th of the longest (256 MiB at most)."""
    queue_p99_bytes: Numbers
    """(L) With the same precision."""
    queue_max_bytes: _Ints
    """(L) Largest number of bytes queued at each link; exact, unlike the quantiles."""
    pause_seconds: Numbers
    """(L) Time that the sender of the link was paused."""
    num_marks: _Ints
    """(L) Packets marked in its queue."""
    num_drops: _Ints
    """(L) Packets dropped because the switch's buffer was full."""
    num_losses: _Ints
    """(L) Packets lost on the link, by chance or while it was down."""
    sent_bytes: _Ints
    """(L) Bytes with headers, lost packets included."""
    num_in_flight: int
    """Data packets in queues and on wires when the last flow ended: all packets that were sent and neither
    arrived nor were lost or dropped."""
    num_events: int
    end_seconds: float
    """When the last flow's sender had all acknowledgements, or gave up."""
    samples: PacketSamples | None


def simulate_packets(
    fabric: Fabric,
    flows: Flows,
    paths: Paths,
    control: Control | None,
    switch_settings: SwitchSettings,
    *,
    seed: int = 0,
    transport: Transport | None = None,
    faults: Faults | None = None,
    after: npt.NDArray[np.int32] | None = None,
    start_packets: float | None = None,
    series: Series | None = None,
    max_seconds: float = 1e3,
    max_bytes: float = 4e9,
) -> PacketResult:
    """Simulate until every flow has arrived or given up, or for ``max_seconds``.

    ``control`` None: every flow sends at line rate. ``after[f]``: the flow whose arrival starts flow f (-1:
    none), as the steps of a ring wait for each other. ``start_packets``: packets in flight of a sender with a
    control in its first round trip; default: as many as its port can send in one. ``max_bytes`` limits
    memory; an input that needs more is refused before it runs. Raises `BadInputError`.
    """
    problem = PacketProblem(
        fabric, flows, paths, control, switch_settings,
        transport or Transport(), faults or Faults(), after, start_packets or np.inf, seed,
    )  # fmt: skip
    needs = estimate_needs(problem.check())
    needs.check(len(flows), max_bytes)
    state = new_state(problem, min(needs.most_records, _FIRST_RECORDS))
    recorder = _Recorder(series, problem) if series else None
    state = _run(problem, state, max_seconds, recorder)
    return _result(problem, state, recorder)


class _Recorder:
    """Records samples in bounded memory."""

    def __init__(self, series: Series, problem: PacketProblem) -> None:
        self.series = series
        self.period_ps = max(1, int(series.period_seconds / _SECONDS_PER_PS))
        self.payload_bytes = problem.transport.payload_bytes
        self.rows: list[tuple[float, Numbers, Numbers, Numbers]] = []

    def take(self, state: PacketState, now_ps: int) -> None:
        links, flows = list(self.series.links), list(self.series.flows)
        with np.errstate(divide="ignore"):
            rate = 1e12 / state.flows["pace_ps_per_byte"][flows]
        arrived = state.flows["num_received"][flows].astype(np.float64) * self.payload_bytes
        self.rows.append(
            (now_ps * _SECONDS_PER_PS, state.links["queue_bytes"][links].astype(np.float64), arrived, rate)
        )
        if len(self.rows) >= self.series.most_samples:
            self.rows = self.rows[::2]
            self.period_ps *= 2

    def samples(self) -> PacketSamples:
        seconds, queue, arrived, rate = zip(*self.rows, strict=True) if self.rows else ((), (), (), ())
        return PacketSamples(
            np.array(seconds),
            np.array(queue).reshape(len(queue), -1),
            np.array(arrived).reshape(len(arrived), -1),
            np.array(rate).reshape(len(rate), -1),
        )


def _run(
    problem: PacketProblem, state: PacketState, max_seconds: float, recorder: _Recorder | None
) -> PacketState:
    last = min(int(max_seconds / _SECONDS_PER_PS), int(state.clock["last_ps"][0]) - 1)
    until = recorder.period_ps if recorder else last
    while True:
        why = run(arena(problem, state), min(until, last))
        if why == FULL:
            state = with_more_room(problem, state)
        elif why == PAUSED and recorder and until < last:
            recorder.take(state, until)
            until += recorder.period_ps
        else:
            return state


def _result(problem: PacketProblem, state: PacketState, recorder: _Recorder | None) -> PacketResult:
    flows, links, clock = state.flows, state.links, state.clock[0]
    end = int(clock["now_ps"])
    paused = links["paused_ps"] + np.where(links["is_paused"] > 0, end - links["paused_since_ps"], 0)
    finish = np.where(flows["finish_ps"] >= 0, flows["finish_ps"] * _SECONDS_PER_PS, np.nan)
    p50, p99 = _quantiles(problem, state, (0.5, 0.99), end)
    return PacketResult(
        finish_seconds=finish,
        goodput_bytes_per_second=_goodput(
            problem.flows.num_bytes, finish - flows["start_ps"] * _SECONDS_PER_PS
        ),
        is_aborted=flows["state"] == ABORTED,
        num_sent=flows["num_sent"].astype(np.int64),
        num_resent=flows["num_resent"].astype(np.int64),
        num_arrived=flows["num_received"].astype(np.int64),
        num_discarded=flows["num_discarded"].astype(np.int64),
        num_timeouts=flows["num_timeouts"].astype(np.int64),
        num_marked=flows["num_marks"].astype(np.int64),
        queue_p50_bytes=p50,
        queue_p99_bytes=p99,
        queue_max_bytes=links["most_queue_bytes"].copy(),
        pause_seconds=paused * _SECONDS_PER_PS,
        num_marks=links["num_marks"].astype(np.int64),
        num_drops=links["num_drops"].astype(np.int64),
        num_losses=links["num_losses"].astype(np.int64),
        sent_bytes=links["sent_bytes"].copy(),
        num_in_flight=int(np.sum((state.packets["flow"] != NONE) & (state.packets["is_answer"] == 0))),
        num_events=int(clock["num_events"]),
        end_seconds=end * _SECONDS_PER_PS,
        samples=recorder.samples() if recorder else None,
    )


def _goodput(num_bytes: Numbers, seconds: Numbers) -> Numbers:
    """Return bytes over seconds; 0 bytes in 0 seconds have an infinite rate, as do flows that do not leave
    their port."""
    return np.divide(num_bytes, seconds, out=np.full(len(seconds), np.inf), where=seconds != 0)


def _quantiles(
    problem: PacketProblem, state: PacketState, shares: tuple[float, ...], end_ps: int
) -> list[Numbers]:
    """Return quantiles of each queue over time, from the first flow's start."""
    spent = state.spent.reshape(len(state.links), -1).astype(np.float64)
    start = int(problem.flows.start_seconds.min(initial=0) / _SECONDS_PER_PS)
    links = np.arange(len(spent))
    now = state.bins[np.minimum(state.links["queue_bytes"] >> problem.grain_bits, len(state.bins) - 1)]
    spent[links, now] += end_ps - state.links["seen_ps"]
    spent[:, 0] -= start
    total = np.cumsum(spent, axis=1)
    middle = bin_bytes(problem, state.bins)
    return [middle[(total < share * total[:, -1:]).sum(axis=1)] for share in shares]


_PS_PER_SECOND = 1e12


def new_state(problem: PacketProblem, num_records: int) -> PacketState:
    """Return the state before the first event: each flow's start is pending."""
    fabric, flows = problem.fabric, problem.flows
    knobs = _knobs(problem)
    links, outages = _links(problem)
    records = _flows(problem, links, knobs)
    knobs["trip_ps"] = records["base_ps"].max(initial=0)
    clock, heap = _clock(problem, records)
    ring = int(problem.ring_sizes.sum())
    bins = queue_bins(problem)
    state = PacketState(
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


def with_more_room(problem: PacketProblem, state: PacketState) -> PacketState:
    """Return the state with room for more events if that is what it lacks, else with more packet records."""
    if state.clock["num_pending"][0] <= state.clock["most_pending"][0]:
        return _with_records(problem, state, 2 * len(state.packets))
    state.clock["most_pending"] += problem.num_slots
    return state._replace(heap=np.concatenate([state.heap, np.zeros(problem.num_slots, np.int64)]))


def _with_records(problem: PacketProblem, state: PacketState, num_records: int) -> PacketState:
    old, clock = len(state.packets), state.clock[0]
    packets, written = rows(num_records, PACKET), np.zeros(num_records * problem.num_written, WRITTEN)
    packets[:old], written[: len(state.written)] = state.packets, state.written
    packets["flow"][old:] = NONE
    packets["next"][old:] = np.arange(old + 1, num_records + 1)
    packets["next"][-1] = clock["free_head"]
    clock["free_head"] = old
    clock["num_free"] += num_records - old
    return state._replace(packets=packets, written=written)


def arena(problem: PacketProblem, state: PacketState) -> Arena:
    """Return the addresses and sizes that the loop reads."""
    return arena_of(state, problem.num_written, int(state.bins[-1]) + 1, problem.grain_bits)


def _links(problem: PacketProblem) -> tuple[Records, Records]:
    fabric = problem.fabric
    links = rows(fabric.num_links, LINK)
    for name in ("queue_head", "queue_tail", "wire_head", "wire_tail", "ready_head", "ready_tail"):
        links[name] = NONE
    links["ps_per_byte"] = _PS_PER_SECOND / fabric.bytes_per_second
    links["full_ps"] = np.rint(links["ps_per_byte"] * problem.full_bytes)
    links["latency_ps"] = np.rint(fabric.latency_seconds * _PS_PER_SECOND)
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
    down["from_ps"], down["until_ps"] = np.rint(outages[:, 1:].T * _PS_PER_SECOND)
    return links, down


def _flows(problem: PacketProblem, links: Records, knobs: Records) -> Records:
    flows, paths, num = problem.flows, problem.paths, problem.num_packets
    records = rows(len(flows), FLOW)
    for name in ("next_ready", "next_timer", "first_child", "next_child", "finish_ps"):
        records[name] = NONE
    records["first_hop"], records["last_hop"] = paths.first[:-1], paths.first[1:] - 1
    records["num_hops"], records["num_packets"] = problem.num_hops, num
    payload = problem.transport.payload_bytes
    rest = np.ceil(flows.num_bytes - (num - 1) * payload)
    records["last_bytes"] = np.where(num > 0, rest + problem.transport.header_bytes, 0)
    nic = paths.link[np.minimum(paths.first[:-1], max(0, len(paths.link) - 1))]
    ps_per_byte: npt.NDArray[np.float64] = links["ps_per_byte"]
    full: npt.NDArray[np.int64] = links["full_ps"] + links["latency_ps"]
    back = reply_ps(problem)
    records["nic"], records["reply_ps"] = nic, back
    records["base_ps"] = sum_by_flow(paths, full[paths.link].astype(np.float64)) + back
    records["line_ps_per_byte"] = ps_per_byte[nic]
    records["line_rate"] = _PS_PER_SECOND / ps_per_byte[nic]
    records["timeout_ps"] = knobs["timeout_ps"][0]
    records["start_ps"] = np.rint(flows.start_seconds * _PS_PER_SECOND)
    sizes = problem.ring_sizes
    records["ring"], records["ring_mask"] = np.cumsum(sizes) - sizes, np.maximum(sizes - 1, 0)
    records["pipe"] = _pipes(problem, records)
    _set_children(problem, records)
    return records


def _pipes(problem: PacketProblem, records: Records) -> npt.NDArray[np.int64]:
    """Return (F) the pipe of each flow's answers: one for all that leave by the same link and take equally
    long."""
    hops: npt.NDArray[np.int32] = records["last_hop"]
    last = problem.paths.link[np.maximum(hops, 0)] if len(problem.paths.link) else 0
    ends = np.stack([np.broadcast_to(last, len(records)), records["reply_ps"]])
    return np.unique(ends, axis=1, return_inverse=True)[1].reshape(-1)


def _num_pipes(records: Records) -> int:
    return int(records["pipe"].max(initial=-1)) + 1


def _set_children(problem: PacketProblem, records: Records) -> None:
    if problem.after is None:
        return
    next_child: npt.NDArray[np.int32] = records["next_child"]
    first_child: npt.NDArray[np.int32] = records["first_child"]
    for flow in np.flatnonzero(problem.after >= 0)[::-1].tolist():
        parent = int(problem.after[flow])
        next_child[flow] = first_child[parent]
        first_child[parent] = flow


def _clock(problem: PacketProblem, records: Records) -> tuple[Records, npt.NDArray[np.int64]]:
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


def _knobs(problem: PacketProblem) -> Records:
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
        "timeout_ps": transport.timeout_seconds * _PS_PER_SECOND,
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
