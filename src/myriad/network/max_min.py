"""Rates of flows that share links fairly, and when each has arrived.

*Max-min fair*: no flow can have more without another that has no more than it having less. Each flow has a
bottleneck: a full link on its path on which none has more. Progressive filling (Bertsekas and Gallager, Data
Networks, section 6.5.2) finds it: all grow alike; when a link is full, its flows stay as they are.

A link's share (what is left / flows that still grow) only rises while others stay: so a heap of links by the
share that was last seen needs no update, a link whose share has risen goes back.

Arrays: F flows, L links, N entries of all paths.
"""

import numba
import numpy as np
import numpy.typing as npt

from myriad.network.fabric import Fabric, Numbers
from myriad.network.flows import Flows, Paths

__all__ = ["coupled", "finish_seconds", "max_min"]


def max_min(bytes_per_second: Numbers, paths: Paths, limit: Numbers | None = None) -> Numbers:
    """(F) Rate of each flow on links of (L) rates. ``limit``: (F) what each can use at most. A flow that
    goes over no link has its limit, or no bound."""
    most = np.full(len(paths), np.inf) if limit is None else np.asarray(limit, dtype=np.float64)
    order = np.argsort(most, kind="stable") if limit is not None else np.arange(len(paths))
    active = np.ones(len(paths), dtype=np.bool_)
    return _fill(bytes_per_second, paths.first, paths.link, most, order, active)


@numba.njit(cache=True)
def _fill(rates, first, link, most, order, active):  # type: ignore[no-untyped-def]
    num_flows, num_links = len(first) - 1, len(rates)
    start, on = _flows_by_link(first, link, active, num_links)
    left, growing = rates.copy(), start[1:] - start[:-1]
    found, done = most.copy(), ~active
    found[done] = 0.0
    heap, size = np.empty(num_links, dtype=np.int32), 0
    key = np.empty(num_links)
    for one in range(num_links):
        if growing[one] > 0:
            key[one] = left[one] / growing[one]
            heap[size] = one
            size += 1
    for place in range(size // 2 - 1, -1, -1):
        _sink(heap, key, place, size)
    turn = 0
    while size > 0:
        top = heap[0]
        while turn < num_flows and (done[order[turn]] or first[order[turn]] == first[order[turn] + 1]):
            turn += 1
        if turn < num_flows and most[order[turn]] <= key[top]:  # its own limit comes first
            _settle(order[turn], most[order[turn]], first, link, left, growing, found, done)
            continue
        if growing[top] == 0:
            size -= 1
            heap[0] = heap[size]
        else:
            share = max(left[top], 0.0) / growing[top]
            if share <= key[top] * (1 + 1e-12):
                for index in range(start[top], start[top + 1]):
                    if not done[on[index]]:
                        _settle(on[index], share, first, link, left, growing, found, done)
                size -= 1
                heap[0] = heap[size]
            else:
                key[top] = share
        _sink(heap, key, 0, size)
    return found


@numba.njit(cache=True)
def _settle(flow, rate, first, link, left, growing, found, done):  # type: ignore[no-untyped-def]
    found[flow], done[flow] = rate, True
    for index in range(first[flow], first[flow + 1]):
        left[link[index]] -= rate
        growing[link[index]] -= 1


@numba.njit(cache=True)
def _sink(heap, key, place, size):  # type: ignore[no-untyped-def]
    while True:
        child = 2 * place + 1
        if child >= size:
            return
        if child + 1 < size and key[heap[child + 1]] < key[heap[child]]:
            child += 1
        if key[heap[place]] <= key[heap[child]]:
            return
        heap[place], heap[child] = heap[child], heap[place]
        place = child


@numba.njit(cache=True)
def _flows_by_link(first, link, active, num_links):  # type: ignore[no-untyped-def]
    start = np.zeros(num_links + 1, dtype=np.int64)
    for flow in range(len(first) - 1):
        if active[flow]:
            for index in range(first[flow], first[flow + 1]):
                start[link[index] + 1] += 1
    for one in range(num_links):
        start[one + 1] += start[one]
    on, free = np.empty(start[-1], dtype=np.int32), start[:-1].copy()
    for flow in range(len(first) - 1):
        if active[flow]:
            for index in range(first[flow], first[flow + 1]):
                on[free[link[index]]] = flow
                free[link[index]] += 1
    return start, on


def coupled(paths: Paths, group: npt.NDArray[np.int64]) -> Paths:
    """Flows that can only go at one pace, such as those of a ring, as one that goes over all their links: as
    often over a link as it has members there. ``group[f]``: numbers from 0."""
    order = np.argsort(group, kind="stable")
    length = np.diff(paths.first)
    entries = [paths.link[paths.first[flow] : paths.first[flow + 1]] for flow in order]
    total = np.bincount(group, weights=length, minlength=int(group.max(initial=-1)) + 1)
    first = np.concatenate([[0], np.cumsum(total)]).astype(np.int64)
    return Paths(first=first, link=np.concatenate([np.empty(0, np.int32), *entries]).astype(np.int32))


def finish_seconds(fabric: Fabric, flows: Flows, paths: Paths, *, tolerance: float = 0.0) -> Numbers:
    """(F) When each flow's last byte has arrived: at every moment all that are under way have max-min rates.
    With a ``tolerance``, those that would be done within so much of the time to the next one are done with
    it, and what they had left is counted at the rate they had: large cases need far fewer steps."""
    length = np.diff(paths.first)
    owner = np.repeat(np.arange(len(flows)), length)
    latency = np.bincount(owner, weights=fabric.latency_seconds[paths.link], minlength=len(flows))
    sent = _send(
        fabric.bytes_per_second, paths.first, paths.link, flows.start_seconds, flows.num_bytes, tolerance
    )
    return sent + latency


@numba.njit(cache=True)
def _send(rates, first, link, begin, num_bytes, tolerance):  # type: ignore[no-untyped-def]
    num_flows = len(begin)
    order, most = np.arange(num_flows), np.full(num_flows, np.inf)
    coming, waiting = np.argsort(begin), 0
    left, done, active = num_bytes.copy(), np.zeros(num_flows), np.zeros(num_flows, dtype=np.bool_)
    now, under_way = 0.0, 0
    while waiting < num_flows or under_way:
        if not under_way:
            now = begin[coming[waiting]]
        while waiting < num_flows and begin[coming[waiting]] <= now:
            active[coming[waiting]] = True
            waiting += 1
            under_way += 1
        found = _fill(rates, first, link, most, order, active)
        step = np.inf
        for flow in range(num_flows):
            if active[flow]:
                step = min(step, left[flow] / found[flow])
        if waiting < num_flows:
            step = min(step, begin[coming[waiting]] - now)
        for flow in range(num_flows):
            if active[flow]:
                needed = left[flow] / found[flow]
                if needed <= step * (1 + tolerance) * (1 + 1e-9):
                    active[flow], done[flow] = False, now + needed
                    under_way -= 1
                else:
                    left[flow] -= found[flow] * step
        now += step
    return done
