"""One step of all queues of the fluid model: arrivals, service in order of arrival, marks, pauses.

    out of a link's queue    rate x step bytes, oldest batch first; nothing where its far end paused it
    pause (PFC)              a switch counts what stands in it by the link it came over; above xoff it pauses
                             that link's source, whatever stands there and wherever that wants to go: what is
                             behind it waits too (head-of-line blocking); below xon it lets it go on
    mark (ECN)               by what stands in the queue when a packet leaves it

Nothing is lost: how far a port went over its room for pauses is kept (`Queues.most_held`).
"""

from typing import Any

import numba

from myriad.network.fluid.state import Net, Queues
from myriad.network.switch_settings import SwitchSettings

__all__ = ["mark_probability", "move"]


@numba.njit()
def move(net: Net, queues: Queues, settings: Any, step: int) -> float:
    """All links once; bytes in the deepest queue of a switch."""
    slot = step % len(queues.coming)
    deepest = 0.0
    for link in range(len(net.rate)):
        _obey(queues, link, slot)
        if net.start[link] < net.start[link + 1]:
            if queues.is_paused[link]:
                queues.paused_seconds[link] += net.step_seconds
            if net.from_switch[link]:
                _take_in(net, queues, link, slot, step)
                _serve(net, queues, link, step)
                deepest = max(deepest, queues.stands[link])
    for link in range(len(net.rate)):
        if net.start[link] < net.start[link + 1]:
            _ask(net, queues, link, settings, step)
    return deepest


@numba.njit()
def _obey(queues: Queues, link: int, slot: int) -> None:
    if queues.order[slot, link] != 0:
        queues.is_paused[link] = queues.order[slot, link] > 0
        queues.order[slot, link] = 0


@numba.njit()
def _take_in(net: Net, queues: Queues, link: int, slot: int, step: int) -> None:
    """What arrives in this step is one batch; without room for one more it joins the last."""
    total = 0.0
    for index in range(net.start[link], net.start[link + 1]):
        total += queues.coming[slot, net.on[index]]
    if total <= 0:
        return
    depth = len(queues.left)
    if queues.count[link] < depth:
        queues.count[link] += 1
        queues.stamp[(queues.head[link] + queues.count[link] - 1) % depth, link] = step * net.step_seconds
    at = (queues.head[link] + queues.count[link] - 1) % depth
    for index in range(net.start[link], net.start[link + 1]):
        place = net.on[index]
        amount = queues.coming[slot, place]
        if amount > 0:
            queues.coming[slot, place] = 0.0
            queues.batch[at, place] += amount
            queues.held[net.link[place - 1]] += amount
    queues.left[at, link] += total
    queues.stands[link] += total


@numba.njit()
def _serve(net: Net, queues: Queues, link: int, step: int) -> None:
    full = net.rate[link] * net.step_seconds
    room = 0.0 if queues.is_paused[link] else full
    while room > 1e-9 * full and queues.count[link] > 0:
        at = queues.head[link]
        left = queues.left[at, link]
        taken = min(left, room)
        if taken > left * (1 - 1e-12):
            taken = left
            queues.head[link] = (at + 1) % len(queues.left)
            queues.count[link] -= 1
        _send_on(net, queues, link, at, taken / left, step)
        queues.left[at, link] = left - taken
        queues.stands[link] -= taken
        queues.wait[link] = step * net.step_seconds - queues.stamp[at, link]
        room -= taken
    queues.used[link] = 0.0 if queues.is_paused[link] else 1 - max(room, 0.0) / full
    if queues.count[link] == 0:
        queues.stands[link] = 0.0
        queues.wait[link] = 0.0


@numba.njit()
def _send_on(net: Net, queues: Queues, link: int, at: int, share: float, step: int) -> None:
    """A share of a batch to the next places of its flows."""
    slot = (step + net.ahead[link]) % len(queues.coming)
    for index in range(net.start[link], net.start[link + 1]):
        place = net.on[index]
        amount = queues.batch[at, place]
        if amount > 0:
            moved = amount * share
            queues.batch[at, place] = amount - moved if share < 1 else 0.0
            queues.coming[slot, next_place(net, place)] += moved
            queues.held[net.link[place - 1]] -= moved


@numba.njit()
def next_place(net: Net, place: int) -> int:
    """Where what leaves a place comes next."""
    flow = net.flow[place]
    return place + 1 if place + 1 < net.first[flow + 1] else len(net.link) + flow


@numba.njit()
def _ask(net: Net, queues: Queues, link: int, settings: Any, step: int) -> None:
    """What the far end tells the source of a link; it is heard as late as a packet is."""
    held = queues.held[link]
    queues.most_held[link] = max(queues.most_held[link], held)
    slot = (step + net.ahead[link]) % len(queues.order)
    if not queues.asked[link] and held > settings.pfc_xoff_bytes:
        queues.asked[link] = True
        queues.order[slot, link] = 1
    elif queues.asked[link] and held < max(settings.pfc_xon_bytes, 1.0):
        queues.asked[link] = False
        queues.order[slot, link] = -1


@numba.njit()
def mark_probability(settings: SwitchSettings, num_bytes: float) -> float:
    """That a packet is marked which leaves a queue of so many bytes."""
    if num_bytes <= settings.ecn_min_bytes:
        return 0.0
    if num_bytes > settings.ecn_max_bytes:
        return 1.0
    span = settings.ecn_max_bytes - settings.ecn_min_bytes
    return settings.ecn_max_ratio * (num_bytes - settings.ecn_min_bytes) / span
