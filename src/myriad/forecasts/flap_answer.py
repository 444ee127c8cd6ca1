"""``myriad network flap``: the effect on a job of links that go down for seconds, and the NIC timers to set.

habits = link_habits(cluster, "lognormal:2:1", LinkRates(), JobTolerance(driver=True, ...))
found = compare_timers(habits, Timers(18, 7, adaptive=True), timeouts=[14, 18, 20])
found.best          the timers that lose the fewest hours a month
advice(found)       settings with reasons
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from myriad.errors import BadInputError
from myriad.units import format_number

if TYPE_CHECKING:
    from myriad.network.link_flaps import FlapCost, FlapScenario, Timers
    from myriad.planner import Cluster

__all__ = [
    "COLUMNS",
    "DEAD_PER_MONTH",
    "FLAPS_PER_MONTH",
    "QUEUE_PAIRS",
    "ComparedTimers",
    "JobTolerance",
    "LinkRates",
    "advice",
    "cells",
    "compare_timers",
    "headline",
    "link_habits",
    "notes",
    "timers_as_json",
]

COLUMNS = ("timeout", "T", "survives", "aborts", "stall", "detects", "a month", "lost h")


_CLEARLY = 0.99
"""A larger timeout scale is advised if it loses fewer hours than this ratio of the best timers."""
FLAPS_PER_MONTH = 0.01
"""Flaps of one link a month. Assumed: no measurement by number of links is published."""
DEAD_PER_MONTH = 0.00057
"""Failures of one link between a NIC and a switch a month (HPN, SIGCOMM 2024, section 2: 0.057 %)."""
QUEUE_PAIRS = 16
"""Queue pairs that send through a NIC's link. Assumed: two neighbours in a ring, eight channels each."""


@dataclass(frozen=True)
class ComparedTimers:
    """The best timers compared with some others."""

    habits: "FlapScenario"
    best: "FlapCost"
    best_plain: "FlapCost"
    """The best timers without adaptive retransmission."""
    shown: "tuple[FlapCost, ...]"
    patient: "FlapCost | None"
    """The best timers for a driver that waits for links as long as the timers do; ``None``: waiting longer is
    not clearly better."""


@dataclass(frozen=True)
class LinkRates:
    """The number of links and the rate of their failures."""

    flaps_per_month: float = FLAPS_PER_MONTH
    dead_per_month: float = DEAD_PER_MONTH
    num_links: int | None = None
    num_queue_pairs: int = QUEUE_PAIRS


@dataclass(frozen=True)
class JobTolerance:
    """How long the job waits for a link, and the cost of a restart."""

    driver: bool
    patience: float
    restart_seconds: float | None


def link_habits(cluster: "Cluster", down: str, rates: LinkRates, tolerance: JobTolerance) -> "FlapScenario":
    """Return the failure behaviour of the links of a job; ``down``: the distribution of down times. Raises
    `BadInputError`."""
    from myriad.forecasts.fleet.policy_times import load_times
    from myriad.network.link_flaps import DownTimes, FlapScenario
    from myriad.supervise.policy.health import TOLERATED_SECONDS

    for name, value, least, most in (
        ("--flaps", rates.flaps_per_month, 0, 1_000_000),
        ("--dead", rates.dead_per_month, 0, 1_000_000),
        ("--patience", tolerance.patience, 0.001, 1_000_000),
        ("--restart", tolerance.restart_seconds or 0.0, 0, 10_000_000),
    ):
        if not least <= value <= most:
            raise BadInputError(name, value, f"{least:g} to {most:,}")
    if cluster.nodes == 1 and rates.num_links is None:
        allowed = "more than one node, or --links: inside a node no cable goes down"
        raise BadInputError(f"{cluster.name}: nodes", 1, allowed)
    restart = load_times().restart_seconds if tolerance.restart_seconds is None else tolerance.restart_seconds
    return FlapScenario(
        down=DownTimes.parse(down),
        num_links=rates.num_links or cluster.nodes * cluster.ports_per_node,
        flaps_per_month=rates.flaps_per_month,
        dead_per_month=rates.dead_per_month,
        num_queue_pairs=rates.num_queue_pairs,
        restart_seconds=restart,
        driver_seconds=TOLERATED_SECONDS * tolerance.patience if tolerance.driver else inf,
    )


