"""What is known of congestion controls, and whether a table shows it; the hybrid beside its parents.

A claim is a comparison that a paper publishes and that does not depend on its testbed: an order, not a
number. It holds or not in these rows; either is said, with the figures.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from myriad.network.controls import CONTROLS, Dcqcn
from myriad.network.fluid.dcqcn import fixed_point_bytes
from myriad.network.levels import Row
from myriad.network.scenarios import PORT_BYTES_PER_SECOND
from myriad.network.switch_settings import SwitchSettings

__all__ = ["PARENTS", "TOLERANCE", "Claim", "Verdict", "published", "resting_queues", "worse_than_parents"]

PARENTS = ("swift", "dcqcn", "dcqcn-tuned")
TOLERANCE = 0.02
"""Differences below this share are none: seeds move more."""


@dataclass(frozen=True)
class Claim:
    """A published comparison."""

    words: str
    source: str
    scenario: str
    less: str
    """The control that has less of it,"""
    more: str
    """than this one."""
    measure: str
    value: Callable[[Row], float | None]
    factor: float = 1.0
    """By how much at least."""


@dataclass(frozen=True)
class Verdict:
    """A claim and what the rows say."""

    claim: Claim
    less: float
    more: float

    @property
    def holds(self) -> bool:
        """Whether the order is the published one."""
        return self.less * self.claim.factor < self.more


def _queue(row: Row) -> float | None:
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


def published(rows: Sequence[Row]) -> list[Verdict]:
    """The claims that these rows can say something of."""
    found, out = {(row.scenario, row.control): row for row in rows}, []
    for claim in CLAIMS:
        less, more = found.get((claim.scenario, claim.less)), found.get((claim.scenario, claim.more))
        if less is not None and more is not None:
            first, second = claim.value(less), claim.value(more)
            if first is not None and second is not None:
                out.append(Verdict(claim, first, second))
    return out


def resting_queues(rows: Sequence[Row], num_hosts: int) -> dict[str, float]:
    """By control: where the mean of DCQCN's rates comes to rest if an incast of all hosts lasts; of those
    that follow the paper's rules, which the analysis is of."""
    out, settings = {}, SwitchSettings.simulator(PORT_BYTES_PER_SECOND)
    for name in dict.fromkeys(
        row.control for row in rows if row.scenario == "incast" and row.level != "flow"
    ):
        control = CONTROLS[name]
        if isinstance(control, Dcqcn) and control.clamp_target and not control.timer_only:
            out[name] = fixed_point_bytes(control, settings, num_hosts - 1, PORT_BYTES_PER_SECOND)
    return out


_GOOD_IF_LESS: dict[str, Callable[[Row], float | None]] = {
    "time": lambda row: row.seconds,
    "queue p99": lambda row: row.queue_p99_bytes,
    "pauses": lambda row: row.pause_seconds,
    "slowdown p99": lambda row: row.slowdown_p99,
    "unfairness": lambda row: None if row.fairness is None else 2 - row.fairness,
}


def worse_than_parents(rows: Sequence[Row], child: str = "hybrid") -> dict[str, list[str]]:
    """By scenario: in which measures, and to which parent, the hybrid loses more than the tolerance."""
    found = {(row.scenario, row.control): row for row in rows}
    out: dict[str, list[str]] = {}
    for scenario in dict.fromkeys(row.scenario for row in rows):
        parents = [found[scenario, name] for name in PARENTS if (scenario, name) in found]
        if (scenario, child) in found and parents:
            own = found[scenario, child]
            out[scenario] = [told for parent in parents for told in _losses(own, parent)]
    return out


def _losses(own: Row, parent: Row) -> list[str]:
    out = []
    for name, value in _GOOD_IF_LESS.items():
        mine, other = value(own), value(parent)
        if mine is not None and other is not None and mine > other * (1 + TOLERANCE) + 1e-9:
            out.append(f"{name} {mine / other - 1:+.0%} to {parent.control}" if other else name)
    return out
