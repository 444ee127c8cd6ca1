"""What ``myriad network flap`` prints: a table of timers, which to set, and the same as plain values."""

from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from myriad.network.flaps import Fate, Habits
from myriad.units import format_number

__all__ = ["COLUMNS", "Answer", "advice", "as_json_object", "cells", "notes", "show"]

COLUMNS = ("timeout", "T", "survives", "aborts", "stall", "detects", "a month", "lost h")


@dataclass(frozen=True)
class Answer:
    """What was found."""

    habits: "Habits"
    best: "Fate"
    best_plain: "Fate"
    """Without adaptive retransmission."""
    shown: "tuple[Fate, ...]"
    patient: "Fate | None"
    """The best, were the driver to wait for links as long as the timers do; none where it does."""


def show(found: Answer, cluster: str, seconds: float | None, out: Path | None) -> None:
    """As a table, and what to set."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console, habits, best = Console(highlight=False), found.habits, found.best
    count = habits.num_links * habits.flaps_per_month
    head = (
        f"{cluster}: {habits.num_links:,} links, {format_number(count)}"
        f" flaps a month, down for {habits.down.name}"
    )
    console.print(Text(head, style="bold"), soft_wrap=True)
    table = Table(box=None)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "timeout" else "right", no_wrap=True)
    for one in found.shown:
        table.add_row(*cells(one), style="bold" if one == best else "")
    console.print(table)
    for line in notes(found, seconds):
        console.print(Text(line, style="dim"), soft_wrap=True)
    console.print(Text("set", style="bold"))
    for setting, why in advice(found):
        console.print(Text(f"  {setting}"), soft_wrap=True)
        console.print(Text(f"      {why}", style="dim"), soft_wrap=True)
    if out is not None:
        console.print(str(out), soft_wrap=True)


def cells(one: "Fate") -> list[str]:
    """A row of the table."""
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


def notes(found: Answer, seconds: float | None) -> list[str]:
    """What its columns are, and under which conditions."""
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
        lines.append(f"(3 s x resilience.patience); {_longer_share(habits):.0%} of the flaps last longer.")
    if seconds is not None:
        wait = seconds + found.best.wait_seconds
        longest = seconds + found.best.wait_p95_seconds
        text = (
            f"an iteration of {format_number(seconds)} s takes {format_number(wait)} s with a flap that it "
            f"survives,"
        )
        lines += [text, f"at the 95th percentile {format_number(longest)} s, where nothing hides it"]
    return lines


def _longer_share(habits: "Habits") -> float:
    return float((habits.down.seconds > habits.driver_seconds).mean())


def advice(found: Answer) -> list[tuple[str, str]]:
    """What to set, and why."""
    from myriad.resilience.decide.health import TOLERATED_SECONDS

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
                f"--resilience.patience {format_number(patience, 2)}, with "
                f"NCCL_IB_TIMEOUT={patient.timers.timeout}",
                f"the driver waits for longer flaps: {patient.lost:.1%} end the job, not {best.lost:.1%}, "
                f"and {format_number(patient.hours_per_month)} hours a month are lost instead of "
                f"{format_number(best.hours_per_month)}; but all of the driver's deadlines grow with it",
            )
        )
    return lines


def as_json_object(found: Answer, cluster: str, seconds: float | None, out: Path | None) -> dict[str, Any]:
    """Plain values."""
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


def _fate_as_json(one: "Fate") -> dict[str, Any]:
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
