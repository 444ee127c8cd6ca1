"""Packet by packet over a fabric: queues, marks, pauses, loss, down times, and what senders make of them.

    simulate_packets(fabric, flows, paths, control, switch_settings) -> PacketResult

The third and finest of the levels, for up to some 256 hosts and some hundred million packet hops. What is
simulated: `packets.links` (switches and wires), `packets.nics` and `packets.recovery` (senders and
receivers), `packets.controls` (congestion control); what an event is: `packets.loop`. The same input gives
the same result.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from myriad.network.controls import Control
from myriad.network.fabric import Fabric, Numbers
from myriad.network.flows import Flows, Paths
from myriad.network.packets.input import Faults, Series, Transport
from myriad.network.packets.loop import FULL, PAUSED, run
from myriad.network.packets.problem import Problem, bin_bytes, needs_of
from myriad.network.packets.records import ABORTED, NONE
from myriad.network.packets.setup import arena, new_state, with_more
from myriad.network.packets.state import State
from myriad.network.switch_settings import SwitchSettings

__all__ = ["PacketResult", "Samples", "simulate_packets"]

_Ints = npt.NDArray[np.int64]
_PS = 1e-12
_FIRST_RECORDS = 4096
"""Packet records to begin with: few enough for the second-level cache."""


@dataclass(frozen=True, eq=False)
class Samples:
    """Queues and flows over time: S samples."""

    seconds: Numbers
    """(S)"""
    queue_bytes: Numbers
    """(S, links asked for)"""
    arrived_bytes: Numbers
    """(S, flows asked for) Payload."""
    bytes_per_second: Numbers
    """(S, flows asked for) What the control allows; infinite: line rate."""


@dataclass(frozen=True, eq=False)
class PacketResult:
    """Arrays: F flows, L links."""

    finish_seconds: Numbers
    """(F) When the last byte arrived; NaN: it did not."""
    goodput_bytes_per_second: Numbers
    """(F) Payload over the time from the flow's start to its finish; NaN: it did not finish."""
    is_aborted: npt.NDArray[np.bool_]
    """(F) Its sender gave up."""
    num_sent: _Ints
    """(F) Packets, each time they were sent."""
    num_resent: _Ints
    """(F) Of these, not for the first time."""
    num_arrived: _Ints
    """(F) Different packets that arrived and were kept."""
    num_discarded: _Ints
    """(F) That arrived and were of no use: out of order, or there already."""
    num_timeouts: _Ints
    """(F)"""
    num_marked: _Ints
    """(F) That arrived with a mark."""
    queue_p50_bytes: Numbers
    """(L) Over the time of the simulation, within 2.2 %, or a 32768th of the longest (256 MiB at most)."""
    queue_p99_bytes: Numbers
    """(L)"""
    queue_max_bytes: _Ints
    """(L) Exactly."""
    pause_seconds: Numbers
    """(L) Time that its sender was told not to send on it."""
    num_marks: _Ints
    """(L) Packets marked in its queue."""
    num_drops: _Ints
    """(L) Packets that its switch had no room for."""
    num_losses: _Ints
    """(L) Packets lost on it: by chance or while it was down."""
    sent_bytes: _Ints
    """(L) With headers, lost ones too."""
    num_under_way: int
    """Data packets in queues and on wires when the last flow ended: all that were sent, did not arrive, and
    were neither lost nor dropped."""
    num_events: int
    end_seconds: float
    """When the last flow's sender knew it was over, or gave up."""
    samples: Samples | None


def simulate_packets(
    fabric: Fabric,
    flows: Flows,
    paths: Paths,
    control: Control | None,
    switch_settings: SwitchSettings,
    *,
    seed: int = 0,
    transport: Transport | None = None,
    faults: Faults | None = None,
    after: npt.NDArray[np.int32] | None = None,
    start_packets: float | None = None,
    series: Series | None = None,
    max_seconds: float = 1e3,
    max_bytes: float = 4e9,
) -> PacketResult:
    """Until every flow has arrived or given up, or for ``max_seconds``.

    ``control`` None: every flow at line rate. ``after[f]``: the flow whose arrival starts f (-1: none), as
    the steps of a ring wait for each other. ``start_packets``: what a sender with a control has on its way in
    its first round trip; off: as much as its port can send in one. ``max_bytes``: of memory; more is refused
    beforehand. Raises `BadInputError`.
    """
    problem = Problem(
        fabric, flows, paths, control, switch_settings,
        transport or Transport(), faults or Faults(), after, start_packets or np.inf, seed,
    )  # fmt: skip
    needs = needs_of(problem.check())
    needs.check(len(flows), max_bytes)
    state = new_state(problem, min(needs.most_records, _FIRST_RECORDS))
    recorder = _Recorder(series, problem) if series else None
    state = _run(problem, state, max_seconds, recorder)
    return _result(problem, state, recorder)


