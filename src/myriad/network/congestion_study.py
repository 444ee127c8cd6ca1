"""Compare congestion controls: a row for each scenario, control and level, and the published claims.

    flow     rates are max-min fair at every moment, as with an ideal control; no queues, no pauses
    fluid    queues, pauses and the control over time
    packet   each packet is an event

*Throughput*: bytes of all flows / time until the last is done. *Slowdown*: a flow's time / its time alone
(as in Homa, SIGCOMM 2018, and HPCC). *Fairness*: Jain's index of the flows' mean rates (Jain, Chiu and Hawe,
1984), from 1 / N to 1. A flow that is not done at the horizon counts as done there, so its slowdown is a
lower bound; the row has the number of such flows.

A claim is a comparison that a paper publishes and that does not depend on its testbed: an order, not a
number. `check_claims` says whether each holds in these rows, with the figures.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from myriad.errors import BadInputError
from myriad.network.congestion_controls import CONTROLS, Control, Dcqcn, SwitchSettings
from myriad.network.congestion_scenarios import PORT_BYTES_PER_SECOND, CongestionScenario, settings_for
from myriad.network.fabric import Numbers
from myriad.network.fluid.fluid_senders import fixed_point_bytes

__all__ = [
    "LEVELS",
    "TOLERANCE",
    "ClaimCheck",
    "CongestionRow",
    "check_claims",
    "jain",
    "measure_scenario",
    "steady_queues",
    "worse_than_parents",
]

HORIZON = 20.0
"""The simulation ends at this multiple of the time of the flow level."""
MOST_PACKET_HOSTS = 256


@dataclass(frozen=True)
class CongestionRow:
    """Result of one control in one scenario at one level."""

    scenario: str
    title: str
    control: str
    level: str
    seconds: float
    """Time until the last flow is done."""
    bytes_per_second: float
    throughput_ratio: float
    """Throughput relative to fair shares."""
    queue_median_bytes: float | None
    queue_p99_bytes: float | None
    """The deepest queue of a switch, over the time until the last flow is done (packet level: the queue of
    the link whose queue is the deepest by this measure)."""
    pause_seconds: float | None
    """Sum over all links."""
    slowdown_median: float
    slowdown_p99: float
    """Over the watched flows."""
    fairness: float | None
    """Over equal flows; in the victim scenario over the flows of the incast."""
    num_unfinished: int


def jain(rates: Numbers) -> float:
    """Return Jain's index: (sum of x)^2 / (N x sum of x^2)."""
    return float(rates.sum() ** 2 / (len(rates) * np.square(rates).sum()))


def measure_scenario(
    case: CongestionScenario, name: str, control: Control, level: str, *, seed: int = 0
) -> CongestionRow:
    """Simulate a scenario with a control at a level. Raises `BadInputError`."""
    if level not in LEVELS:
        raise BadInputError("level", level, "one of " + ", ".join(LEVELS))
    fair = case.fair_seconds()
    horizon = HORIZON * float(fair.max())
    if level == "flow":
        return _row(case, "max-min fair", level, fair, fair, (None, None, None), horizon)
    finish, median, p99, pause = _RUN[level](case, control, horizon, seed)
    return _row(case, name, level, finish, fair, (median, p99, pause), horizon)


_Found = tuple[Numbers, float, float, float]
"""Finish times; median and p99 over time of the deepest queue; pause seconds."""


def _fluid(case: CongestionScenario, control: Control, horizon: float, seed: int) -> _Found:
    from myriad.network.fluid.fluid_engine import simulate_fluid

    found = simulate_fluid(
        case.fabric, case.flows, case.paths, control, settings_for(control, case.fabric, case.paths),
        horizon_seconds=horizon, start_packets=case.start_packets, seed=seed,
    )  # fmt: skip
    queue = found.queue_bytes
    median, p99 = (float(np.quantile(queue, share)) for share in (0.5, 0.99))
    return found.finish_seconds, median, p99, float(found.pause_seconds.sum())


