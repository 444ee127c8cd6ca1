"""What a packet-level simulation holds: preallocated arrays, one record per link, flow, packet and switch.

Nothing in the loop is a Python object: a record is a row of a structured array, a list of packets or of flows
(a queue, a wire, those that wait for a NIC) is a head, a tail and a `next` in each. Times are whole picoseconds.
`State` is all there is: the loop can stop at any event, return to Python and be called again.

Arrays: V switches, L links, F flows, N links of all paths, P packets, E ends of the histogram's bins.
"""

from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np.numpy_support import from_dtype

__all__ = [
    "ABORTED",
    "BLOCKED",
    "CLOCK",
    "DONE",
    "FLOW",
    "KNOBS",
    "LINK",
    "NONE",
    "PACED",
    "PACKET",
    "READY",
    "SWITCH",
    "UNSTARTED",
    "State",
    "compiled",
]

Records = npt.NDArray[Any]
NONE = -1
"""No packet, link or flow."""
UNSTARTED, BLOCKED, READY, PACED, DONE, ABORTED = range(6)
"""A flow not begun; waiting for an acknowledgement; in its NIC's turn; waiting for its rate; at its end."""


LINK = np.dtype(
    [
        ("free_ps", "i8"),  # when the transmitter has sent what it is sending
        ("full_ps", "i8"),  # time to send a full packet
        ("latency_ps", "i8"),
        ("queue_bytes", "i8"),
        ("sent_bytes", "i8"),
        ("queue_head", "i4"),
        ("queue_tail", "i4"),
        ("wire_head", "i4"),  # packets sent and not arrived
        ("wire_tail", "i4"),
        ("is_waiting", "i4"),  # whether an event is due at free_ps
        ("is_paused", "i4"),  # by its far end
        ("from_switch", "i4"),  # NONE: a NIC sends
        ("to_switch", "i4"),  # NONE: a NIC receives
        ("held_bytes", "i8"),  # came by this link and wait in the switch at its end
        ("is_pausing", "i4"),  # whether that switch has told the sender to stop
        ("num_frames", "i4"),  # pause frames on their way
        ("ps_per_byte", "f8"),
        ("loss_ratio", "f8"),
        ("seen_ps", "i8"),  # up to when the histogram is filled
        ("frame_ps", "i8"),  # from when this link's far end pauses to when its sender stops
        ("frame_first", "i4"),
        ("ready_head", "i4"),  # flows whose turn is to come
        ("ready_tail", "i4"),
        ("outage", "i4"),  # next down time, and where this link's end
        ("last_outage", "i4"),
        ("num_marks", "i4"),
        ("num_drops", "i4"),
        ("num_losses", "i4"),
        ("paused_since_ps", "i8"),
        ("paused_ps", "i8"),
        ("most_queue_bytes", "i8"),
    ],
    align=True,
)
FLOW = np.dtype(
    [
        ("state", "i4"),
        ("nic", "i4"),  # first link
        ("first_hop", "i4"),  # of Paths.link
        ("last_hop", "i4"),
        ("num_packets", "i4"),
        ("last_bytes", "i4"),  # of the last packet, on the wire
        ("next_sequence", "i4"),  # next to send for the first time, or again after going back
        ("most_sequence", "i4"),  # number of packets ever sent at least once
        ("acked", "i4"),  # all before have been acknowledged
        ("received", "i4"),  # all before have arrived
        ("num_received", "i4"),  # different ones that arrived
        ("limit_packets", "i4"),  # most in flight
        ("next_ready", "i4"),
        ("is_refused", "i4"),  # whether the receiver has asked for `received` again
        ("reply_head", "i4"),  # acknowledgements on their way back
        ("reply_tail", "i4"),
        ("pace_ps_per_byte", "f8"),
        ("next_send_ps", "i8"),
        ("reply_ps", "i8"),  # from the last packet's arrival to the arrival of its acknowledgement
        ("deadline_ps", "i8"),
        ("timeout_ps", "i8"),
        ("has_timer", "i4"),
        ("num_retries", "i4"),
        ("first_sent", "i4"),  # selective repeat: ring of what is in flight, in order of sending
        ("next_sent", "i4"),
        ("first_lost", "i4"),  # and of what is to be sent again
        ("next_lost", "i4"),
        ("ring", "i8"),  # where both begin
        ("ring_mask", "i4"),
        ("num_sent", "i4"),
        ("num_resent", "i4"),
        ("num_discarded", "i4"),
        ("num_timeouts", "i4"),
        ("num_marks", "i4"),
        ("first_child", "i4"),  # flows that begin when this one has arrived
        ("next_child", "i4"),
        ("start_ps", "i8"),
        ("finish_ps", "i8"),
        ("base_ps", "i8"),  # round trip in an empty network
        ("line_ps_per_byte", "f8"),
        ("num_hops", "i4"),
        # controls: those of DCQCN
        ("is_cut", "i4"),
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
        ("told_ps", "i8"),
        ("counted_bytes", "i8"),
        # and those of windows
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
    align=True,
)
PACKET = np.dtype(
    [
        ("next", "i4"),
        ("flow", "i4"),
        ("sequence", "i4"),
        ("hop", "i4"),  # of Paths.link: where it is
        ("num_bytes", "i4"),
        ("came_by", "i4"),  # link
        ("due_ps", "i8"),  # at the far end of the wire
        ("sent_ps", "i8"),
        ("order", "i4"),  # among all that the flow sent
        ("acknowledged", "i4"),  # in a reply: all before have arrived
        ("is_marked", "i4"),
        ("is_refusal", "i4"),
    ],
    align=True,
)
SWITCH = np.dtype([("used_bytes", "i8")], align=True)
CLOCK = np.dtype(
    [
        ("now_ps", "i8"),
        ("num_pending", "i8"),
        ("has_gap", "i8"),  # the root of the heap has been taken and not replaced
        ("slot_bits", "i8"),
        ("last_ps", "i8"),  # the latest time that a key can say
        ("free_head", "i8"),
        ("num_free", "i8"),
        ("num_open", "i8"),  # flows not at their end
        ("num_events", "i8"),
        ("random", "u8"),
    ],
    align=True,
)
KNOBS = np.dtype(
    [
        ("full_bytes", "i8"),  # payload and headers
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
    ],
    align=True,
)


OUTAGE = np.dtype([("from_ps", "i8"), ("until_ps", "i8")], align=True)
WRITTEN = np.dtype([("queue_bytes", "i8"), ("sent_bytes", "i8"), ("at_ps", "i8")], align=True)
_LONG, _INT, _SHORT, _BYTE = (np.dtype([("value", kind)]) for kind in ("i8", "i4", "i2", "u1"))
NUM_FRAMES = 64
"""Pause frames that fit on one wire."""


class State(NamedTuple):
    """The arrays."""

    clock: Records
    """(1) What there is once."""
    knobs: Records
    """(1) What does not change."""
    heap: Records
    """Pending events: time << slot_bits | slot; each slot is pending at most once."""
    links: Records
    """(L)"""
    flows: Records
    """(F)"""
    switches: Records
    """(V)"""
    packets: Records
    """(P)"""
    hops: Records
    """(N) Links of all paths."""
    written: Records
    """(P x hops) HPCC: queue, bytes sent and time, as each switch wrote them."""
    read: Records
    """(F x hops) HPCC: the same of the last acknowledgement."""
    sent: Records
    """Selective repeat: see FLOW.ring."""
    lost: Records
    """Likewise."""
    known: Records
    """One byte per packet of a flow's window: 1 it has arrived, 2 the sender knows."""
    frames: Records
    """(L x NUM_FRAMES) Arrival times of pause frames."""
    outages: Records
    """(O) By link and time."""
    bins: Records
    """Histogram bin of a queue, by its bytes >> 8."""
    spent: Records
    """(L x E) Picoseconds that a queue was so long."""


class Arena(NamedTuple):
    """What the loop gets: the address of each array of `State`, in the same order, and some sizes.

    Addresses, since an array that is read from a tuple in compiled code is counted as in use, by an atomic
    instruction, each time: measured, that was four fifths of the run.
    """

    clock: int
    knobs: int
    heap: int
    links: int
    flows: int
    switches: int
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
    num_flows: int
    num_hops: int
    """Places for telemetry per packet; 0: none."""
    num_bins: int


def arena_of(state: State, num_hops: int, num_bins: int) -> Arena:
    """Valid as long as the state's arrays live and are not replaced."""
    return Arena(*(array.ctypes.data for array in state), len(state.links), len(state.flows), num_hops, num_bins)


def compiled(function: Any) -> Any:
    """Machine code."""
    return numba.njit(error_model="numpy", nogil=True)(function)


def _at(field: str, dtype: np.dtype[np.void]) -> Any:
    """The compiled function of (arena, index) to a record of that array, by reference."""
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
key_at, hop_at, bin_at, frame_at = _at("heap", _LONG), _at("hops", _INT), _at("bins", _SHORT), _at("frames", _LONG)
written_at, read_at, outage_at = _at("written", WRITTEN), _at("read", WRITTEN), _at("outages", OUTAGE)
sent_at, lost_at, known_at, spent_at = _at("sent", _INT), _at("lost", _INT), _at("known", _BYTE), _at("spent", _LONG)
_clock_at, _knobs_at = _at("clock", CLOCK), _at("knobs", KNOBS)


@compiled
def clock_of(s: Any) -> Any:
    """The one record of the clock."""
    return _clock_at(s, 0)


@compiled
def knobs_of(s: Any) -> Any:
    """The one record of the settings."""
    return _knobs_at(s, 0)