class _Recorder:
    """Samples in bounded memory."""

    def __init__(self, series: Series, problem: Problem) -> None:
        self.series = series
        self.period_ps = max(1, int(series.period_seconds / _PS))
        self.payload_bytes = problem.transport.payload_bytes
        self.rows: list[tuple[float, Numbers, Numbers, Numbers]] = []

    def take(self, state: State, now_ps: int) -> None:
        links, flows = list(self.series.links), list(self.series.flows)
        with np.errstate(divide="ignore"):
            rate = 1e12 / state.flows["pace_ps_per_byte"][flows]
        arrived = state.flows["num_received"][flows].astype(np.float64) * self.payload_bytes
        self.rows.append((now_ps * _PS, state.links["queue_bytes"][links].astype(np.float64), arrived, rate))
        if len(self.rows) >= self.series.most_samples:
            self.rows = self.rows[::2]
            self.period_ps *= 2

    def samples(self) -> Samples:
        seconds, queue, arrived, rate = zip(*self.rows, strict=True) if self.rows else ((), (), (), ())
        return Samples(
            np.array(seconds),
            np.array(queue).reshape(len(queue), -1),
            np.array(arrived).reshape(len(arrived), -1),
            np.array(rate).reshape(len(rate), -1),
        )


def _run(problem: Problem, state: State, max_seconds: float, recorder: _Recorder | None) -> State:
    last = min(int(max_seconds / _PS), int(state.clock["last_ps"][0]) - 1)
    until = recorder.period_ps if recorder else last
    while True:
        why = run(arena(problem, state), min(until, last))
        if why == FULL:
            state = with_more(problem, state)
        elif why == PAUSED and recorder and until < last:
            recorder.take(state, until)
            until += recorder.period_ps
        else:
            return state


def _result(problem: Problem, state: State, recorder: _Recorder | None) -> PacketResult:
    flows, links, clock = state.flows, state.links, state.clock[0]
    end = int(clock["now_ps"])
    paused = links["paused_ps"] + np.where(links["is_paused"] > 0, end - links["paused_since_ps"], 0)
    finish = np.where(flows["finish_ps"] >= 0, flows["finish_ps"] * _PS, np.nan)
    p50, p99 = _quantiles(problem, state, (0.5, 0.99), end)
    return PacketResult(
        finish_seconds=finish,
        goodput_bytes_per_second=_goodput(problem.flows.num_bytes, finish - flows["start_ps"] * _PS),
        is_aborted=flows["state"] == ABORTED,
        num_sent=flows["num_sent"].astype(np.int64),
        num_resent=flows["num_resent"].astype(np.int64),
        num_arrived=flows["num_received"].astype(np.int64),
        num_discarded=flows["num_discarded"].astype(np.int64),
        num_timeouts=flows["num_timeouts"].astype(np.int64),
        num_marked=flows["num_marks"].astype(np.int64),
        queue_p50_bytes=p50,
        queue_p99_bytes=p99,
        queue_max_bytes=links["most_queue_bytes"].copy(),
        pause_seconds=paused * _PS,
        num_marks=links["num_marks"].astype(np.int64),
        num_drops=links["num_drops"].astype(np.int64),
        num_losses=links["num_losses"].astype(np.int64),
        sent_bytes=links["sent_bytes"].copy(),
        num_under_way=int(np.sum((state.packets["flow"] != NONE) & (state.packets["is_answer"] == 0))),
        num_events=int(clock["num_events"]),
        end_seconds=end * _PS,
        samples=recorder.samples() if recorder else None,
    )


def _goodput(num_bytes: Numbers, seconds: Numbers) -> Numbers:
    """Nothing, in no time, is at any rate: infinite, as what does not leave its port."""
    return np.divide(num_bytes, seconds, out=np.full(len(seconds), np.inf), where=seconds != 0)


def _quantiles(problem: Problem, state: State, shares: tuple[float, ...], end_ps: int) -> list[Numbers]:
    """Of each queue over time, from the first flow's start."""
    spent = state.spent.reshape(len(state.links), -1).astype(np.float64)
    start = int(problem.flows.start_seconds.min(initial=0) / _PS)
    links = np.arange(len(spent))
    now = state.bins[np.minimum(state.links["queue_bytes"] >> problem.grain_bits, len(state.bins) - 1)]
    spent[links, now] += end_ps - state.links["seen_ps"]
    spent[:, 0] -= start
    total = np.cumsum(spent, axis=1)
    middle = bin_bytes(problem, state.bins)
    return [middle[(total < share * total[:, -1:]).sum(axis=1)] for share in shares]
