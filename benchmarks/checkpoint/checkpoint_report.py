"""Rows of `checkpoint.py`: their statistics, and how the tables read. No torch here."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Protocol

__all__ = ["Full", "Restart", "Row", "Seen", "Spread", "row_of", "show_full", "show_rows", "show_summary"]


class Seen(Protocol):
    """What a row takes from one rank."""

    stalls: list[float]
    durable: list[float]
    busy_steps: list[float]
    quiet_steps: list[float]
    cycles: list[tuple[float, int]]
    quiet_walls: list[float]
    full_bytes: int
    written_bytes: int


@dataclass(frozen=True)
class Spread:
    """Median and range of some seconds."""

    median: float
    p99: float
    largest: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Spread":
        """The 99th percentile is the smallest value that 99 of 100 do not exceed."""
        ordered = sorted(seconds)
        return cls(statistics.median(ordered), ordered[ceil(0.99 * len(ordered)) - 1], ordered[-1])


@dataclass(frozen=True)
class Row:
    """One contender on one storage with one number of ranks."""

    storage: str
    sharing: str
    world: int
    contender: str
    is_ours: bool
    failed: str | None = None
    """Why there are no figures."""
    stall: Spread | None = None
    """Over saves and ranks."""
    first_stall: float | None = None
    """Stall of the first save, which starts processes and allocates; not in ``stall``."""
    durable_seconds: float | None = None
    """Median over saves of the slowest rank's."""
    alone_seconds: float | None = None
    """That writing the same bytes takes with nothing else to do."""
    bytes_per_second: float | None = None
    written_bytes: int | None = None
    slowdown: float | None = None
    """Mean step beside a save over mean step without, less one."""
    lost_seconds: float | None = None
    """Training time that a save costs in all."""
    load_cold_seconds: float | None = None
    load_warm_seconds: float | None = None
    same_bits: bool | None = None


@dataclass(frozen=True)
class Full:
    """What a save did that did not fit."""

    contender: str
    told: str
    """What training saw."""
    steps: int | None = None
    """That training made until it was told."""
    again: str = ""
    """What the next save did, after room was made."""


@dataclass(frozen=True)
class Restart:
    """From a kill to the state's return from memory."""

    megabytes: float
    seconds: Spread
    same_bits: bool


def row_of(
    place: tuple[str, str, int], contender: str, is_ours: bool, ranks: Sequence[Seen], alone_seconds: float
) -> Row:
    """The figures of training; those of loading come later. The first save of each rank is not counted."""
    durable = statistics.median(map(max, zip(*(rank.durable[1:] for rank in ranks), strict=True)))
    quiet_wall = statistics.mean(ranks[0].quiet_walls)
    full_bytes = ranks[0].full_bytes
    busy = [seconds for rank in ranks for seconds in rank.busy_steps]
    quiet = [seconds for rank in ranks for seconds in rank.quiet_steps]
    return Row(
        *place,
        contender,
        is_ours,
        stall=Spread.of([stall for rank in ranks for stall in rank.stalls[1:]]),
        first_stall=max(rank.stalls[0] for rank in ranks),
        durable_seconds=durable,
        alone_seconds=alone_seconds,
        bytes_per_second=full_bytes / durable,
        written_bytes=ranks[0].written_bytes,
        slowdown=statistics.mean(busy) / statistics.mean(quiet) - 1,
        lost_seconds=statistics.median(wall - steps * quiet_wall for wall, steps in ranks[0].cycles[1:]),
    )


def _table(titles: str, lines: Sequence[Sequence[str]]) -> str:
    names = titles.split(", ")
    rule = "|" + "---|" * len(names)
    return "\n".join(["| " + " | ".join(names) + " |", rule, *("| " + " | ".join(x) + " |" for x in lines)])


def _ms(seconds: float | None) -> str:
    return (
        "" if seconds is None else f"{seconds * 1e3:,.0f}" if abs(seconds) >= 0.01 else f"{seconds * 1e3:.2g}"
    )


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.2f}"


def _cells(row: Row) -> list[str]:
    if row.failed is not None:
        return [row.contender, f"failed: {row.failed}", *[""] * 12]
    assert row.stall is not None and row.bytes_per_second is not None
    assert row.written_bytes is not None and row.slowdown is not None
    stall = [_ms(x) for x in (row.stall.median, row.stall.p99, row.stall.largest, row.first_stall)]
    speed = [_seconds(row.durable_seconds), f"{row.bytes_per_second / 1e6:,.0f}"]
    costs = [f"{row.written_bytes / 1e6:,.0f}", f"{row.slowdown:+.0%}", _seconds(row.lost_seconds)]
    loads = [_seconds(row.load_cold_seconds), _seconds(row.load_warm_seconds)]
    return [row.contender, *stall, *speed, *costs, *loads, "equal" if row.same_bits else "DIFFER"]


def show_rows(rows: Sequence[Row], megabytes: float) -> str:
    """The table of one storage, sharing and number of ranks."""
    first = rows[0]
    ranks = f"{first.world} rank" + ("s" if first.world > 1 else "")
    head = f"### {first.storage}, {first.sharing}, {ranks} of {megabytes:g} MB"
    alone = next((row.alone_seconds for row in rows if row.alone_seconds is not None), None)
    if alone is not None:
        head += f"\n\nThe same bytes, written with nothing else to do: {alone:.2f} s."
    titles = (
        "contender, stall ms (median), p99, max, first save, durable s, MB/s, MB written, steps beside it, "
    )
    titles += "s lost a save, load s (cold), warm, loaded bits"
    return f"\n{head}\n\n{_table(titles, [_cells(row)[: titles.count(', ') + 1] for row in rows])}"


def _best(rows: Sequence[Row], figure: str) -> Row | None:
    found = [row for row in rows if getattr(row, figure) is not None and not row.is_ours]
    return min(found, key=lambda row: getattr(row, figure), default=None)


def show_summary(rows: Sequence[Row]) -> str:
    """Myriad against the best peer, figure by figure: it need not be the same peer."""
    lines = []
    for ours in (row for row in rows if row.is_ours and row.stall is not None):
        place = (ours.storage, ours.sharing, ours.world)
        peers = [row for row in rows if (row.storage, row.sharing, row.world) == place]
        cells = [ours.storage, ours.sharing, str(ours.world)]
        assert ours.stall is not None
        stalls = [row.stall.median for row in peers if row.stall is not None and not row.is_ours]
        cells.append(_against(ours.stall.median, min(stalls, default=None)))
        for figure in ("durable_seconds", "lost_seconds", "load_warm_seconds"):
            best = _best(peers, figure)
            cells.append(_against(getattr(ours, figure), None if best is None else getattr(best, figure)))
        lines.append(cells)
    titles = "storage, sharing, ranks, stall, time to durable, lost a save, load (warm)"
    return f"\n### Myriad and the best peer of each figure, ms\n\n{_table(titles, lines)}"


def _against(ours: float | None, peer: float | None) -> str:
    return f"{_ms(ours)} : {_ms(peer)}" if peer is not None else _ms(ours)


def show_full(rows: Sequence[Full], where: str) -> str:
    """The table of the disk that is too small."""
    lines = [
        [row.contender, row.told, "" if row.steps is None else str(row.steps), row.again] for row in rows
    ]
    titles = "contender, what training saw, steps made meanwhile, the next save with room made"
    return f"\n### {where}\n\n{_table(titles, [[x.replace('|', '/') for x in line] for line in lines])}"
