"""Describe slow ranks, nodes and stages in sentences, with the phase and the first slow step.

`myriad.telemetry.stragglers` detects them, with the same algorithm for the driver. Here each phase is
compared by itself, and only phases without waiting for other ranks: a slow rank waits *less*.
`page_threshold` is lower than the driver's: 5 % and four spreads. A report costs nothing, while the driver
moves work.

`changed_at` finds the step at which a series of ratios changed its level. Among all cuts of the series it
takes the one with the largest difference of means, weighted as in a t-test:

    |mean after - mean before| x sqrt(n before x n after / n)

The cut is a change if the levels differ by more than noise can make the best of many cuts differ.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from myriad.dashboard.insight.phase_table import PhaseTable
from myriad.dashboard.insight.rank_arrays import Array, Ranks
from myriad.telemetry.stragglers import (
    PHASE_NOISE_SECONDS,
    WARM_UP_STEPS,
    WINDOW_STEPS,
    Baseline,
    Comparison,
    SlowRanks,
    StragglerThreshold,
    median_known,
)
from myriad.units import format_ranks

__all__ = ["WORKING", "Straggler", "changed_at", "page_threshold", "stragglers", "suspects"]

WORKING = ("compute", "data", "checkpoint", "garbage")
"""Classes of phases in which a rank does not wait for others."""
_RATIO, _BASELINE_RATIO, _NEARLY_RATIO, _LEAST_Z = 1.05, 1.3, 1.2, 4.0
_LEAST_SHARE = 0.005
"""Minimum loss of a straggler, as a fraction of a step."""
_MOST_FOUND = 200


@dataclass(frozen=True)
class Straggler:
    """A rank, a node or a stage that is slow in one phase."""

    culprit: Literal["rank", "node", "stage"]
    ranks: tuple[int, ...]
    node: int
    stage: int
    """Pipeline place of the ranks; -1 if a node has several."""
    phase: str
    ratio: float
    """Ratio of its time to the peers' time."""
    z: float
    seconds: float
    """Seconds of the phase per step."""
    peers_seconds: float
    since_step: int | None
    """First slow step; ``None`` if all recorded steps are slow."""
    alone: bool = False
    """Whether the ranks have no peers: they are slower than before, unlike other stages."""

    @property
    def lost_seconds(self) -> float:
        """Seconds per step beyond the peers' time."""
        return self.seconds - self.peers_seconds

    @property
    def sentence(self) -> str:
        """Description of the straggler."""
        who = f"rank {self.ranks[0]} on node {self.node}"
        if self.culprit == "node":
            who = f"node {self.node} ({format_ranks(self.ranks)})"
        if self.culprit == "stage":
            who = f"the whole stage {self.stage} ({format_ranks(self.ranks)})"
        than = "its peers"
        if self.alone or self.culprit == "stage":
            than = "before" if self.culprit == "stage" else "before, unlike other stages,"
        slower = f"{self.ratio - 1:.0%} slower than {than}"
        if self.ratio >= 2:
            slower = f"{self.ratio:.1f} times as long as {than}"
        since = "" if self.since_step is None else f" since step {self.since_step}"
        return f"{who} runs {self.phase} {slower}{since}"


def page_threshold(table: PhaseTable) -> StragglerThreshold:
    """Return the conditions under which the page, the terminal and the report name a rank."""
    return StragglerThreshold(
        ratio=_RATIO,
        baseline_ratio=_BASELINE_RATIO,
        nearly_ratio=_NEARLY_RATIO,
        least_z=_LEAST_Z,
        least_seconds=_LEAST_SHARE * table.usual_step_seconds,
    )


