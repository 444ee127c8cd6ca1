"""Max-min fair rates of flows that share links, and when each flow arrives.

*Max-min fair*: no flow can get more without taking from a flow that has no more than it. So each flow has a
bottleneck: a full link on its path on which no flow has a higher rate. Progressive filling finds the rates
(Bertsekas and Gallager, Data Networks, section 6.5.2): all rates grow together; when a link is full, the
rates of its flows are final.

The compiled loops keep a heap of links by *share*: the capacity left on a link for each flow whose rate
still grows. A share only rises while links with smaller shares fill up, so the heap needs no updates: a link
at the top whose share has risen is pushed down with its new share.

Arrays: F flows, L links.
"""

import numba
import numpy as np
import numpy.typing as npt

from myriad.network.fabric import Fabric, Flows, Numbers, Ordinals, Paths

__all__ = ["coupled", "finish_seconds", "latency_seconds", "max_min"]


def max_min(bytes_per_second: Numbers, paths: Paths, limit: Numbers | None = None) -> Numbers:
    """Return (F) the max-min rate of each flow on links of (L) rates. ``limit`` is (F) the highest rate that
    each flow can use. A flow without links has its limit, or is unbounded."""
    most = np.full(len(paths), np.inf) if limit is None else np.asarray(limit, dtype=np.float64)
    order = np.arange(0) if limit is None else np.argsort(most, kind="stable")
    return progressive_filling(bytes_per_second, paths.first, paths.link, most, order)


def coupled(paths: Paths, group: npt.NDArray[np.int64]) -> Paths:
    """Return one path for each group of flows that share a rate, such as those of a ring: a link appears as
    often as the group has flows on it. ``group[f]`` is numbered from 0 without gaps."""
    length = np.diff(paths.first)
    order = np.argsort(np.repeat(group, length), kind="stable")
    total = np.bincount(group, weights=length).astype(np.int64)
    return Paths(first=np.concatenate([[0], np.cumsum(total)]), link=paths.link[order])


def finish_seconds(fabric: Fabric, flows: Flows, paths: Paths, *, tolerance: float = 0.0) -> Numbers:
    """Return (F) when each flow's last byte arrives; at every moment all flows in flight have max-min rates.
    With a ``tolerance``, flows that would finish within that share of the next finish time end in the same
    step, at their current rates: rates are computed far less often, and each step is off by no more than
    that."""
    begin, rates = flows.start_seconds, fabric.bytes_per_second
    coming = np.argsort(begin, kind="stable")
    sent = simulate_flows(rates, paths.first, paths.link, begin, coming, flows.num_bytes, tolerance)
    return sent + latency_seconds(fabric, paths)


def latency_seconds(fabric: Fabric, paths: Paths) -> Numbers:
    """Return (F) the latency of each path without queues."""
    owner = np.repeat(np.arange(len(paths)), np.diff(paths.first))
    weights = fabric.latency_seconds[paths.link]
    return np.bincount(owner, weights=weights, minlength=len(paths)).astype(np.float64)


_Int64s = npt.NDArray[np.int64]
_Flags = npt.NDArray[np.bool_]

_SAME = 1 + 1e-12
"""Factor below which numbers count as equal: they differ by rounding."""