def _packet(case: CongestionScenario, control: Control, horizon: float, seed: int) -> _Found:
    from myriad.network.packets.packet_engine import simulate_packets

    if case.fabric.num_ports > MOST_PACKET_HOSTS:
        raise BadInputError(
            "hosts", case.fabric.num_ports, f"at most {MOST_PACKET_HOSTS} at the packet level"
        )
    found = simulate_packets(
        case.fabric, case.flows, case.paths, control, settings_for(control, case.fabric, case.paths),
        start_packets=case.start_packets, seed=seed, max_seconds=horizon,
    )  # fmt: skip
    switches = case.fabric.tier[case.fabric.source] > 0
    median, p99 = (float(q[switches].max()) for q in (found.queue_p50_bytes, found.queue_p99_bytes))
    return found.finish_seconds, median, p99, float(found.pause_seconds.sum())


_RUN: dict[str, Callable[[CongestionScenario, Control, float, int], _Found]] = {
    "fluid": _fluid,
    "packet": _packet,
}
LEVELS = ("flow", *_RUN)


def _row(
    case: CongestionScenario,
    name: str,
    level: str,
    finish: Numbers,
    fair: Numbers,
    queue: tuple[float | None, float | None, float | None],
    horizon: float,
) -> CongestionRow:
    unfinished = ~np.isfinite(finish)
    done = np.where(unfinished, horizon, finish)
    last = float(done.max())
    slowdown = (done / case.alone_seconds())[case.watched]
    equal = case.watched if case.watched.sum() > 1 else ~case.watched
    return CongestionRow(
        scenario=case.name,
        title=case.title,
        control=name,
        level=level,
        seconds=last,
        bytes_per_second=float(case.flows.num_bytes.sum()) / last,
        throughput_ratio=float(fair.max()) / last,
        queue_median_bytes=queue[0],
        queue_p99_bytes=queue[1],
        pause_seconds=queue[2],
        slowdown_median=float(np.median(slowdown)),
        slowdown_p99=float(np.quantile(slowdown, 0.99)),
        fairness=jain((case.flows.num_bytes / done)[equal]),
        num_unfinished=int(unfinished.sum()),
    )


PARENTS = ("swift", "dcqcn", "dcqcn-tuned")
TOLERANCE = 0.02
"""Differences below this share do not count: the seed changes results by more."""


@dataclass(frozen=True)
class Claim:
    """A published comparison of two controls."""

    words: str
    source: str
    scenario: str
    less: str
    """The control with the lower value."""
    more: str
    """The control with the higher value."""
    measure: str
    value: Callable[[CongestionRow], float | None]
    factor: float = 1.0
    """Least ratio of the two values."""


@dataclass(frozen=True)
class ClaimCheck:
    """A claim and the two values in the rows."""

    claim: Claim
    less: float
    more: float

    @property
    def holds(self) -> bool:
        """Whether the order is the published one."""
        return self.less * self.claim.factor < self.more


def _queue(row: CongestionRow) -> float | None:
    return row.queue_median_bytes


