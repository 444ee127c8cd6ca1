"""The fluid level: queues, pauses and congestion controls over time, bytes as a fluid, no single packets.

Each step (half of the shortest link, about half a microsecond) bytes move one step along their paths, queues
are served in order of arrival, senders hear what acknowledgements bring and change rate or window. It stands
between the flow level (rates are fair at once, queues do not exist) and the packet level (each packet is an
event): it shows queues, pauses and convergence at a cost that does not grow with the rate of links.

Invariant: bytes are conserved: what was sent has arrived, stands in a queue, or is on a link.
What it leaves out: loss and retransmission, headers and acknowledgements' own bytes (2 % of a link), the
granularity of packets.
"""

from collections import namedtuple
from dataclasses import astuple, dataclass, fields
from typing import Any

import numba
import numpy as np

from myriad.network.controls import CONTROLS, Control, Dcqcn, Hpcc, Hybrid, Swift
from myriad.network.fabric import Fabric, Numbers
from myriad.network.flows import Flows, Paths
from myriad.network.fluid.dcqcn import hear_dcqcn, tick_dcqcn
from myriad.network.fluid.queues import mark_probability, move, next_place
from myriad.network.fluid.state import (
    Net,
    Queues,
    Senders,
    choose_step_seconds,
    make_net,
    make_queues,
    make_senders,
)
from myriad.network.fluid.windows import hear_hpcc, hear_hybrid, hear_swift
from myriad.network.kept_code import stamp_of
from myriad.network.switch_settings import PACKET_BYTES, SwitchSettings

__all__ = ["FluidResult", "simulate_fluid"]

_KINDS: tuple[type, ...] = (Dcqcn, Swift, Hpcc, Hybrid)


@dataclass(frozen=True, eq=False)
class FluidResult:
    """What came out."""

    finish_seconds: Numbers
    """(F) When the last byte arrived; not a number: not within the horizon."""
    arrived_bytes: Numbers
    """(F)"""
    seconds: float
    """Simulated."""
    queue_bytes: Numbers
    """Samples, one each step: the deepest queue of a switch."""
    pause_seconds: Numbers
    """(L) That a link was paused."""
    num_marks: float
    """Marked packets, expected."""
    over_bytes: float
    """Most that any port held beyond what pausing leaves room for: above 0 packets would have been lost."""
    num_steps: int

    @property
    def queue_p99_bytes(self) -> float:
        """The deepest queue of a switch is no deeper than this in 99 % of the time."""
        return float(np.quantile(self.queue_bytes, 0.99)) if len(self.queue_bytes) else 0.0


def simulate_fluid(
    fabric: Fabric,
    flows: Flows,
    paths: Paths,
    control: Control,
    settings: SwitchSettings,
    *,
    horizon_seconds: float,
    start_packets: float | None = None,
    step_seconds: float | None = None,
    max_bytes: float = 4e9,
    seed: int = 0,
) -> FluidResult:
    """Until all flows have arrived, or the horizon. ``start_packets``: what a sender has on its way in its
    first round trip; off: as much as its port can send in one, as NICs do. ``max_bytes``: of memory. Raises
    `BadInputError`."""
    step = step_seconds or choose_step_seconds(fabric, paths)
    net = make_net(fabric, paths, step)
    queues = make_queues(net, flows, settings, max_bytes)
    senders = make_senders(net, control, start_packets)
    deepest = np.zeros(int(horizon_seconds / step) + 1)
    num_steps, num_marks = _run(
        net, queues, senders, flows.num_bytes, flows.start_seconds, _numbers(settings),
        _KINDS.index(type(control)), _all_numbers(control), seed, deepest,
    )  # fmt: skip
    room = settings.pfc_xoff_bytes + settings.pfc_headroom_bytes
    return FluidResult(
        finish_seconds=senders.finish,
        arrived_bytes=senders.arrived,
        seconds=num_steps * step,
        queue_bytes=deepest[:num_steps],
        pause_seconds=queues.paused_seconds,
        num_marks=num_marks,
        over_bytes=max(0.0, float(queues.most_held.max()) - room),
        num_steps=num_steps,
    )


def _tuple_of(kind: type, name: str) -> Any:
    """A named tuple with the fields of a dataclass, under that name in this module (compiled functions are
    kept on disk by their arguments' types, which must be found again)."""
    return namedtuple(name, [field.name for field in fields(kind)], module=__name__)


