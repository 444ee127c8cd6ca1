"""The state of a packet-level simulation, and how compiled code reaches it.

The loop uses no Python objects: only rows of preallocated arrays. `State` is the whole state, so the loop can
stop at any event, return to Python and be called again.

There is one row for each link, flow and packet, and one row (CLOCK) of values that exist once. A list of
packets or flows (a queue, a wire, the flows that wait for a NIC) is a head, a tail and a `next` in each row.
Times are whole picoseconds, sizes are bytes on the wire, sequence numbers count the packets of a flow.

Arrays: V switches, L links, F flows, N links of all paths, P packets, O down times, E bins of the histogram.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic
from numba.np.numpy_support import from_dtype

from myriad.network.numba_cache import compiled_inside

__all__ = [
    "ABORTED",
    "BLOCKED",
    "CLOCK",
    "DONE",
    "FLOW",
    "KNOBS",
    "LINK",
    "NONE",
    "NUM_FRAMES",
    "OUTAGE",
    "PACED",
    "PACKET",
    "PIPE",
    "READY",
    "SWITCH",
    "UNSTARTED",
    "WRITTEN",
    "Arena",
    "PacketState",
    "Records",
    "arena_of",
    "bin_at",
    "clock_of",
    "compiled",
    "flow_at",
    "frame_at",
    "hop_at",
    "key_at",
    "knobs_of",
    "known_at",
    "link_at",
    "lost_at",
    "outage_at",
    "packet_at",
    "pipe_at",
    "read_at",
    "rows",
    "sent_at",
    "spent_at",
    "switch_at",
    "written_at",
]

NONE = -1
"""No packet, link or flow."""
UNSTARTED, BLOCKED, READY, PACED, DONE, ABORTED = range(6)
"""States of a flow: not started; waiting for an acknowledgement; ready at its NIC; waiting for its rate;
finished."""


_LINE_BYTES = 64
"""Bytes of a processor's cache line."""


