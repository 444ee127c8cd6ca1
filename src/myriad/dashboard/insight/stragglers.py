"""Who is slow, in which phase, and since when, as a sentence.

Only phases in which a rank works by itself are judged: whoever waits, waits for somebody else (a slow rank
waits *less*). A rank is slow where it takes at least 5 % longer than its peers do, and that is at least four
spreads of theirs (`peers`). If all ranks of a node that have peers are slow in a phase, it is the node.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from myriad.dashboard.insight.change import changed_at
from myriad.dashboard.insight.peers import Scores, compare, median_known
from myriad.dashboard.insight.phase_table import PhaseTable
from myriad.dashboard.insight.ranks import Array, Ranks
from myriad.units import format_ranks

__all__ = ["WORKING", "Straggler", "culprits", "stragglers"]

WORKING = ("compute", "data", "checkpoint", "garbage")
"""Classes of phases in which a rank does not wait for others."""
_RATIO, _Z = 1.05, 4.0
_LEAST_SHARE = 0.005
"""Of a step, that must be lost."""
_MOST_TOLD = 200


@dataclass(frozen=True)
class Straggler:
    """A rank or a node that is slow in one phase."""

    culprit: Literal["rank", "node"]
    ranks: tuple[int, ...]
    node: int
    stage: int
    """Its place in the pipeline; -1: a node of several."""
    phase: str
    ratio: float
    """To its peers."""
    z: float
    seconds: float
    """Of a step."""
    peers_seconds: float
    since_step: int | None
    """First step in which it was slow; ``None``: in all that were seen."""

    @property
    def lost_seconds(self) -> float:
        """Of each step, more than its peers take."""
        return self.seconds - self.peers_seconds

    @property
    def sentence(self) -> str:
        """For people."""
        who = f"rank {self.ranks[0]} on node {self.node}"
        if self.culprit == "node":
            who = f"node {self.node} ({format_ranks(self.ranks)})"
        slower = f"{self.ratio - 1:.0%} slower than its peers"
        if self.ratio >= 2:
            slower = f"{self.ratio:.1f} times as long as its peers"
        since = "" if self.since_step is None else f" since step {self.since_step}"
        return f"{who} runs {self.phase} {slower}{since}"


def stragglers(
    table: PhaseTable, ranks: Ranks, work: Array | None = None, recent: int = 10
) -> list[Straggler]:
    """In the newest ``recent`` steps of a table, the costliest first; since when, in all of them. ``work``:
    micro-batches of each rank, where replicas have different shares."""
    found = [
        one
        for phase, kind in zip(table.phases, table.classes, strict=True)
        if kind in WORKING
        for one in _of_phase(table, ranks, phase, work if kind == "compute" else None, recent)
    ]
    return sorted(found, key=lambda one: -one.lost_seconds)[:_MOST_TOLD]


def culprits(found: Sequence[Straggler]) -> list[Straggler]:
    """Each rank or node once, with the phase that costs most."""
    return list({one.ranks: one for one in reversed(found)}.values())[::-1]


def _of_phase(
    table: PhaseTable, ranks: Ranks, phase: str, work: Array | None, recent: int
) -> Iterator[Straggler]:
    seconds = table.of_phase(phase)
    if not len(seconds):
        return
    scores = compare(seconds[-recent:], ranks, work)
    with np.errstate(invalid="ignore"):
        slow = (scores.z >= _Z) & (scores.ratio >= _RATIO)
        slow &= (scores.seconds - scores.peers_seconds) >= _LEAST_SHARE * table.usual_step_seconds
    if not slow.any():
        return
    series = compare(seconds, ranks, work).step_ratio
    judged = ~np.isnan(scores.z)
    told = np.zeros(ranks.world, dtype=bool)
    for node in np.unique(ranks.node[slow]):
        members = np.flatnonzero((ranks.node == node) & judged)
        elsewhere = judged & (ranks.node != node)
        if len(members) > 1 and slow[members].all() and elsewhere.any():
            told[members] = True
            yield _told("node", members, table, ranks, phase, scores, series)
    for rank in np.flatnonzero(slow & ~told)[:_MOST_TOLD]:
        yield _told("rank", np.array([rank]), table, ranks, phase, scores, series)


def _told(
    culprit: Literal["rank", "node"],
    members: Array,
    table: PhaseTable,
    ranks: Ranks,
    phase: str,
    scores: Scores,
    series: Array,
) -> Straggler:
    ratio = float(np.median(scores.ratio[members]))
    course = median_known(series[:, members], axis=1)
    cut = changed_at(course, least=(ratio - 1) / 3)
    if cut is not None:
        ratio = float(median_known(course[cut:]))
    peers_seconds = float(np.median(scores.peers_seconds[members]))
    stages = np.unique(ranks.pipeline[members])
    return Straggler(
        culprit,
        tuple(int(rank) for rank in members),
        int(ranks.node[members[0]]),
        int(stages[0]) if len(stages) == 1 else -1,
        phase,
        ratio,
        float(np.median(scores.z[members])),
        ratio * peers_seconds,
        peers_seconds,
        None if cut is None else int(table.steps[cut]),
    )
