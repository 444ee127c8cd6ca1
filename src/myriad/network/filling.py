"""Progressive filling, and flows under way until all have arrived: the inner loops of `max_min`, compiled.

A link's *share* is what is left of it for each of its flows that still grow. It only rises while links with
less fill up. So a heap of links by the share that was last seen needs no update: at the top, a link whose
share has risen goes back down with the new one.
"""

import numba
import numpy as np
import numpy.typing as npt

from myriad.network.fabric import Numbers, Ordinals

__all__ = ["fill", "send"]

_Int64s = npt.NDArray[np.int64]
_Flags = npt.NDArray[np.bool_]

_SAME = 1 + 1e-12
"""Numbers that differ by rounding."""


@numba.njit(cache=True)
def fill(rates: Numbers, first: _Int64s, link: Ordinals, most: Numbers, order: _Int64s) -> Numbers:
    """(F) Max-min rates; ``order``: flows by what each can use at most, where that is not without bound."""
    num_links = len(rates)
    start, on = _flows_by_link(first, link, num_links)
    left, growing = rates.copy(), start[1:] - start[:-1]
    found, done = most.copy(), np.zeros(len(most), dtype=np.bool_)
    heap, key = np.flatnonzero(growing), np.zeros(num_links)
    key[heap] = left[heap] / growing[heap]
    size, turn = len(heap), 0
    for place in range(size // 2 - 1, -1, -1):
        _sink(heap, key, place, size)
    while size > 0:
        top = heap[0]
        turn = _next_turn(turn, order, first, done)
        if turn < len(order) and most[order[turn]] <= key[top]:
            _settle(order[turn], most[order[turn]], first, link, left, growing, found, done)
        elif growing[top] == 0:
            size = _drop(heap, key, size)
        else:
            share = max(left[top], 0.0) / growing[top]
            if share > key[top] * _SAME:
                key[top] = share
                _sink(heap, key, 0, size)
            else:
                for index in range(start[top], start[top + 1]):
                    if not done[on[index]]:
                        _settle(on[index], share, first, link, left, growing, found, done)
                size = _drop(heap, key, size)
    return found


@numba.njit(cache=True)
def _next_turn(turn: int, order: _Int64s, first: _Int64s, done: _Flags) -> int:
    """The next flow that still grows: one that goes over no link has what it can use already."""
    while turn < len(order) and (done[order[turn]] or first[order[turn]] == first[order[turn] + 1]):
        turn += 1
    return turn


@numba.njit(cache=True)
def _settle(
    flow: int,
    rate: float,
    first: _Int64s,
    link: Ordinals,
    left: Numbers,
    growing: _Int64s,
    found: Numbers,
    done: _Flags,
) -> None:
    found[flow], done[flow] = rate, True
    for index in range(first[flow], first[flow + 1]):
        left[link[index]] -= rate
        growing[link[index]] -= 1


@numba.njit(cache=True)
def _drop(heap: _Int64s, key: Numbers, size: int) -> int:
    heap[0] = heap[size - 1]
    _sink(heap, key, 0, size - 1)
    return size - 1


@numba.njit(cache=True)
def _sink(heap: _Int64s, key: Numbers, place: int, size: int) -> None:
    while 2 * place + 1 < size:
        child = 2 * place + 1
        if child + 1 < size and key[heap[child + 1]] < key[heap[child]]:
            child += 1
        if key[heap[place]] <= key[heap[child]]:
            return
        heap[place], heap[child] = heap[child], heap[place]
        place = child


@numba.njit(cache=True)
def _flows_by_link(first: _Int64s, link: Ordinals, num_links: int) -> tuple[_Int64s, _Int64s]:
    """The flows on each link: ``on[start[l] : start[l + 1]]``, as often as they go over it."""
    start = np.zeros(num_links + 1, dtype=np.int64)
    for one in link:
        start[one + 1] += 1
    start = np.cumsum(start)
    on, free = np.empty(start[-1], dtype=np.int64), start[:-1].copy()
    for flow in range(len(first) - 1):
        for index in range(first[flow], first[flow + 1]):
            on[free[link[index]]] = flow
            free[link[index]] += 1
    return start, on


@numba.njit(cache=True)
def send(
    rates: Numbers, first: _Int64s, link: Ordinals, begin: Numbers, num_bytes: Numbers, tolerance: float
) -> Numbers:
    """(F) When the last byte of each flow is on its way: rates hold until the next flow begins or ends."""
    coming, waiting = np.argsort(begin), 0
    left, done = num_bytes.copy(), begin.copy()
    active, now = np.empty(0, dtype=np.int64), 0.0
    while waiting < len(begin) or len(active) > 0:
        if len(active) == 0:
            now = begin[coming[waiting]]
        new = waiting
        while new < len(begin) and begin[coming[new]] <= now:
            new += 1
        active, waiting = np.concatenate((active, coming[waiting:new])), new
        needed = _needed(rates, first, link, left, active)
        step = np.min(needed)
        if waiting < len(begin):
            step = min(step, begin[coming[waiting]] - now)
        ends = needed <= step * (1 + tolerance) * _SAME
        for index, flow in enumerate(active):
            if ends[index]:
                done[flow] = now + needed[index]
            else:
                left[flow] *= 1 - step / needed[index]
        active, now = active[~ends], now + step
    return done


@numba.njit(cache=True)
def _needed(rates: Numbers, first: _Int64s, link: Ordinals, left: Numbers, active: _Int64s) -> Numbers:
    """Seconds that each of the active flows would need at the rates they have together."""
    own_first = np.zeros(len(active) + 1, dtype=np.int64)
    for index, flow in enumerate(active):
        own_first[index + 1] = own_first[index] + first[flow + 1] - first[flow]
    own_link = np.empty(own_first[-1], dtype=np.int32)
    for index, flow in enumerate(active):
        own_link[own_first[index] : own_first[index + 1]] = link[first[flow] : first[flow + 1]]
    found = fill(rates, own_first, own_link, np.full(len(active), np.inf), np.arange(0))
    return left[active] / found
