"""Errors of predictions for published iterations that were collected after profiles were made.

    python benchmarks/planner/later_rows.py

`later_rows.csv` has 547 iterations that no table of Myriad's has, in the general form, with two columns more:
`group`, the source as it is printed, and `is_new`, whether no profile was made with rows of that source. The
first prediction of them is that of commit a90df047: there this file and its table give the figures of before.
*Held* is the share within the interval that `myriad plan` prints for the framework. The last line is the
interval that frameworks with a profile and without published times need (`PROFILE_RATIO`).
"""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from myriad.planner import TableOptions, parse_table, predict_table
from myriad.planner.validation.prediction_interval import FRAMEWORKS, framework_interval
from myriad.recipes.framework import ReadyRecipes

_ROWS = Path(__file__).with_name("later_rows.csv")
_LONG = 16_384
"""Positions from which on a sequence counts as long."""


class Later(NamedTuple):
    """A predicted row."""

    group: str
    is_new: bool
    sequence: int
    framework: str
    has_experts: bool
    error: float
    """Relative error of the iteration time, positive if the prediction is too slow."""
    is_held: bool


def predicted() -> Iterator[Later]:
    """Yield the rows that can be predicted, source by source."""
    rows = list(csv.DictReader(_ROWS.read_text(encoding="utf-8").splitlines()))
    for group in dict.fromkeys(row["group"] for row in rows):
        own = [row for row in rows if row["group"] == group]
        for row in own:
            yield from _predict(row)


def _predict(cells: Mapping[str, str]) -> Iterator[Later]:
    text = io.StringIO()
    kept = {name: value for name, value in cells.items() if name not in ("group", "is_new")}
    writer = csv.DictWriter(text, kept)
    writer.writeheader()
    writer.writerow(kept)
    table = parse_table(cells["group"], text.getvalue(), ReadyRecipes(), TableOptions(skip_bad=True))
    for one in predict_table(table).rows:
        half = framework_interval(one.row.framework, has_experts=one.row.has_experts)
        held = bool(abs(np.log1p(one.error)) <= np.log1p(half))
        row, new, sequence = one.row, cells["is_new"] == "yes", int(cells["seq"])
        yield Later(cells["group"], new, sequence, row.framework, row.has_experts, one.error, held)


def figures(rows: Sequence[Later]) -> tuple[str, ...]:
    """Return rows, median, 90th percentile and mean of the errors, and the share that is held."""
    errors = np.array([one.error for one in rows])
    size = np.abs(errors)
    held = np.mean([one.is_held for one in rows])
    shares = f"{np.median(size):.1%}", f"{np.quantile(size, 0.9):.1%}", f"{errors.mean():+.1%}"
    return str(len(rows)), *shares, f"{held:.0%}"


def needed_ratio(rows: Sequence[Later]) -> tuple[int, float]:
    """Return the number of frameworks with a profile and without published times, and the relative half width
    that holds nine of ten of their rows, each framework of equal weight."""
    groups: dict[str, list[float]] = {}
    for one in rows:
        if not one.has_experts and one.framework != "unknown" and one.framework not in FRAMEWORKS:
            groups.setdefault(one.framework, []).append(abs(float(np.log1p(one.error))))
    sizes = sorted((size, 1 / len(own) / len(groups)) for own in groups.values() for size in own)
    weights = np.cumsum([weight for _, weight in sizes])
    return len(groups), float(np.expm1(sizes[int(np.searchsorted(weights, 0.9))][0]))


def main() -> None:
    rows = list(predicted())
    new = [one for one in rows if one.is_new]
    groups = {name: [one for one in rows if one.group == name] for name in {one.group: 0 for one in rows}}
    groups |= {
        "all of new systems and lengths": new,
        "of these without a profile": [one for one in new if one.framework == "unknown"],
        "of these with a profile": [one for one in new if one.framework != "unknown"],
        "all others, dense": [one for one in rows if not (one.is_new or one.has_experts)],
        "all others, experts": [one for one in rows if one.has_experts],
        f"sequences of {_LONG:,} positions and more": [one for one in rows if one.sequence >= _LONG],
    }
    grid = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    grid.add_column("source")
    for name in ("rows", "median", "p90", "bias", "held"):
        grid.add_column(name, justify="right", no_wrap=True)
    for name, own in groups.items():
        grid.add_row(name, *figures(own))
    Console(width=110).print(grid)
    number, ratio = needed_ratio(rows)
    print(f"nine of ten times of {number} frameworks with a profile and without published times: {ratio:.0%}")


if __name__ == "__main__":
    main()