def _row(fields: list[tuple[str, str]]) -> np.dtype[np.void]:
    """Return a row type that takes whole cache lines."""
    packed = np.dtype(fields, align=True)
    places = [packed.fields[name][1] for name, _ in fields] if packed.fields else []
    size = -(-packed.itemsize // _LINE_BYTES) * _LINE_BYTES
    names, kinds = zip(*fields, strict=True)
    return np.dtype({"names": names, "formats": kinds, "offsets": places, "itemsize": size}, align=True)


def rows(num: int, kind: np.dtype[np.void]) -> npt.NDArray[Any]:
    """Return zeroed rows that begin at a cache line."""
    raw = np.zeros(num * kind.itemsize + _LINE_BYTES, np.uint8)
    skip = -raw.ctypes.data % _LINE_BYTES
    return raw[skip : skip + num * kind.itemsize].view(kind)


LINK = _row(
    [
        ("free_ps", "i8"),  # when the transmitter becomes free
        ("full_ps", "i8"),  # time to send a full packet
        ("latency_ps", "i8"),
        ("queue_bytes", "i8"),
        ("sent_bytes", "i8"),
        ("queue_head", "i4"),
        ("queue_tail", "i4"),
        ("wire_head", "i4"),  # packets on the wire
        ("wire_tail", "i4"),
        ("is_waiting", "i4"),  # whether an event is due at free_ps
        ("is_paused", "i4"),  # its far end has paused it
        ("from_switch", "i4"),  # sender; NONE: a NIC
        ("to_switch", "i4"),  # receiver; NONE: a NIC
        ("held_bytes", "i8"),  # bytes from this link queued in the switch at its end
        ("is_pausing", "i4"),  # whether that switch has paused the sender
        ("num_frames", "i4"),  # pause frames in flight
        ("ps_per_byte", "f8"),
        ("loss_ratio", "f8"),
        ("seen_ps", "i8"),  # time up to which the histogram is filled
        ("frame_ps", "i8"),  # time that a pause frame takes to the sender
        ("frame_first", "i4"),
        ("ready_head", "i4"),  # flows that are ready to send
        ("ready_tail", "i4"),
        ("outage", "i4"),  # next down time; `last_outage` is the end of this link's
        ("last_outage", "i4"),
        ("num_marks", "i4"),
        ("num_drops", "i4"),
        ("num_losses", "i4"),
        ("paused_since_ps", "i8"),
        ("paused_ps", "i8"),
        ("most_queue_bytes", "i8"),
    ],
)
FLOW = _row(
    [
        # First cache line: what a sender needs for each packet.
        ("state", "i4"),
        ("nic", "i4"),  # first link
        ("first_hop", "i4"),  # of Paths.link
        ("num_packets", "i4"),
        ("next_sequence", "i4"),  # next to send for the first time, or again after going back
        ("most_sequence", "i4"),  # packets sent at least once
        ("acked", "i4"),  # all packets before it are acknowledged
        ("limit_packets", "i4"),  # most in flight
        ("next_ready", "i4"),
        ("num_sent", "i4"),
        ("has_timer", "i4"),
        ("num_retries", "i4"),
        ("pace_ps_per_byte", "f8"),
        ("next_send_ps", "i8"),
        ("wake_ps", "i8"),  # when a paced flow wakes
        # Second cache line: the receiver, the answers, the timer.
        ("received", "i4"),  # all packets before it have arrived
        ("num_received", "i4"),  # different packets that arrived
        ("is_refused", "i4"),  # whether the receiver has asked for `received` again
        ("last_bytes", "i4"),  # the last packet on the wire
        ("pipe", "i4"),  # pipe of its answers
        ("next_timer", "i4"),
        ("num_discarded", "i4"),
        ("num_marks", "i4"),
        ("reply_ps", "i8"),  # from the last packet's arrival to the arrival of its acknowledgement
        ("deadline_ps", "i8"),
        ("timeout_ps", "i8"),
        ("finish_ps", "i8"),
        # Rarely used.
        ("timer_ps", "i8"),  # when its timer in the common list fires
        ("last_hop", "i4"),
        ("first_sent", "i4"),  # selective repeat: ring of packets in flight, in order of sending
        ("next_sent", "i4"),
        ("first_lost", "i4"),  # ring of packets to resend
        ("next_lost", "i4"),
        ("ring", "i8"),  # start of both rings
        ("ring_mask", "i4"),
        ("num_resent", "i4"),
        ("num_timeouts", "i4"),
        ("first_child", "i4"),  # flows that begin when this one has arrived
        ("next_child", "i4"),
        ("start_ps", "i8"),
        ("base_ps", "i8"),  # round trip in an empty network
        ("line_ps_per_byte", "f8"),
        ("num_hops", "i4"),
        # DCQCN.
        ("is_cut", "i4"),
        ("is_cnp_pending", "i4"),  # a cut is due as soon as the interval between two allows it
        ("timer_steps", "i4"),
        ("byte_steps", "i4"),
        ("has_increased", "i4"),
        ("alpha", "f8"),
        ("rate", "f8"),  # bytes per second
        ("target_rate", "f8"),
        ("line_rate", "f8"),
        ("alpha_from_ps", "i8"),
        ("timer_from_ps", "i8"),
        ("cut_ps", "i8"),
        ("cnp_ps", "i8"),
        ("counted_bytes", "i8"),
        # Window-based controls.
        ("window", "f8"),
        ("former_window", "f8"),
        ("reference", "f8"),
        ("utilization", "f8"),
        ("round_trip_ps", "i8"),
        ("step_ps", "i8"),
        ("stage", "i4"),
        ("renewed_sequence", "i4"),
        ("is_measured", "i4"),
    ],
)
PACKET = _row(
    [
        ("next", "i4"),
        ("flow", "i4"),  # NONE: the record is free
        ("sequence", "i4"),
        ("hop", "i4"),  # index in Paths.link
        ("num_bytes", "i4"),
        ("ingress", "i4"),  # link
        ("due_ps", "i8"),  # arrival at the far end of the wire
        ("sent_ps", "i8"),
        ("order", "i4"),  # position among all packets that the flow sent
        ("acknowledged", "i4"),  # in an answer: all packets before it have arrived
        ("is_marked", "i4"),
        ("is_refusal", "i4"),
        ("is_answer", "i4"),
    ],
)
PIPE = np.dtype([("head", "i4"), ("tail", "i4")], align=True)
SWITCH = np.dtype([("used_bytes", "i8")], align=True)
CLOCK = np.dtype(
    [
        ("now_ps", "i8"),
        ("num_pending", "i8"),
        ("most_pending", "i8"),  # leaves room for one more event of each slot
        ("has_gap", "i8"),  # whether the root of the heap is removed and not replaced
        ("slot_bits", "i8"),
        ("last_ps", "i8"),  # the latest time that a key can hold
        ("free_head", "i8"),
        ("num_free", "i8"),
        ("timer_head", "i8"),  # flows with a running timer, in the order in which they fire
        ("timer_tail", "i8"),
        ("num_open", "i8"),  # unfinished flows
        ("num_events", "i8"),
        ("random", "u8"),
    ],
    align=True,
)
KNOBS = np.dtype(
    [
        ("full_bytes", "i8"),  # payload and headers
        ("start_bytes", "f8"),  # most bytes in flight in the first round trip
        ("ecn_min_bytes", "f8"),
        ("ecn_max_bytes", "f8"),
        ("ecn_max_ratio", "f8"),
        ("xoff_bytes", "f8"),
        ("xon_bytes", "f8"),
        ("buffer_bytes", "f8"),
        ("timeout_ps", "i8"),
        ("backoff", "f8"),
        ("retries", "i4"),
        ("is_selective", "i4"),
        ("has_outages", "i4"),
        ("kind", "i4"),
        ("timer_only", "i4"),
        ("clamp_target", "i4"),
        ("recovery_steps", "i4"),
        ("max_stage", "i4"),
        ("most_packets", "i8"),
        ("gain", "f8"),
        ("alpha_timer_ps", "i8"),
        ("cnp_interval_ps", "i8"),
        ("cut_interval_ps", "i8"),
        ("increase_timer_ps", "i8"),
        ("increase_bytes", "f8"),
        ("largest_cut", "f8"),
        ("additive", "f8"),
        ("hyper", "f8"),
        ("min_rate", "f8"),
        ("base_target_ps", "f8"),
        ("base_target_ratio", "f8"),
        ("hop_target_ps", "f8"),
        ("scaling_range_ps", "f8"),
        ("scaling_slope", "f8"),
        ("scaling_offset", "f8"),
        ("beta", "f8"),
        ("min_window", "f8"),
        ("max_window", "f8"),
        ("eta", "f8"),
        ("trip_ps", "f8"),  # HPCC's T, the same for all flows
    ],
    align=True,
)


OUTAGE = np.dtype([("from_ps", "i8"), ("until_ps", "i8")], align=True)
WRITTEN = np.dtype([("queue_bytes", "i8"), ("sent_bytes", "i8"), ("at_ps", "i8")], align=True)
LONG, INT, SHORT, BYTE = (np.dtype([("value", kind)]) for kind in ("i8", "i4", "i2", "u1"))
NUM_FRAMES = 64
"""Pause frames that fit on one wire."""


Records = npt.NDArray[Any]


class PacketState(NamedTuple):
    """All arrays of a simulation."""

    clock: Records
    """(1) Values that exist once."""
    knobs: Records
    """(1) Parameters of the controls and of the transport, which do not change."""
    heap: Records
    """Pending events: time << slot_bits | slot; see `packet_links`."""
    links: Records
    flows: Records
    switches: Records
    pipes: Records
    """Answers in flight: one pipe for all that leave by the same link and take equally long, in order."""
    packets: Records
    hops: Records
    """(N) Links of all paths."""
    written: Records
    """(P x hops) HPCC: queue, bytes sent and time, as each switch wrote them."""
    read: Records
    """(F x hops) HPCC: the same values of the last acknowledgement."""
    sent: Records
    """Selective repeat: see FLOW.ring."""
    lost: Records
    """Selective repeat: see FLOW.ring."""
    known: Records
    """One byte for each packet of a flow's window: 1 arrived, 2 the sender knows."""
    frames: Records
    """(L x NUM_FRAMES) Arrival times of pause frames."""
    outages: Records
    """(O) Sorted by link and time."""
    bins: Records
    """Histogram bin of a queue, by its bytes >> grain_bits."""
    spent: Records
    """(L x E) Picoseconds that each queue had a length in this bin."""


class Arena(NamedTuple):
    """The input of the loop: the address of each array of `PacketState`, in the same order, and some sizes.

    Arrays in a tuple cost an atomic reference count in compiled code each time they are read: measured, four
    fifths of the run. So the loop reads addresses.
    """

    clock: int
    knobs: int
    heap: int
    links: int
    flows: int
    switches: int
    pipes: int
    packets: int
    hops: int
    written: int
    read: int
    sent: int
    lost: int
    known: int
    frames: int
    outages: int
    bins: int
    spent: int
    num_links: int
    first_answer: int
    """Slots: 0 free, num_links arrival, 2 num_links frame, then one for each pipe, and so on."""
    first_wake: int
    first_timeout: int
    common_timer: int
    num_hops: int
    """Telemetry entries of a packet; 0: none."""
    num_bins: int
    num_grains: int
    """Length of the array `bins`, over all links."""
    grain_bits: int


def arena_of(state: PacketState, num_hops: int, num_bins: int, grain_bits: int) -> Arena:
    """Return the addresses; they are valid as long as the state's arrays live and are not replaced."""
    answer = 3 * len(state.links)
    wake = answer + len(state.pipes)
    slots = answer, wake, wake + len(state.flows), wake + 2 * len(state.flows)
    sizes = len(state.links), *slots, num_hops, num_bins, len(state.bins), grain_bits
    return Arena._make([*(array.ctypes.data for array in state), *sizes])


def compiled(function: Any) -> Any:
    """Compile a function that only compiled functions call."""
    return compiled_inside(function, error_model="numpy", nogil=True)


def _at(field: str, dtype: np.dtype[np.void]) -> Any:
    """Return the compiled function of (arena, index) to a record of that array, by reference."""
    record, place = from_dtype(dtype), Arena._fields.index(field)

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        index = builder.mul(arguments[1], ir.Constant(arguments[1].type, dtype.itemsize))
        address = builder.add(builder.extract_value(arguments[0], place), index)
        return builder.inttoptr(address, context.get_value_type(record))

    def at(typing: Any, arena: Any, index: Any) -> Any:
        return record(arena, types.int64), emit

    return intrinsic(at)


link_at, flow_at, switch_at, packet_at = (
    _at("links", LINK), _at("flows", FLOW), _at("switches", SWITCH), _at("packets", PACKET)
)  # fmt: skip
key_at, hop_at, bin_at, frame_at = (
    _at("heap", LONG),
    _at("hops", INT),
    _at("bins", SHORT),
    _at("frames", LONG),
)
written_at, read_at, outage_at = _at("written", WRITTEN), _at("read", WRITTEN), _at("outages", OUTAGE)
pipe_at = _at("pipes", PIPE)
sent_at, lost_at, known_at, spent_at = (
    _at("sent", INT),
    _at("lost", INT),
    _at("known", BYTE),
    _at("spent", LONG),
)
_clock_at, _knobs_at = _at("clock", CLOCK), _at("knobs", KNOBS)


@compiled
def clock_of(s: Any) -> Any:
    """Return the record of the clock."""
    return _clock_at(s, 0)


@compiled
def knobs_of(s: Any) -> Any:
    """Return the record of the constants."""
    return _knobs_at(s, 0)