_DcqcnNumbers = _tuple_of(Dcqcn, "_DcqcnNumbers")
_SwiftNumbers = _tuple_of(Swift, "_SwiftNumbers")
_HpccNumbers = _tuple_of(Hpcc, "_HpccNumbers")
_HybridNumbers = _tuple_of(Hybrid, "_HybridNumbers")
_SettingsNumbers = _tuple_of(SwitchSettings, "_SettingsNumbers")
_TUPLES = {
    Dcqcn: _DcqcnNumbers,
    Swift: _SwiftNumbers,
    Hpcc: _HpccNumbers,
    Hybrid: _HybridNumbers,
    SwitchSettings: _SettingsNumbers,
}


def _numbers(value: Any) -> Any:
    """A dataclass of numbers as a named tuple, which compiled functions can read."""
    return _TUPLES[type(value)](*(v if isinstance(v, bool) else float(v) for v in astuple(value)))


def _all_numbers(control: Control) -> tuple[Any, ...]:
    """One set of each kind, so that one compiled function does for all; those of other kinds are not read."""
    every = {type(one): one for one in CONTROLS.values()} | {type(control): control}
    return tuple(_numbers(every[kind]) for kind in _KINDS)


@numba.njit()
def _steps(
    net: Net,
    queues: Queues,
    senders: Senders,
    size: Any,
    begin: Any,
    settings: Any,
    kind: int,
    numbers: Any,
    seed: int,
    deepest: Any,
) -> Any:
    np.random.seed(seed)
    trip, marks = np.max(net.base_seconds), 0.0
    if kind == 2:
        senders.since[:] = net.line * trip
    if kind == 0:
        senders.window[:] = np.inf
    seen = np.zeros((len(queues.coming), 3, len(net.rate)))
    for step in range(len(deepest)):
        deepest[step] = move(net, queues, settings, step)
        _note(net, queues, seen, settings, step, trip)
        num_left = _deliver(net, queues, senders, seen, size, step)
        marks += _hear(net, senders, kind, numbers, step, trip)
        _inject(net, queues, senders, kind, numbers, size, begin, step)
        if num_left == 0:
            return step + 1, marks
    return len(deepest), marks


def _kept(stamp: int) -> Any:
    """All steps, kept between processes (`kept_code`)."""

    def run(*arguments: Any) -> Any:
        return _steps(*arguments) if stamp >= 0 else (0, 0.0)

    return numba.njit(cache=True)(run)


_run = _kept(stamp_of(__file__))


@numba.njit()
def _note(net: Net, queues: Queues, seen: Any, settings: Any, step: int, trip: float) -> None:
    """What leaving packets are told by a switch: wait, mark, load."""
    now = seen[step % len(seen)]
    for link in range(len(net.rate)):
        if net.from_switch[link] and net.start[link] < net.start[link + 1]:
            stands = queues.stands[link]
            now[0, link] = queues.wait[link]
            now[1, link] = mark_probability(settings, stands)
            now[2, link] = queues.used[link] + stands / (net.rate[link] * trip)


@numba.njit()
def _deliver(net: Net, queues: Queues, senders: Senders, seen: Any, size: Any, step: int) -> int:
    """What reaches its target, and what is sent back for it."""
    slot, num_left = step % len(queues.coming), 0
    for flow in range(len(size)):
        amount = queues.coming[slot, len(net.link) + flow]
        if amount > 0:
            queues.coming[slot, len(net.link) + flow] = 0.0
            senders.arrived[flow] += amount
            _answer(net, senders, seen, flow, amount, step)
        if np.isnan(senders.finish[flow]):
            if senders.arrived[flow] >= size[flow] * (1 - 1e-9) - 0.5:
                senders.finish[flow] = step * net.step_seconds
            else:
                num_left += 1
    return num_left


@numba.njit()
def _answer(net: Net, senders: Senders, seen: Any, flow: int, amount: float, step: int) -> None:
    wait, unmarked, load, lag = 0.0, 1.0, 0.0, 0
    for place in range(net.first[flow + 1] - 1, net.first[flow], -1):
        link = net.link[place]
        lag += net.ahead[link]
        then = seen[(step - min(lag, len(seen) - 1, step)) % len(seen)]
        wait += then[0, link]
        unmarked *= 1 - then[1, link]
        load = max(load, then[2, link])
    signal = senders.signals[(step + net.back[flow]) % len(senders.signals)]
    signal[0, flow], signal[1, flow], signal[2, flow], signal[3, flow] = amount, wait, 1 - unmarked, load


