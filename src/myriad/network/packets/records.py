"""One row each of what a packet-level simulation holds: a link, a flow, a packet; and what there is once.

Lists of packets or of flows (a queue, a wire, those that wait for a NIC) are a head, a tail and a `next` in
each row. Times are whole picoseconds, sizes bytes on the wire, sequence numbers count a flow's packets.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "ABORTED",
    "BLOCKED",
    "BYTE",
    "CLOCK",
    "DONE",
    "FLOW",
    "INT",
    "KNOBS",
    "LINK",
    "LONG",
    "NONE",
    "NUM_FRAMES",
    "OUTAGE",
    "PACED",
    "PACKET",
    "PIPE",
    "READY",
    "SHORT",
    "SWITCH",
    "UNSTARTED",
    "WRITTEN",
    "rows",
]

NONE = -1
"""No packet, link or flow."""
UNSTARTED, BLOCKED, READY, PACED, DONE, ABORTED = range(6)
"""A flow not begun; waiting for an acknowledgement; in its NIC's turn; waiting for its rate; at its end."""


_LINE_BYTES = 64
"""Of a processor's cache."""


def _row(fields: list[tuple[str, str]]) -> np.dtype[np.void]:
    """A row that takes whole cache lines."""
    packed = np.dtype(fields, align=True)
    places = [packed.fields[name][1] for name, _ in fields] if packed.fields else []
    size = -(-packed.itemsize // _LINE_BYTES) * _LINE_BYTES
    names, kinds = zip(*fields, strict=True)
    return np.dtype({"names": names, "formats": kinds, "offsets": places, "itemsize": size}, align=True)


def rows(num: int, kind: np.dtype[np.void]) -> npt.NDArray[Any]:
    """Zeroed rows that begin at a cache line."""
    raw = np.zeros(num * kind.itemsize + _LINE_BYTES, np.uint8)
    skip = -raw.ctypes.data % _LINE_BYTES
    return raw[skip : skip + num * kind.itemsize].view(kind)


LINK = _row(
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
)
FLOW = _row(
    [
        # one cache line: what a sender needs for each packet
        ("state", "i4"),
        ("nic", "i4"),  # first link
        ("first_hop", "i4"),  # of Paths.link
        ("num_packets", "i4"),
        ("next_sequence", "i4"),  # next to send for the first time, or again after going back
        ("most_sequence", "i4"),  # number of packets ever sent at least once
        ("acked", "i4"),  # all before have been acknowledged
        ("limit_packets", "i4"),  # most in flight
        ("next_ready", "i4"),
        ("num_sent", "i4"),
        ("has_timer", "i4"),
        ("num_retries", "i4"),
        ("pace_ps_per_byte", "f8"),
        ("next_send_ps", "i8"),
        ("wake_ps", "i8"),  # of a flow that waits for its rate: when it is woken
        # another: the receiver, the answers, the timer
        ("received", "i4"),  # all before have arrived
        ("num_received", "i4"),  # different ones that arrived
        ("is_refused", "i4"),  # whether the receiver has asked for `received` again
        ("last_bytes", "i4"),  # of the last packet, on the wire
        ("pipe", "i4"),  # that its answers come back by
        ("next_timer", "i4"),
        ("num_discarded", "i4"),
        ("num_marks", "i4"),
        ("reply_ps", "i8"),  # from the last packet's arrival to the arrival of its acknowledgement
        ("deadline_ps", "i8"),
        ("timeout_ps", "i8"),
        ("finish_ps", "i8"),
        # seldom
        ("timer_ps", "i8"),  # when its timer in the common list rings
        ("last_hop", "i4"),
        ("first_sent", "i4"),  # selective repeat: ring of what is in flight, in order of sending
        ("next_sent", "i4"),
        ("first_lost", "i4"),  # and of what is to be sent again
        ("next_lost", "i4"),
        ("ring", "i8"),  # where both begin
        ("ring_mask", "i4"),
        ("num_resent", "i4"),
        ("num_timeouts", "i4"),
        ("first_child", "i4"),  # flows that begin when this one has arrived
        ("next_child", "i4"),
        ("start_ps", "i8"),
        ("base_ps", "i8"),  # round trip in an empty network
        ("line_ps_per_byte", "f8"),
        ("num_hops", "i4"),
        # controls: those of DCQCN
        ("is_cut", "i4"),
        ("is_told", "i4"),  # a cut is due when the interval between two allows
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
)
PACKET = _row(
    [
        ("next", "i4"),
        ("flow", "i4"),  # NONE: not in use
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
        ("is_answer", "i4"),
    ],
)
PIPE = np.dtype([("head", "i4"), ("tail", "i4")], align=True)
SWITCH = np.dtype([("used_bytes", "i8")], align=True)
CLOCK = np.dtype(
    [
        ("now_ps", "i8"),
        ("num_pending", "i8"),
        ("most_pending", "i8"),  # with room for one event more of each slot
        ("has_gap", "i8"),  # the root of the heap has been taken and not replaced
        ("slot_bits", "i8"),
        ("last_ps", "i8"),  # the latest time that a key can say
        ("free_head", "i8"),
        ("num_free", "i8"),
        ("timer_head", "i8"),  # flows whose timers run, in the order in which they ring
        ("timer_tail", "i8"),
        ("num_open", "i8"),  # flows not at their end
        ("num_events", "i8"),
        ("random", "u8"),
    ],
    align=True,
)
KNOBS = np.dtype(
    [
        ("full_bytes", "i8"),  # payload and headers
        ("start_bytes", "f8"),  # most that a flow has on its way in its first round trip
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