def compare_timers(habits: "FlapScenario", like: "Timers", timeouts: Sequence[int]) -> "ComparedTimers":
    """Find the best timers, with and without adaptive retransmission, and compare them with ``timeouts``."""
    from myriad.network.link_flaps import best_timers, flap_cost

    plain = replace(like, adaptive=False)
    best_plain = best_timers(plain, habits)
    best = min(best_plain, best_timers(like, habits), key=lambda one: one.hours_per_month)
    rows = {flap_cost(replace(one, timeout=number), habits) for number in timeouts for one in (plain, like)}
    shown = sorted({*rows, best, best_plain}, key=lambda one: (one.timers.timeout, one.timers.adaptive))
    return ComparedTimers(habits, best, best_plain, tuple(shown), _patient(habits, like, best))


def _patient(habits: "FlapScenario", like: "Timers", best: "FlapCost") -> "FlapCost | None":
    """Return the best timers for a driver that waits for links as long as the timers do; ``None`` where that
    is not clearly better."""
    from myriad.network.link_flaps import best_timers, flap_cost

    timers = best_timers(like, replace(habits, driver_seconds=inf)).timers
    waiting = flap_cost(timers, replace(habits, driver_seconds=timers.patience_seconds))
    better = waiting.hours_per_month < best.hours_per_month * _CLEARLY
    return waiting if better and timers.patience_seconds > habits.driver_seconds else None


def headline(found: ComparedTimers, cluster: str) -> str:
    """Return the number of links, their flaps and down times in one line."""
    habits = found.habits
    count = format_number(habits.num_links * habits.flaps_per_month)
    return f"{cluster}: {habits.num_links:,} links, {count} flaps a month, down for {habits.down.name}"


def cells(one: "FlapCost") -> list[str]:
    """Return a row of the table under `COLUMNS`."""
    timers = one.timers
    return [
        f"{timers.timeout} x {timers.retries}" + (" adaptive" if timers.adaptive else ""),
        _short(timers.interval_seconds),
        _short(timers.patience_seconds),
        f"{one.lost:.1%}",
        _short(one.wait_seconds),
        _short(one.dead_seconds),
        format_number(one.aborts_per_month),
        format_number(one.hours_per_month),
    ]