@numba.njit()
def _hear(net: Net, senders: Senders, kind: int, numbers: Any, step: int, trip: float) -> float:
    """Each sender, what acknowledgements bring it in this step; how many packets were marked."""
    signal, now, marks = senders.signals[step % len(senders.signals)], step * net.step_seconds, 0.0
    for flow in range(len(net.line)):
        acked, delay = signal[0, flow], net.base_seconds[flow] + signal[1, flow]
        if acked <= 0:
            continue
        senders.acked[flow] += acked
        marks += signal[2, flow] * acked / PACKET_BYTES
        num, is_marked = _whole(senders, flow, acked / PACKET_BYTES, signal[2, flow])
        if kind == 0 and is_marked:
            hear_dcqcn(senders, numbers[0], flow, now)
        elif kind == 1:
            hear_swift(senders, numbers[1], flow, now, acked, delay, net.hops[flow])
        elif kind == 2:
            hear_hpcc(senders, numbers[2], flow, now, delay, signal[3, flow], trip, net.step_seconds / trip)
        elif kind == 3 and num > 0:
            acked, base = num * float(PACKET_BYTES), net.base_seconds[flow]
            hear_hybrid(senders, numbers[3], flow, now, acked, delay, base, is_marked)
        signal[0, flow] = 0.0
    return marks


@numba.njit()
def _whole(senders: Senders, flow: int, packets: float, probability: float) -> tuple[int, bool]:
    """How many packets are whole now, and whether any of them is marked, which the probability says: nothing
    is heard between two packets."""
    senders.unheard[flow] += packets
    num, is_marked = 0, False
    while senders.unheard[flow] >= 1 - 1e-9:
        senders.unheard[flow] -= 1
        num += 1
        is_marked |= probability > 0 and np.random.random() < probability
    return num, is_marked


@numba.njit()
def _inject(
    net: Net, queues: Queues, senders: Senders, kind: int, numbers: Any, size: Any, begin: Any, step: int
) -> None:
    """What senders put on their ports' links, as far as windows, rates, pauses and the link allow."""
    now = step * net.step_seconds
    for link in range(len(net.rate)):
        if net.from_switch[link] or net.start[link] == net.start[link + 1]:
            continue
        most = 0.0 if queues.is_paused[link] else _share(net, senders, link, size, begin, now)
        slot = (step + net.ahead[link]) % len(queues.coming)
        for index in range(net.start[link], net.start[link + 1]):
            place = net.on[index]
            flow = net.flow[place]
            amount = min(senders.wanted[flow], most)
            senders.sent[flow] += amount
            queues.coming[slot, next_place(net, place)] += amount
            if kind == 0 and now >= begin[flow]:
                tick_dcqcn(senders, numbers[0], flow, now, amount, net.line[flow])


@numba.njit()
def _share(net: Net, senders: Senders, link: int, size: Any, begin: Any, now: float) -> float:
    """What each flow of a port may send at most, so that they share its link by turns: who wants less has all
    that it wants, the others equally much."""
    room, num, level = net.rate[link] * net.step_seconds, 0, -1.0
    for index in range(net.start[link], net.start[link + 1]):
        flow = net.flow[net.on[index]]
        senders.wanted[flow] = _wanted(net, senders, flow, size, begin, now)
        num += senders.wanted[flow] > 0
    while num > 0 and room / num > level:
        reached, level = level, room / num
        for index in range(net.start[link], net.start[link + 1]):
            wanted = senders.wanted[net.flow[net.on[index]]]
            if wanted > max(reached, 0.0) and wanted <= level:
                room -= wanted
                num -= 1
    return level if num > 0 else np.inf


@numba.njit()
def _wanted(net: Net, senders: Senders, flow: int, size: Any, begin: Any, now: float) -> float:
    if now < begin[flow]:
        return 0.0
    under_way = senders.sent[flow] - senders.acked[flow]
    most = min(senders.rate[flow] * net.step_seconds, size[flow] - senders.sent[flow])
    return max(0.0, min(most, senders.window[flow] - under_way))
