"""The fluid simulator: queues, pauses and congestion controls over time, bytes as a fluid, no single packets.

In each step (half of the shortest link, about half a microsecond) bytes move along their paths, queues serve
in order of arrival, and senders process acknowledgements and change their rate or window. The fluid level
stands between the flow level (fair rates at once, no queues) and the packet level (each packet is an event):
it shows queues, pauses and convergence at a cost that does not grow with the rate of links.

Invariant: bytes are conserved: each byte sent has arrived, is in a queue, or is on a link.
Not modelled: loss and retransmission, headers and the bytes of acknowledgements (2 % of a link), the
granularity of packets.
"""

from collections import namedtuple
from dataclasses import astuple, dataclass, fields
from typing import Any

import numba
import numpy as np

from myriad.network.congestion_controls import (
    CONTROLS,
    PACKET_BYTES,
    Control,
    Dcqcn,
    Hpcc,
    Hybrid,
    Swift,
    SwitchSettings,
)
from myriad.network.fabric import Fabric, Flows, Numbers, Paths
from myriad.network.fluid.fluid_queues import (
    Net,
    Queues,
    Senders,
    choose_step_seconds,
    make_net,
    make_queues,
    make_senders,
    mark_probability,
    next_place,
    step_queues,
)
from myriad.network.fluid.fluid_senders import (
    dcqcn_on_cnp,
    dcqcn_on_step,
    hpcc_on_ack,
    hybrid_on_ack,
    swift_on_ack,
)
from myriad.network.numba_cache import compiled_inside, source_stamp

__all__ = ["FluidResult", "simulate_fluid"]

_KINDS: tuple[type, ...] = (Dcqcn, Swift, Hpcc, Hybrid)


@dataclass(frozen=True, eq=False)
class FluidResult:
    """The result of a fluid simulation."""

    finish_seconds: Numbers
    """(F) When the last byte arrived; NaN if it did not within the horizon."""
    arrived_bytes: Numbers
    seconds: float
    """Simulated time in seconds, at most the horizon."""
    queue_bytes: Numbers
    """The deepest queue of a switch, one sample for each step."""
    pause_seconds: Numbers
    """(L) Time that each link was paused."""
    num_marks: float
    """Expected number of marked packets."""
    excess_bytes: float
    """The most that any port exceeded its room for pauses; above 0, packets would have been lost."""
    num_steps: int

    @property
    def queue_p99_bytes(self) -> float:
        """The 99th percentile over time of the deepest queue of a switch."""
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
    """Simulate until all flows have arrived, or to the horizon. ``start_packets``: packets of each sender in
    flight in its first round trip; default: as many as its port can send in one, as NICs do. ``max_bytes``
    limits memory. Raises `BadInputError`."""
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
        excess_bytes=max(0.0, float(queues.most_held.max()) - room),
        num_steps=num_steps,
    )


def _tuple_of(kind: type, name: str) -> Any:
    """Return a named tuple class with the fields of a dataclass, under that name in this module: numba's
    cache on disk stores the types of arguments by module and name."""
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
    """Return a dataclass of numbers as a named tuple, which compiled functions can read."""
    return _TUPLES[type(value)](*(v if isinstance(v, bool) else float(v) for v in astuple(value)))


def _all_numbers(control: Control) -> tuple[Any, ...]:
    """Return one parameter set of each kind, so that one compiled function serves all; it reads only the
    chosen kind."""
    every = {type(one): one for one in CONTROLS.values()} | {type(control): control}
    return tuple(_numbers(every[kind]) for kind in _KINDS)


@compiled_inside
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
    seen = np.zeros((len(queues.arriving), 3, len(net.rate)))
    for step in range(len(deepest)):
        deepest[step] = step_queues(net, queues, settings, step)
        _record_signals(net, queues, seen, settings, step, trip)
        num_left = _deliver(net, queues, senders, seen, size, step)
        marks += _process_acks(net, senders, kind, numbers, step, trip)
        _inject(net, queues, senders, kind, numbers, size, begin, step)
        if num_left == 0:
            return step + 1, marks
    return len(deepest), marks


def _cached(stamp: int) -> Any:
    """Return the compiled loop over all steps, cached on disk (`network.numba_cache`)."""

    def run(*arguments: Any) -> Any:
        return _steps(*arguments) if stamp >= 0 else (0, 0.0)

    return numba.njit(cache=True)(run)


_run = _cached(source_stamp(__file__))


@compiled_inside
def _record_signals(net: Net, queues: Queues, seen: Any, settings: Any, step: int, trip: float) -> None:
    """Record what each switch reports to leaving packets: wait, mark probability, load."""
    now = seen[step % len(seen)]
    for link in range(len(net.rate)):
        if net.from_switch[link] and net.start[link] < net.start[link + 1]:
            queued = queues.queued[link]
            now[0, link] = queues.wait[link]
            now[1, link] = mark_probability(settings, queued)
            now[2, link] = queues.used[link] + queued / (net.rate[link] * trip)