CLAIMS = (
    Claim(
        "HPCC keeps queues near zero, DCQCN does not (by 10 at least)",
        "HPCC, SIGCOMM 2019",
        "incast", "hpcc", "dcqcn", "median queue, bytes", _queue, 10.0,
    ),
    Claim(
        "HPCC pays for it with throughput: it aims at 95 % of a link",
        "HPCC: eta = 95 %",
        "ring", "hpcc", "dcqcn", "throughput of fair", lambda row: row.throughput_ratio,
    ),
    Claim(
        "DCQCN's defaults leave throughput that small, frequent cuts and quick increases take",
        "Barre, USENIX ATC 2025, section 6.3",
        "incast", "dcqcn", "dcqcn-tuned", "throughput of fair", lambda row: row.throughput_ratio,
    ),
    Claim(
        "and share it less evenly",
        "Barre, USENIX ATC 2025, figure 12",
        "incast", "dcqcn", "dcqcn-tuned", "fairness", lambda row: row.fairness,
    ),
    Claim(
        "DCQCN as published for 40 Gbit/s needs tuning for faster ports",
        "HPCC: trade-offs of DCQCN's parameters",
        "incast", "dcqcn-paper", "dcqcn-tuned", "throughput of fair", lambda row: row.throughput_ratio,
    ),
    Claim(
        "A window that can go below one packet keeps a large incast's queue short",
        "Swift, SIGCOMM 2020",
        "many-to-one", "swift", "swift-whole-packets", "median queue, bytes", _queue,
    ),
    Claim(
        "Control by delay or telemetry avoids pauses that DCQCN falls back on",
        "HPCC",
        "incast", "hpcc", "dcqcn", "pauses, s", lambda row: row.pause_seconds,
    ),
    Claim(
        "Pauses hit flows that do not cause congestion",
        "DCQCN, SIGCOMM 2015; HPCC",
        "victim", "hpcc", "dcqcn", "victim's slowdown", lambda row: row.slowdown_p99,
    ),
)  # fmt: skip


def check_claims(rows: Sequence[CongestionRow]) -> list[ClaimCheck]:
    """Return the claims whose scenario and controls are in these rows."""
    found, out = {(row.scenario, row.control): row for row in rows}, []
    for claim in CLAIMS:
        less, more = found.get((claim.scenario, claim.less)), found.get((claim.scenario, claim.more))
        if less is not None and more is not None:
            first, second = claim.value(less), claim.value(more)
            if first is not None and second is not None:
                out.append(ClaimCheck(claim, first, second))
    return out


def steady_queues(rows: Sequence[CongestionRow], num_hosts: int) -> dict[str, float]:
    """Return by control the queue length at which the mean of DCQCN's rates settles if an incast of all
    hosts lasts; only for controls that follow the paper's rules, which the analysis covers."""
    out, settings = {}, SwitchSettings.simulator(PORT_BYTES_PER_SECOND)
    for name in dict.fromkeys(
        row.control for row in rows if row.scenario == "incast" and row.level != "flow"
    ):
        control = CONTROLS[name]
        if isinstance(control, Dcqcn) and control.clamp_target and not control.timer_only:
            out[name] = fixed_point_bytes(control, settings, num_hosts - 1, PORT_BYTES_PER_SECOND)
    return out


_GOOD_IF_LESS: dict[str, Callable[[CongestionRow], float | None]] = {
    "time": lambda row: row.seconds,
    "queue p99": lambda row: row.queue_p99_bytes,
    "pauses": lambda row: row.pause_seconds,
    "slowdown p99": lambda row: row.slowdown_p99,
    "unfairness": lambda row: None if row.fairness is None else 2 - row.fairness,
}


def worse_than_parents(rows: Sequence[CongestionRow], child: str = "hybrid") -> dict[str, list[str]]:
    """Return by scenario the measures in which the hybrid loses more than the tolerance, and to which
    parent."""
    found = {(row.scenario, row.control): row for row in rows}
    out: dict[str, list[str]] = {}
    for scenario in dict.fromkeys(row.scenario for row in rows):
        parents = [found[scenario, name] for name in PARENTS if (scenario, name) in found]
        if (scenario, child) in found and parents:
            own = found[scenario, child]
            out[scenario] = [loss for parent in parents for loss in _losses(own, parent)]
    return out


def _losses(own: CongestionRow, parent: CongestionRow) -> list[str]:
    out = []
    for name, value in _GOOD_IF_LESS.items():
        mine, other = value(own), value(parent)
        if mine is not None and other is not None and mine > other * (1 + TOLERANCE) + 1e-9:
            out.append(f"{name} {mine / other - 1:+.0%} vs {parent.control}" if other else name)
    return out
