"""Pending events: a heap of whole numbers, each the time and, in its low bits, the slot of what happens.

A slot is one thing that can happen next: link 3's transmitter falls free, link 3's first packet arrives,
flow 7's first acknowledgement arrives. What comes behind the first waits in the order in which it will
happen, in a list of its own: so the heap holds at most a few entries per link and flow however many packets
there are, and nothing is ever taken out of its middle. Ties are settled by the slot: the same input gives
the same run. Each slot is pending once, but for flows that are woken sooner than was thought: the event that
came too late stays (`FLOW.wake_ps` says which counts), and the heap grows if there are many of those.

Most events cause their own successor. The root is therefore left as a gap when it is taken, and the next
push fills it and sinks once, where a pop and a push would walk the heap twice. Four children a node: half
the depth, and the four lie in one cache line.
"""

from typing import Any

from myriad.network.packets.state import clock_of, compiled, key_at

__all__ = ["close_gap", "push"]


@compiled
def push(s: Any, time_ps: Any, slot: Any) -> None:
    """Let ``slot`` happen at ``time_ps``."""
    clock = clock_of(s)
    key = (min(time_ps, clock.last_ps) << clock.slot_bits) | slot
    if clock.has_gap:
        clock.has_gap = 0
        _sink(s, key, clock.num_pending)
        return
    place = clock.num_pending
    clock.num_pending = place + 1
    while place > 0:
        above = (place - 1) >> 2
        parent = key_at(s, above).value
        if parent <= key:
            break
        key_at(s, place).value = parent
        place = above
    key_at(s, place).value = key


@compiled
def close_gap(s: Any) -> None:
    """After an event without a successor."""
    clock = clock_of(s)
    if clock.has_gap:
        clock.has_gap = 0
        clock.num_pending -= 1
        if clock.num_pending > 0:
            _sink(s, key_at(s, clock.num_pending).value, clock.num_pending)


@compiled
def _sink(s: Any, key: Any, count: Any) -> None:
    place = 0
    while True:
        child = (place << 2) + 1
        if child >= count:
            break
        place_of_least, least = child, key_at(s, child).value
        for other in range(child + 1, min(child + 4, count)):
            if key_at(s, other).value < least:
                place_of_least, least = other, key_at(s, other).value
        if least >= key:
            break
        key_at(s, place).value = least
        place = place_of_least
    key_at(s, place).value = key