@compiled_inside
def _deliver(net: Net, queues: Queues, senders: Senders, seen: Any, size: Any, step: int) -> int:
    """Deliver what reaches its target and send acknowledgements; return the number of unfinished flows."""
    slot, num_left = step % len(queues.arriving), 0
    for flow in range(len(size)):
        amount = queues.arriving[slot, len(net.link) + flow]
        if amount > 0:
            queues.arriving[slot, len(net.link) + flow] = 0.0
            senders.arrived[flow] += amount
            _send_ack(net, senders, seen, flow, amount, step)
        if np.isnan(senders.finish[flow]):
            if senders.arrived[flow] >= size[flow] * (1 - 1e-9) - 0.5:
                senders.finish[flow] = step * net.step_seconds
            else:
                num_left += 1
    return num_left


@compiled_inside
def _send_ack(net: Net, senders: Senders, seen: Any, flow: int, amount: float, step: int) -> None:
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


@compiled_inside
def _process_acks(net: Net, senders: Senders, kind: int, numbers: Any, step: int, trip: float) -> float:
    """Let each sender react to the acknowledgements of this step; return the number of marked packets."""
    signal, now, marks = senders.signals[step % len(senders.signals)], step * net.step_seconds, 0.0
    for flow in range(len(net.line)):
        acked, delay = signal[0, flow], net.base_seconds[flow] + signal[1, flow]
        if acked <= 0:
            continue
        senders.acked[flow] += acked
        marks += signal[2, flow] * acked / PACKET_BYTES
        num, is_marked = _count_whole_packets(senders, flow, acked / PACKET_BYTES, signal[2, flow])
        if kind == 0 and is_marked:
            dcqcn_on_cnp(senders, numbers[0], flow, now)
        elif kind == 1:
            swift_on_ack(senders, numbers[1], flow, now, acked, delay, net.hops[flow])
        elif kind == 2:
            hpcc_on_ack(senders, numbers[2], flow, now, delay, signal[3, flow], trip, net.step_seconds / trip)
        elif kind == 3 and num > 0:
            acked, base = num * float(PACKET_BYTES), net.base_seconds[flow]
            hybrid_on_ack(senders, numbers[3], flow, now, acked, delay, base, is_marked)
        signal[0, flow] = 0.0
    return marks


@compiled_inside
def _count_whole_packets(senders: Senders, flow: int, packets: float, probability: float) -> tuple[int, bool]:
    """Return how many packets are complete now, and whether any is marked, drawn with the probability. A
    sender reacts only to whole packets."""
    senders.partial_packets[flow] += packets
    num, is_marked = 0, False
    while senders.partial_packets[flow] >= 1 - 1e-9:
        senders.partial_packets[flow] -= 1
        num += 1
        is_marked |= probability > 0 and np.random.random() < probability
    return num, is_marked


@compiled_inside
def _inject(
    net: Net, queues: Queues, senders: Senders, kind: int, numbers: Any, size: Any, begin: Any, step: int
) -> None:
    """Put bytes of senders on the links of their ports, as far as windows, rates, pauses and the link
    allow."""
    now = step * net.step_seconds
    for link in range(len(net.rate)):
        if net.from_switch[link] or net.start[link] == net.start[link + 1]:
            continue
        most = 0.0 if queues.is_paused[link] else _fair_share(net, senders, link, size, begin, now)
        slot = (step + net.ahead[link]) % len(queues.arriving)
        for index in range(net.start[link], net.start[link + 1]):
            place = net.on[index]
            flow = net.flow[place]
            amount = min(senders.demand[flow], most)
            senders.sent[flow] += amount
            queues.arriving[slot, next_place(net, place)] += amount
            if kind == 0 and now >= begin[flow]:
                dcqcn_on_step(senders, numbers[0], flow, now, amount, net.line[flow])


@compiled_inside
def _fair_share(net: Net, senders: Senders, link: int, size: Any, begin: Any, now: float) -> float:
    """Return the most that each flow of a port may send under round robin: flows with a lower demand get all
    of it, the others equal shares."""
    room, num, level = net.rate[link] * net.step_seconds, 0, -1.0
    for index in range(net.start[link], net.start[link + 1]):
        flow = net.flow[net.on[index]]
        senders.demand[flow] = _demand(net, senders, flow, size, begin, now)
        num += senders.demand[flow] > 0
    while num > 0 and room / num > level:
        reached, level = level, room / num
        for index in range(net.start[link], net.start[link + 1]):
            demand = senders.demand[net.flow[net.on[index]]]
            if demand > max(reached, 0.0) and demand <= level:
                room -= demand
                num -= 1
    return level if num > 0 else np.inf


@compiled_inside
def _demand(net: Net, senders: Senders, flow: int, size: Any, begin: Any, now: float) -> float:
    if now < begin[flow]:
        return 0.0
    in_flight = senders.sent[flow] - senders.acked[flow]
    most = min(senders.rate[flow] * net.step_seconds, size[flow] - senders.sent[flow])
    return max(0.0, min(most, senders.window[flow] - in_flight))