def _short(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 0.1 else f"{format_number(seconds)} s"


def notes(found: ComparedTimers, seconds: float | None) -> list[str]:
    """Return the meaning of the columns, and the assumptions of the numbers."""
    habits, least, most = found.habits, *found.best.timers.longer
    lines = [
        "T: interval between resends; survives: T x retries, the longest flap that every NIC survives;",
        "aborts: flaps that end the job; stall: wait of all ranks for a flap that does not;",
        "detects: time until a dead peer is noticed; a month: jobs that end; lost h: hours lost a month.",
        f"{habits.num_queue_pairs} queue pairs send through a link; a NIC's timers are {least:g} to {most:g} "
        f"times nominal",
        "(InfiniBand specification, volume 1, 9.7.6.1.3); a restart takes "
        f"{format_number(habits.restart_seconds)} s.",
    ]
    if isfinite(habits.driver_seconds):
        lines.append(
            f"The driver stops the ranks of a node whose link is down for "
            f"{format_number(habits.driver_seconds)} s"
        )
        longer = f"{_longer_share(habits):.0%} of the flaps last longer"
        lines.append(f"(3 s x resilience.timeout_scale); {longer}.")
    if seconds is not None:
        wait = seconds + found.best.wait_seconds
        longest = seconds + found.best.wait_p95_seconds
        text = (
            f"an iteration of {format_number(seconds)} s takes {format_number(wait)} s with a flap that it "
            f"survives,"
        )
        lines += [text, f"at the 95th percentile {format_number(longest)} s, where nothing hides it"]
    return lines


def _longer_share(habits: "FlapScenario") -> float:
    return float((habits.down.seconds > habits.driver_seconds).mean())


def advice(found: ComparedTimers) -> list[tuple[str, str]]:
    """Return each setting with its reason."""
    from myriad.supervise.policy.health import TOLERATED_SECONDS

    best, timers = found.best, found.best.timers
    said = (
        f"{best.lost:.1%} of flaps end the job, {format_number(best.hours_per_month)} hours a month are "
        f"lost: least"
    )
    lines = [
        (
            f"NCCL_IB_TIMEOUT={timers.timeout}",
            f"{said} of the timeouts 14 to 24; a dead peer is noticed after {_short(best.dead_seconds)}",
        ),
        (
            f"NCCL_IB_RETRY_CNT={timers.retries}",
            "the most that a NIC allows: with more and shorter intervals a resend comes sooner after a flap",
        ),
    ]
    if timers.adaptive:
        plain = found.best_plain
        lines.append(
            (
                "mlxreg -d DEVICE --reg_name ROCE_ACCL --set roce_adp_retrans_en=1",
                f"the first resend comes after milliseconds: a flap stalls {_short(best.wait_seconds)}, "
                f"without it at best {_short(plain.wait_seconds)} (timeout {plain.timers.timeout}); lost: "
                f"{format_number(best.hours_per_month)} and {format_number(plain.hours_per_month)} h a month",
            )
        )
    if found.patient is not None:
        patient = found.patient
        patience = patient.timers.patience_seconds / TOLERATED_SECONDS
        lines.append(
            (
                f"--resilience.timeout_scale {format_number(patience, 2)}, with "
                f"NCCL_IB_TIMEOUT={patient.timers.timeout}",
                f"the driver waits for longer flaps: {patient.lost:.1%} end the job, not {best.lost:.1%}, "
                f"and {format_number(patient.hours_per_month)} hours a month are lost instead of "
                f"{format_number(best.hours_per_month)}; but all of the driver's deadlines grow with it",
            )
        )
    return lines


def timers_as_json(
    found: ComparedTimers, cluster: str, seconds: float | None, out: Path | None
) -> dict[str, Any]:
    """Return plain values for ``--json``."""
    habits = found.habits
    return {
        "cluster": cluster,
        "links": habits.num_links,
        "flaps_per_month": habits.num_links * habits.flaps_per_month,
        "down": habits.down.name,
        "queue_pairs": habits.num_queue_pairs,
        "restart_seconds": habits.restart_seconds,
        "driver_seconds": habits.driver_seconds if isfinite(habits.driver_seconds) else None,
        "iteration_seconds": seconds,
        "timers": [_fate_as_json(one) for one in found.shown],
        "best": _fate_as_json(found.best),
        "best_without_adaptive": _fate_as_json(found.best_plain),
        "set": [{"setting": setting, "reason": why} for setting, why in advice(found)],
        "out": None if out is None else str(out),
    }


def _fate_as_json(one: "FlapCost") -> dict[str, Any]:
    timers = one.timers
    least, most = timers.gives_up_seconds
    return {
        "timeout": timers.timeout,
        "retries": timers.retries,
        "adaptive": timers.adaptive,
        "interval_seconds": timers.interval_seconds,
        "patience_seconds": timers.patience_seconds,
        "gives_up_seconds": [least, most],
        "abort_probability": one.lost,
        "abort_probability_of_queue_pair": one.lost_alone,
        "wait_seconds": one.wait_seconds,
        "wait_p95_seconds": one.wait_p95_seconds,
        "dead_seconds": one.dead_seconds,
        "aborts_per_month": one.aborts_per_month,
        "hours_per_month": one.hours_per_month,
    }
