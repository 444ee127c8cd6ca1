"""Predicted against measured iterations, layout by layout, on real processes of this machine.

    python benchmarks/planner/rehearsal.py [--links loopback 1gbit 200mbit] [--rounds 3] [--steps 3]
                                   [--cluster FILE] [--kept FILE] [--svg docs/images/rehearsal.svg]

The machine is measured first (as `myriad plan --measure` does), or read from ``--cluster``; the planner sees
that file, the job and the rate of the links, and no time of any layout. Then every layout of
`rehearsal_cases.py` trains for a few steps on real ranks, in turns. Virtual cores drift by a third within
minutes: around each visit one block is timed on all of them at once, and the prediction is made for
cores of that speed.

Aims: rank correlation (Spearman) at least 0.9, median error at most 10 %. A visit in which other work took
more than a few percent of the cores is repeated (`quiet.py`); what was never visited in quiet is marked.
``--kept`` goes on from what an earlier run has measured.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from myriad.cli.measured_cluster import measure_to_file
from myriad.data.corpus_cache import prepare_embedded
from myriad.planner.cluster_config import Cluster
from myriad.recipes import read_recipe
from rehearsal_cases import CASES, LOOPBACK, MODEL, Measured, Rehearsal, read, write
from rehearsal_chart import Dot, dots_svg
from rehearsal_predict import measure_way, predicted_seconds

PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class Line:
    """One layout over one kind of link."""

    measured: Measured
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured.seconds - 1


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Correlation of ranks; no two values are equal."""
    ranks = [np.argsort(np.argsort(values)) for values in (one, other)]
    return float(np.corrcoef(*ranks)[0, 1])


def lines_of(found: Sequence[Measured], machine: Cluster) -> list[Line]:
    """With what is predicted for each."""
    jobs = {case.name: case.job for case in CASES}
    ways = {link: measure_way(link) for link in sorted({one.links for one in found})}
    return [Line(one, predicted_seconds(jobs[one.case], machine, ways[one.links], one.pace)) for one in found]


def table(lines: Sequence[Line]) -> str:
    """Return a table of all layouts with their summary."""
    words = [
        "| layout | ranks over | measured, ms (least to most) | predicted, ms | error |",
        "|---|---|---|---|---|",
    ]
    for line in lines:
        one = line.measured
        times = f"{1e3 * one.seconds:.0f} ({1e3 * min(one.visits):.0f} to {1e3 * max(one.visits):.0f})"
        mark = "" if one.num_quiet else " (not in quiet)"
        words.append(
            f"| {one.case} | {one.links} | {times}{mark} | {1e3 * line.predicted:.0f} | {line.error:+.1%} |"
        )
    links = list(dict.fromkeys(line.measured.links for line in lines))
    groups = [(link, [line for line in lines if line.measured.links == link]) for link in links]
    if len(groups) > 1:
        groups.append(("all", list(lines)))
    return "\n".join([*words, "", *(f"{name}: {summary(group)}" for name, group in groups)])


def summary(lines: Sequence[Line]) -> str:
    """Rank correlation and errors."""
    if len(lines) < 2:
        return f"{len(lines)} layouts"
    correlation = spearman([line.measured.seconds for line in lines], [line.predicted for line in lines])
    errors = [abs(line.error) for line in lines]
    return (
        f"{len(lines)} layouts, rank correlation {correlation:.3f}, "
        f"median error {statistics.median(errors):.1%}, mean {statistics.mean(errors):.1%}, "
        f"worst {max(errors):.1%}"
    )


def _machine(path: Path | None) -> Cluster:
    if path is None:
        return measure_to_file()[0]
    return Cluster.model_validate(read_recipe("clusters", str(path), "--cluster")).check()


def _measure(options: argparse.Namespace) -> list[Measured]:
    found = read(options.kept) if options.kept else []
    rehearsal = Rehearsal(found, options.steps, PATIENCE_SECONDS)
    for link in options.links:
        # tensor parallelism over slow links takes half a minute for an iteration
        cases = [case for case in CASES if link in (LOOPBACK, "1gbit") or "tp" not in case.name]
        for one in rehearsal.visit_all(cases, [link], options.rounds):
            if options.kept:
                write(options.kept, rehearsal.found.values())
            if sys.stderr.isatty():
                print(f"\r\033[K{one.case}, {one.links}", end="", file=sys.stderr, flush=True)
    return [one for one in rehearsal.found.values() if one.links in options.links]


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted against measured iterations on this machine.")
    parser.add_argument("--links", nargs="+", default=[LOOPBACK, "1gbit", "200mbit"])
    parser.add_argument("--rounds", type=int, default=3, help="quiet visits to each layout; 0: none")
    parser.add_argument("--steps", type=int, default=3, help="counted iterations of a visit")
    parser.add_argument("--cluster", type=Path, help="the machine as measured before; off: measures it")
    parser.add_argument("--kept", type=Path, help="file of what was measured, to go on from")
    parser.add_argument("--svg", type=Path, help="where to draw the chart")
    options = parser.parse_args()
    machine = _machine(options.cluster)
    prepare_embedded(vocabulary=int(str(MODEL["data.vocabulary"])))
    lines = lines_of(_measure(options), machine)
    print(table(lines))
    if options.svg:
        dots = [Dot(x.measured.case, x.measured.links, x.measured.seconds, x.predicted) for x in lines]
        options.svg.write_text(dots_svg("An iteration, predicted and measured", "s", dots))


if __name__ == "__main__":
    main()