@numba.njit(cache=True)
def progressive_filling(
    rates: Numbers, first: _Int64s, link: Ordinals, most: Numbers, order: _Int64s
) -> Numbers:
    """Return (F) max-min rates. ``order`` lists the flows with a finite limit, lowest limit first."""
    num_links = len(rates)
    start, on = _flows_by_link(first, link, num_links)
    left, growing = rates.copy(), start[1:] - start[:-1]
    found, done = most.copy(), np.zeros(len(most), dtype=np.bool_)
    heap, key = np.empty(num_links, dtype=np.int64), np.zeros(num_links)
    size, turn = 0, 0
    for one in range(num_links):
        if growing[one] > 0:
            heap[size], key[one] = one, left[one] / growing[one]
            size += 1
    for place in range(size // 2 - 1, -1, -1):
        _sift_down(heap, key, place, size)
    while size > 0:
        top = heap[0]
        turn = _next_limited_flow(turn, order, first, done)
        if turn < len(order) and most[order[turn]] <= key[top]:
            _fix_rate(order[turn], most[order[turn]], first, link, left, growing, found, done)
        elif growing[top] == 0:
            size = _pop_root(heap, key, size)
        else:
            share = max(left[top], 0.0) / growing[top]
            if share > key[top] * _SAME:
                key[top] = share
                _sift_down(heap, key, 0, size)
            else:
                for index in range(start[top], start[top + 1]):
                    if not done[on[index]]:
                        _fix_rate(on[index], share, first, link, left, growing, found, done)
                size = _pop_root(heap, key, size)
    return found


@numba.njit(cache=True)
def _next_limited_flow(turn: int, order: _Int64s, first: _Int64s, done: _Flags) -> int:
    """Skip flows whose rate is final; a flow without links already has its limit."""
    while turn < len(order) and (done[order[turn]] or first[order[turn]] == first[order[turn] + 1]):
        turn += 1
    return turn


@numba.njit(cache=True)
def _fix_rate(
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
def _pop_root(heap: _Int64s, key: Numbers, size: int) -> int:
    heap[0] = heap[size - 1]
    _sift_down(heap, key, 0, size - 1)
    return size - 1


@numba.njit(cache=True)
def _sift_down(heap: _Int64s, key: Numbers, place: int, size: int) -> None:
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
    """Return the flows on each link, ``on[start[l] : start[l + 1]]``; a flow appears as often as it takes
    the link."""
    start = np.zeros(num_links + 1, dtype=np.int64)
    for one in link:
        start[one + 1] += 1
    for one in range(num_links):
        start[one + 1] += start[one]
    on, free = np.empty(start[-1], dtype=np.int64), start[:-1].copy()
    for flow in range(len(first) - 1):
        for index in range(first[flow], first[flow + 1]):
            on[free[link[index]]] = flow
            free[link[index]] += 1
    return start, on


@numba.njit(cache=True)
def simulate_flows(
    rates: Numbers,
    first: _Int64s,
    link: Ordinals,
    begin: Numbers,
    coming: _Int64s,
    num_bytes: Numbers,
    tolerance: float,
) -> Numbers:
    """Return (F) when the last byte of each flow has been sent. Rates hold until the next flow begins or
    ends. ``coming`` lists the flows in the order in which they begin."""
    # Loops instead of concatenation, sorting and slices: machine code of these takes seconds to compile.
    left, done = num_bytes.copy(), begin.copy()
    active, num_active, waiting, now = np.empty(len(begin), dtype=np.int64), 0, 0, 0.0
    while waiting < len(begin) or num_active > 0:
        if num_active == 0:
            now = begin[coming[waiting]]
        while waiting < len(begin) and begin[coming[waiting]] <= now:
            active[num_active] = coming[waiting]
            num_active, waiting = num_active + 1, waiting + 1
        needed = _needed_seconds(rates, first, link, left, active[:num_active])
        step = np.min(needed)
        if waiting < len(begin):
            step = min(step, begin[coming[waiting]] - now)
        latest, num_left = step * (1 + tolerance) * _SAME, 0
        for index in range(num_active):
            flow = active[index]
            if needed[index] <= latest:
                done[flow] = now + needed[index]
            else:
                left[flow] *= 1 - step / needed[index]
                active[num_left] = flow
                num_left += 1
        num_active, now = num_left, now + step
    return done


@numba.njit(cache=True)
def _needed_seconds(
    rates: Numbers, first: _Int64s, link: Ordinals, left: Numbers, active: _Int64s
) -> Numbers:
    """Return the seconds that each active flow would need at the rates they have together."""
    own_first = np.zeros(len(active) + 1, dtype=np.int64)
    for index, flow in enumerate(active):
        own_first[index + 1] = own_first[index] + first[flow + 1] - first[flow]
    own_link = np.empty(own_first[-1], dtype=np.int32)
    for index, flow in enumerate(active):
        for hop in range(first[flow + 1] - first[flow]):
            own_link[own_first[index] + hop] = link[first[flow] + hop]
    found = progressive_filling(rates, own_first, own_link, np.full(len(active), np.inf), np.arange(0))
    return left[active] / found
