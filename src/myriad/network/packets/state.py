"""All that a packet-level simulation holds, and how compiled code reaches it.

Nothing in the loop is a Python object: rows of preallocated arrays, see `packets.records`. `State` is all
there is, so the loop can stop at any event, return to Python and be called again.

Arrays: V switches, L links, F flows, N links of all paths, P packets, O down times, E bins of the histogram.
"""

from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic
from numba.np.numpy_support import from_dtype

from myriad.network.packets.records import (
    BYTE,
    CLOCK,
    FLOW,
    INT,
    KNOBS,
    LINK,
    LONG,
    OUTAGE,
    PACKET,
    PIPE,
    SHORT,
    SWITCH,
    WRITTEN,
)

__all__ = [
    "Arena",
    "Records",
    "State",
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
    "sent_at",
    "spent_at",
    "switch_at",
    "written_at",
]

Records = npt.NDArray[Any]


class State(NamedTuple):
    """The arrays."""

    clock: Records
    """(1) What there is once."""
    knobs: Records
    """(1) What does not change."""
    heap: Records
    """Pending events: time << slot_bits | slot; see `packets.heap`."""
    links: Records
    """(L)"""
    flows: Records
    """(F)"""
    switches: Records
    """(V)"""
    pipes: Records
    """Answers on their way back: those that leave by the same link and travel as long, in order."""
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
    """Histogram bin of a queue, by its bytes >> grain_bits."""
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
    """Slots: 0 free, num_links arrival, 2 num_links frame, then one per pipe, and on."""
    first_wake: int
    first_timeout: int
    common_timer: int
    num_hops: int
    """Places for telemetry per packet; 0: none."""
    num_bins: int
    num_grains: int
    """Of `bins`."""
    grain_bits: int


def arena_of(state: State, num_hops: int, num_bins: int, grain_bits: int) -> Arena:
    """Valid as long as the state's arrays live and are not replaced."""
    answer = 3 * len(state.links)
    wake = answer + len(state.pipes)
    slots = answer, wake, wake + len(state.flows), wake + 2 * len(state.flows)
    sizes = len(state.links), *slots, num_hops, num_bins, len(state.bins), grain_bits
    return Arena._make([*(array.ctypes.data for array in state), *sizes])


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
    """The one record of the clock."""
    return _clock_at(s, 0)


@compiled
def knobs_of(s: Any) -> Any:
    """The one record of the settings."""
    return _knobs_at(s, 0)
