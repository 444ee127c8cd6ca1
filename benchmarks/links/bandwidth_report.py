"""Rows of `bandwidth.py`: what each figure is compared with, and how the table reads. No torch here."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

from hosts import bits_per_second

__all__ = ["Row", "print_rate", "print_summary", "rows_of"]

_EIGHT = 8.0
_ZERO_3 = ("FSDP2", "DeepSpeed ZeRO-3")


class Described(Protocol):
    """What a row takes from a setting."""

    @property
    def contender(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def knobs(self) -> str: ...

    @property
    def least_bytes(self) -> float: ...

    @property
    def is_ours(self) -> bool: ...


@dataclass(frozen=True)
class Row:
    """One contender at one rate, in its best setting."""

    rate: str
    contender: str
    kind: str
    knobs: str
    is_ours: bool
    seconds: float
    """Median step."""
    sent_bytes: float
    """By the busiest host in a step."""
    compute_seconds: float
    least_seconds: float
    """The bound: max(compute, bytes / rate)."""
    speed_lost: float | None
    """Share of its own unshaped speed; None if that was not measured."""

    @property
    def bound_ratio(self) -> float:
        """1 is as fast as can be."""
        return self.least_seconds / self.seconds


def rows_of(
    rate: str,
    compute_seconds: float,
    figures: Sequence[tuple[Described, float, float]],
    earlier: Sequence[Row],
) -> list[Row]:
    """Rows for (setting, seconds, bytes sent)."""
    unshaped = {row.contender: row.seconds for row in earlier if row.rate == "unshaped"}
    rows = []
    for setting, seconds, sent_bytes in figures:
        least = 0.0 if rate == "unshaped" else 8 * setting.least_bytes / bits_per_second(rate)
        own = seconds if rate == "unshaped" else unshaped.get(setting.contender)
        rows.append(
            Row(
                rate=rate,
                contender=setting.contender,
                kind=setting.kind,
                knobs=setting.knobs,
                is_ours=setting.is_ours,
                seconds=seconds,
                sent_bytes=sent_bytes,
                compute_seconds=compute_seconds,
                least_seconds=max(compute_seconds, least),
                speed_lost=None if own is None else 1 - own / seconds,
            )
        )
    return sorted(rows, key=lambda row: (row.kind, not row.is_ours, row.seconds))


def _best(rows: Sequence[Row], *, ours: bool, kind: str | None = None) -> Row | None:
    found = [row for row in rows if row.is_ours == ours and kind in (None, row.kind)]
    return min(found, key=lambda row: row.seconds, default=None)


def _ratio(other: Row | None, row: Row) -> str:
    return "" if other is None else f"{other.seconds / row.seconds:.2f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def print_rate(rate: str, compute_seconds: float, rows: Sequence[Row]) -> None:
    """The table of one rate."""
    print(f"\n### {rate} (compute {compute_seconds * 1e3:.0f} ms)\n")
    titles = (
        "kind, contender, setting, ms a step, x best peer of its kind, x best peer, speed lost, of bound, "
    )
    titles += "MB sent"
    print("| " + titles.replace(", ", " | ") + " |\n" + "|---" * 9 + "|")
    for row in rows:
        of_kind = _best(rows, ours=False, kind=row.kind)
        cells = [row.kind, row.contender, row.knobs, f"{row.seconds * 1e3:.0f}"]
        cells += [_ratio(of_kind, row), _ratio(_best(rows, ours=False), row), _share(row.speed_lost)]
        cells += [f"{row.bound_ratio:.0%}", f"{row.sent_bytes / 1e6:.1f}"]
        print("| " + " | ".join(cells) + " |", flush=True)


def print_summary(rows: Sequence[Row]) -> None:
    """Best against best at every rate, then what an 8 x slower link costs."""
    print("\n### Myriad's best against the best peer\n")
    print("| rate | Myriad | ms | best peer | ms | x faster | of bound |\n" + "|---" * 7 + "|")
    for rate in dict.fromkeys(row.rate for row in rows):
        at_rate = [row for row in rows if row.rate == rate]
        ours, peer = _best(at_rate, ours=True), _best(at_rate, ours=False)
        if ours is None or peer is None:
            continue
        cells = [rate, f"{ours.kind}: {ours.knobs}", f"{ours.seconds * 1e3:.0f}"]
        cells += [peer.contender, f"{peer.seconds * 1e3:.0f}", _ratio(peer, ours), f"{ours.bound_ratio:.0%}"]
        print("| " + " | ".join(cells) + " |")
    _print_eightfold(rows)


def _print_eightfold(rows: Sequence[Row]) -> None:
    """For every pair of rates that differ by 8: the speed lost by the layout that is best at the lower."""
    shaped = [rate for rate in dict.fromkeys(row.rate for row in rows) if rate != "unshaped"]
    for high in shaped:
        for low in shaped:
            if abs(bits_per_second(high) / bits_per_second(low) / _EIGHT - 1) > 0.01:
                continue
            print(f"\nspeed lost from {high} to {low}:")
            ours = _best([row for row in rows if row.rate == low], ours=True)
            names = [*([ours.contender] if ours else []), *_ZERO_3]
            for name in names:
                seconds = {row.rate: row.seconds for row in rows if row.contender == name}
                if high in seconds and low in seconds:
                    print(f"  {name:20} {1 - seconds[high] / seconds[low]:.0%}")
