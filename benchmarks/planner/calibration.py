"""Predictions of published iterations after `myriad plan --calibrate` with a few of them.

    python benchmarks/planner/calibration.py
    python benchmarks/planner/calibration.py --rows 10 --draws 20

For each framework and accelerator with enough rows of dense models: so many rows are drawn, a cluster is
fitted to them, and all other rows are predicted with the framework's profile on the fitted cluster. Printed
are figures of these other rows, of all draws together, before and after: median, 90th percentile and mean of
the errors, and the share of times within the interval that --calibrate names. A draw depends only on its
number.
"""

import argparse
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from myriad.planner import PublishedRow, TableOptions, fit_cluster, read_table, scaled_cluster
from myriad.planner.validation.prediction_errors import predict_rows
from myriad.recipes.framework import ReadyRecipes


class Draw(NamedTuple):
    """Errors of the rows that were not drawn."""

    before: list[float]
    after: list[float]
    num_within: int
    """Rows within the interval."""


def draw(rows: Sequence[PublishedRow], count: int, number: int) -> Draw:
    """Fit a cluster to the rows of a draw, and predict the others."""
    shuffled = list(rows)
    random.Random(number).shuffle(shuffled)
    fitted, others = fit_cluster(shuffled[:count]), shuffled[count:]
    moved = [replace(one, cluster=scaled_cluster(one.cluster, fitted.factors)) for one in others]
    both = predict_rows(others), predict_rows(moved)
    before, after = ([one.error for one in predicted] for predicted in both)
    width = np.log1p(fitted.interval)
    return Draw(before, after, sum(bool(abs(np.log1p(one)) <= width) for one in after))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=5, help="rows that the cluster is fitted to")
    parser.add_argument("--draws", type=int, default=5, help="draws for each framework")
    given = parser.parse_args()
    table = read_table("iterations.csv", ReadyRecipes(), TableOptions(skip_bad=True))
    groups = defaultdict(list)
    for row in table.rows:
        if not row.has_experts and row.framework != "unknown":
            groups[row.framework, row.cluster.name].append(row)
    names = ("median", "fitted", "p90", "fitted", "bias", "fitted", "held")
    grid = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("framework", "accelerator", "rows", *names):
        grid.add_column(name, no_wrap=True)
    every: list[Draw] = []
    for (framework, accelerator), rows in sorted(groups.items()):
        if len(rows) < given.rows + 5:
            continue
        drawn = [draw(rows, given.rows, number) for number in range(given.draws)]
        every += drawn
        errors = joined(drawn)
        sizes = [np.abs(one) for one in errors]
        figures = [
            *(f"{median(one):.1%}" for one in sizes),
            *(f"{np.quantile(one, 0.9):.1%}" for one in sizes),
            *(f"{np.mean(one):+.1%}" for one in errors),
        ]
        grid.add_row(framework, accelerator, str(len(rows)), *figures, f"{share_within(drawn):.0%}")
    console = Console(width=110)
    console.print(grid)
    before, after = (median(map(abs, errors)) for errors in joined(every))
    console.print(
        f"all: median {before:.1%}, calibrated on {given.rows} rows {after:.1%}; "
        f"within the interval {share_within(every):.0%}"
    )


def joined(drawn: Sequence[Draw]) -> tuple[list[float], list[float]]:
    """Return the errors of all draws, before and after."""
    return [x for one in drawn for x in one.before], [x for one in drawn for x in one.after]


def share_within(drawn: Sequence[Draw]) -> float:
    """Return the share of times within the interval of their draw."""
    return sum(one.num_within for one in drawn) / sum(len(one.after) for one in drawn)


if __name__ == "__main__":
    main()