def stragglers(
    table: PhaseTable,
    ranks: Ranks,
    work: Array | None = None,
    recent: int = WINDOW_STEPS,
    threshold: StragglerThreshold | None = None,
) -> list[Straggler]:
    """Return the stragglers in the newest ``recent`` steps of a table, most expensive first.

    All steps are searched for the first slow step. ``work`` is the number of micro-batches of each rank, if
    replicas differ. ``threshold`` replaces `page_threshold`.
    """
    threshold = page_threshold(table) if threshold is None else threshold
    found = [
        one
        for phase, kind in zip(table.phases, table.classes, strict=True)
        if kind in WORKING
        for one in _stragglers_of_phase(
            table, ranks, phase, work if kind == "compute" else None, recent, threshold
        )
    ]
    return sorted(found, key=lambda one: -one.lost_seconds)[:_MOST_FOUND]


def suspects(found: Sequence[Straggler]) -> list[Straggler]:
    """Return each rank or node once, with its most expensive phase."""
    return list({one.ranks: one for one in reversed(found)}.values())[::-1]


def _stragglers_of_phase(
    table: PhaseTable,
    ranks: Ranks,
    phase: str,
    work: Array | None,
    recent: int,
    threshold: StragglerThreshold,
) -> Iterator[Straggler]:
    seconds = table.of_phase(phase)
    if not len(seconds):
        return
    baseline = Baseline(ranks.peers)
    if table.classes[table.phases.index(phase)] == "compute":
        baseline.learn((seconds if work is None else seconds / work)[WARM_UP_STEPS:])
    newest = Comparison(seconds[-recent:], ranks.peers, baseline, work, PHASE_NOISE_SECONDS)
    found = newest.stragglers(threshold)[:_MOST_FOUND]
    if found:
        series = Comparison(seconds, ranks.peers, baseline, work, PHASE_NOISE_SECONDS)
        for one in found:
            yield _straggler(one, table, ranks, phase, newest, series)


def _straggler(
    slow: SlowRanks,
    table: PhaseTable,
    ranks: Ranks,
    phase: str,
    newest: Comparison,
    series: Comparison,
) -> Straggler:
    """Describe what the detector has found. The ratio is that since the first slow step."""
    members, ratio = np.array(slow.ranks), slow.ratio
    own_seconds = float(np.median(newest.scores.seconds[members]))
    if slow.kind == "stage":
        course = np.min(series.growth[:, members], axis=1)
    else:
        course = median_known(series.step_ratio[:, members], axis=1)
    cut = changed_at(course, least=(ratio - 1) / 3)
    if cut is not None:
        ratio = float(median_known(course[cut:]))
    usual_seconds = own_seconds / slow.ratio
    if slow.kind != "stage" and not slow.alone:
        usual_seconds = float(np.median(newest.scores.peers_seconds[members]))
    stages = np.unique(ranks.pipeline[members])
    return Straggler(
        slow.kind,
        slow.ranks,
        slow.node,
        int(stages[0]) if len(stages) == 1 else -1,
        phase,
        ratio,
        float(np.median(newest.scores.z[members])),
        ratio * usual_seconds,
        usual_seconds,
        None if cut is None else int(table.steps[cut]),
        slow.alone,
    )


_NOISE = 4.0
"""Least rise, in standard errors."""
_FEWEST = 2
"""Least number of values on either side of a cut."""


def changed_at(values: Array, least: float) -> int | None:
    """Return the index of the first value on the higher level at the end of a series; ``None`` if the level
    never rose. ``least``: least difference of the levels."""
    known = np.flatnonzero(~np.isnan(values))
    series = values[known]
    count = len(series)
    if count < 2 * _FEWEST:
        return None
    cuts = np.arange(_FEWEST, count - _FEWEST + 1)
    sums = np.cumsum(series)
    before = sums[cuts - 1] / cuts
    after = (sums[-1] - sums[cuts - 1]) / (count - cuts)
    weight = np.sqrt(cuts * (count - cuts) / count)
    best = int(np.argmax((after - before) * weight))
    cut, rise = int(cuts[best]), float(after[best] - before[best])
    noise = float(np.median(np.abs(np.diff(series)))) / 0.954
    if rise < least or rise * weight[best] < _NOISE * noise:
        return None
    return int(known[cut])
