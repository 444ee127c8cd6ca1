"""Straggler detection: which ranks, nodes or stages take longer than others that do the same work. Pure.

The driver (`myriad.supervise.policy.straggler_detector`) and the dashboard
(`myriad.dashboard.insight.straggler_report`) both call `Comparison.stragglers`, each with a
`StragglerThreshold` of its own. On the same times and the same threshold they name the same ranks.

Times are arrays ``[step, rank]``: the seconds in which a rank itself works, NaN where unknown. Waiting times
show nothing, because all ranks wait for a slow one. Peers are the ranks of one pipeline stage, which do the
same work:

    stage 0   rank 0  10 ms   rank 2  15 ms   rank 4  10 ms      ratio of rank 2 to its peers: 1.5
    stage 1   rank 1  14 ms   rank 3  14 ms   rank 5  14 ms      equal: this stage has the head

    ratio     median over the steps of (own seconds / median of the peers' seconds in that step)
    z         (ratio - 1) / spread
    spread    max(1.4826 x MAD of the peers' ratios, 1.3 x median change from step to step / sqrt(n), 1.5 %)

Outliers change neither a median nor a MAD (median absolute deviation). The floor of the spread prevents
reports of microseconds in a group of equal ranks. In a stage of fewer than 32 ranks, one rank would change
the median, so each rank is compared with the others only: with those on other nodes if there are any, as a
whole node may be slow.

A stage on a single node may have no peers elsewhere. Its ranks are also compared with their own `Baseline`,
the median of the attempt's first steps. The growth is divided by that of other stages in the same step:

    first     stage 0  10 ms     stage 1  14 ms     stage 2  10 ms
    now       stage 0  11 ms     stage 1  22 ms     stage 2  10 ms      stage 1: 1.57, others 1.05; ratio 1.5

So neither work that grows everywhere nor a slow start of another rank makes a rank a suspect. A rank that is
slow from the start is not found by its baseline. No ratio exceeds the ratio to the rank's own baseline."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

__all__ = [
    "PHASE_NOISE_SECONDS",
    "WARM_UP_STEPS",
    "WINDOW_STEPS",
    "Baseline",
    "Comparison",
    "PeerGroups",
    "PeerScores",
    "SlowRanks",
    "StragglerThreshold",
    "compare",
    "median_known",
]

Array = npt.NDArray[Any]
WINDOW_STEPS = 10
"""Number of steps that a baseline needs, and that the driver and the dashboard compare."""
WARM_UP_STEPS = 2
"""Number of first steps of an attempt that no baseline includes."""
_MANY = 32
"""Number of ranks of a stage from which one rank hardly changes the median."""
_LEAST_SPREAD = 0.015
_MAD_TO_DEVIATION = 1.4826
_CHANGE_TO_ERROR = 1.314
"""Standard error of a median of n values, from their median change from step to step: 1.314 / sqrt(n). A
change of level among the values does not increase it."""
_FEW_VALUES = 4_096
"""Up to this many values, sorting takes less time than `numpy.median`, which the driver would call at every
step."""
_MOST_GATHERED = 4_000_000
"""Most values of peers that are sorted at once."""
PHASE_NOISE_SECONDS = 20e-6
"""A phase of which the peers take less than this in a step is noise."""


@dataclass(frozen=True, kw_only=True)
class StragglerThreshold:
    """The conditions under which a rank counts as slow."""

    ratio: float
    """Least ratio to the peers, as the median over the steps."""
    baseline_ratio: float
    """Least ratio for ranks that are compared with their own baseline, and for whole stages."""
    nearly_ratio: float
    """Below this ratio a rank is not even nearly slow."""
    steady_share: float = 0.0
    """Least share of the steps in which the ratio is at least ``nearly_ratio``."""
    least_z: float = 0.0
    """Least number of spreads between the rank and its peers."""
    least_seconds: float = 0.0
    """Least seconds per step that the rank takes longer."""


@dataclass(frozen=True)
class SlowRanks:
    """A slow rank, a node whose ranks are all slow, or a stage that is slower than before."""

    kind: Literal["rank", "node", "stage"]
    ranks: tuple[int, ...]
    node: int
    """Slow node; -1 for a stage."""
    ratio: float
    """Ratio to the peers, or of a stage to its baseline."""
    alone: bool
    """Whether the ranks have only their own baseline as a reference."""
    seconds: float
    """Seconds per unit of work, median over the steps."""
    usual_seconds: float
    """Seconds that would be usual, by the peers or the baseline."""


@dataclass(frozen=True, eq=False)
class PeerGroups:
    """Which ranks do the same work, and which share a node: arrays by rank."""

    stage: Array
    node: Array

    @cached_property
    def stages(self) -> tuple[Array, ...]:
        """Ranks of each stage, ascending."""
        order = np.argsort(self.stage, kind="stable")
        cuts = np.flatnonzero(np.diff(self.stage[order])) + 1
        return tuple(np.split(order, cuts))

    @cached_property
    def _large(self) -> tuple[Array, ...]:
        return tuple(ranks for ranks in self.stages if len(ranks) >= _MANY)

    @cached_property
    def _small(self) -> tuple[Array, Array]:
        """Ranks of small stages, and their peers ``[rank, peer]``, padded with -1."""
        width = max((len(ranks) for ranks in self.stages if len(ranks) < _MANY), default=1)
        found, tables = [np.zeros(0, np.int64)], [np.zeros((0, width), np.int64)]
        for ranks in self.stages:
            if 1 < len(ranks) < _MANY:
                node = self.node[ranks]
                elsewhere = node[:, None] != node[None, :]
                mask = np.where(elsewhere.any(axis=1)[:, None], elsewhere, ~np.eye(len(ranks), dtype=bool))
                table = np.full((len(ranks), width), -1)
                table[:, : len(ranks)] = np.where(mask, ranks[None, :], -1)
                found.append(ranks)
                tables.append(table)
        return np.concatenate(found), np.concatenate(tables)

    @cached_property
    def isolated(self) -> tuple[tuple[Array, Array], ...]:
        """Ranks of each stage that is on a single node, with the ranks of other stages to compare their
        growth with: those on other nodes, if there are any."""
        found = []
        for ranks in self.stages if len(self.stages) > 1 else ():
            nodes = np.unique(self.node[ranks])
            others = np.flatnonzero(~np.isin(self.node, nodes))
            if len(ranks) == 1 and not len(others):
                others = np.flatnonzero(np.arange(len(self.node)) != ranks[0])
            if len(nodes) == 1 and len(others):
                found.append((ranks, others))
        return tuple(found)

    @cached_property
    def is_isolated(self) -> Array:
        """Whether each rank belongs to a stage on a single node."""
        found = np.zeros(len(self.stage), bool)
        for ranks, _ in self.isolated:
            found[ranks] = True
        return found

    def medians(self, values: Array) -> Array:
        """Return the median of each rank's peers in each step; NaN for ranks without peers."""
        found = np.full(values.shape, np.nan)
        for ranks in self._large:
            found[:, ranks] = median_known(values[:, ranks], axis=1)[:, None]
        ranks, peers = self._small
        if len(ranks):
            padded = np.concatenate([values, np.full((len(values), 1), np.nan)], axis=1)
            at_once = max(1, _MOST_GATHERED // peers.size)
            for first in range(0, len(values), at_once):
                part = slice(first, first + at_once)
                found[part, ranks] = _median_of_last_axis(padded[part][:, peers])
        return found


@dataclass(frozen=True, eq=False)
class PeerScores:
    """Distances of all ranks from their peers; NaN if a rank has no data or no peers."""

    groups: PeerGroups
    ratio: Array
    seconds: Array
    """The rank's seconds per step, median over the steps."""
    peers_seconds: Array
    """Median seconds of the peers, scaled to the rank's work."""
    step_ratio: Array
    """Ratio to the peers in each step, ``[step, rank]``."""

    @cached_property
    def z(self) -> Array:
        """Robust z-score: how much slower the rank is than its peers, in standard deviations of the peers'
        ratios."""
        centre = self.groups.medians(self.ratio[None])[0]
        spread = _MAD_TO_DEVIATION * _peer_deviations(self.ratio, centre, self.groups)
        spread = np.fmax(spread, _LEAST_SPREAD)
        return np.asarray((self.ratio - 1) / np.maximum(spread, _error(self.step_ratio)))


def compare(
    seconds: Array, groups: PeerGroups, work: Array | None = None, noise_seconds: float = 0.0
) -> PeerScores:
    """Compare ``seconds`` of each step and rank with those of the rank's peers.

    They are first divided by ``work``, the relative work of each rank (micro-batches of its replica). Steps
    in which the peers take less than ``noise_seconds`` are left out."""
    per_work = seconds if work is None else seconds / work
    usual = groups.medians(per_work)
    with np.errstate(invalid="ignore", divide="ignore"):
        step_ratio = per_work / usual
        step_ratio[usual < noise_seconds] = np.nan
    peers_seconds = median_known(usual, axis=0)
    return PeerScores(
        groups,
        median_known(step_ratio, axis=0),
        median_known(seconds, axis=0),
        peers_seconds if work is None else peers_seconds * work,
        step_ratio,
    )


def _error(step_ratio: Array) -> Array:
    """Return the standard error of the median ratios, from their changes from step to step."""
    if len(step_ratio) < 2:
        return np.zeros(step_ratio.shape[1])
    changes = median_known(np.abs(np.diff(step_ratio, axis=0)), axis=0)
    return np.nan_to_num(_CHANGE_TO_ERROR * changes / np.sqrt(len(step_ratio)))


def _peer_deviations(ratio: Array, centre: Array, groups: PeerGroups) -> Array:
    """Return the median absolute deviation of the ratios of each rank's peers."""
    found = np.full(ratio.shape, np.nan)
    for ranks in groups._large:
        found[ranks] = median_known(np.abs(ratio[ranks] - centre[ranks[0]]))
    ranks, peers = groups._small
    if len(ranks):
        padded = np.append(ratio, np.nan)
        found[ranks] = _median_of_last_axis(np.abs(padded[peers] - centre[ranks][:, None]))
    return found


class Baseline:
    """The seconds that each rank took in the first steps of an attempt."""

    def __init__(self, groups: PeerGroups, seconds: Array | None = None) -> None:
        """``seconds``: seconds per step of each rank, from an earlier attempt; ``None``: not known."""
        self._groups, self.seconds = groups, None if seconds is None else seconds.copy()

    def learn(self, steps: Array) -> bool:
        """Learn from the times of successive steps, at least `WINDOW_STEPS`; return whether it has changed.

        If isolated ranks are faster in a whole window of steps, their baseline is lowered: they were delayed
        in their first steps."""
        if len(steps) < WINDOW_STEPS:
            return False
        changed = self.seconds is None
        known = median_known(steps[:WINDOW_STEPS], axis=0) if self.seconds is None else self.seconds
        if self._groups.isolated:
            lowest = steps[:WINDOW_STEPS].max(axis=0)
            for first in range(1, len(steps) - WINDOW_STEPS + 1):
                lowest = np.minimum(lowest, steps[first : first + WINDOW_STEPS].max(axis=0))
            lower = self._groups.is_isolated & (lowest < known)
            known, changed = np.where(lower, lowest, known), changed or bool(lower.any())
        self.seconds = known
        return changed

    def ratios(self, steps: Array) -> Array:
        """Return the growth of isolated ranks relative to other stages, ``[step, rank]``; NaN for others."""
        found = np.full(steps.shape, np.nan)
        if self.seconds is None:
            return found
        with np.errstate(invalid="ignore", divide="ignore"):
            growth = steps / self.seconds
            for ranks, others in self._groups.isolated:
                of_others = median_known(growth[:, others], axis=1)[:, None]
                found[:, ranks] = np.minimum(growth[:, ranks], growth[:, ranks] / of_others)
        return found


class Comparison:
    """The times of some steps, compared with the peers and with the baseline."""

    def __init__(
        self,
        seconds: Array,
        groups: PeerGroups,
        baseline: Baseline | None = None,
        work: Array | None = None,
        noise_seconds: float = 0.0,
    ) -> None:
        """See `compare`. ``baseline`` is in seconds per unit of ``work``; ``None``: ranks without peers are
        not compared."""
        self.groups, self._baseline = groups, baseline or Baseline(groups)
        self._seconds = seconds if work is None else seconds / work
        self.scores = compare(seconds, groups, work, noise_seconds)
        self.step_ratio = np.fmax(self.scores.step_ratio, self._baseline.ratios(self._seconds))
        """Ratio to the peers or, if it is higher, to the baseline, ``[step, rank]``; NaN if neither is
        known."""
        self.ratio = median_known(self.step_ratio, axis=0)
        self.usual = median_known(self._seconds, axis=0)
        """Seconds of each rank per unit of work, median over the steps."""

    @property
    def growth(self) -> Array:
        """Ratio of each rank to its own baseline, ``[step, rank]``; NaN if the baseline is not known."""
        before = self._baseline.seconds
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.full(self._seconds.shape, np.nan) if before is None else self._seconds / before

    def is_slow(self, threshold: StragglerThreshold) -> Array:
        """Return which ranks are slow."""
        scores, own = self.scores, self.scores.seconds
        with np.errstate(invalid="ignore", divide="ignore"):
            above = (self.step_ratio >= threshold.nearly_ratio).sum(axis=0)
            by_peers = scores.ratio >= threshold.ratio
            by_peers &= own - scores.peers_seconds >= threshold.least_seconds
            by_baseline = self.groups.is_isolated & (self.ratio >= threshold.baseline_ratio)
            by_baseline &= own - own / self.ratio >= threshold.least_seconds
            if threshold.least_z:
                spread = np.maximum(_error(self.step_ratio), _LEAST_SPREAD)
                by_peers &= scores.z >= threshold.least_z
                by_baseline &= (self.ratio - 1) / spread >= threshold.least_z
        return (above >= threshold.steady_share * len(self.step_ratio)) & (by_peers | by_baseline)

    def stragglers(self, threshold: StragglerThreshold) -> list[SlowRanks]:
        """Return what is slow, the slowest first: nodes whose ranks are all slow, and single ranks. If no
        rank is slow, return the stages that are slower than their baseline."""
        slow = self.is_slow(threshold)
        if not slow.any():
            return list(self._slow_stages(threshold))
        found, named = list[SlowRanks](), set[int]()
        ranks = np.flatnonzero(slow)
        for rank in ranks[np.argsort(-self.ratio[ranks], kind="stable")].tolist():
            if rank in named:
                continue
            node = int(self.groups.node[rank])
            members = np.flatnonzero(self.groups.node == node)
            whole = len(members) > 1 and bool(slow[members].all())
            members = members if whole else np.array([rank])
            named.update(members.tolist())
            found.append(self._slow_ranks("node" if whole else "rank", members, node))
        return found

    def _slow_ranks(self, kind: Literal["rank", "node"], ranks: Array, node: int) -> SlowRanks:
        ratio, seconds = float(np.median(self.ratio[ranks])), float(np.median(self.usual[ranks]))
        alone = bool(self.groups.is_isolated[ranks].all())
        return SlowRanks(kind, tuple(ranks.tolist()), node, ratio, alone, seconds, seconds / ratio)

    def _slow_stages(self, threshold: StragglerThreshold) -> Iterator[SlowRanks]:
        """Yield the stages whose ranks all take longer than their baseline, while none is nearly slow."""
        before, newest = self._baseline.seconds, self._seconds[-1:]
        if before is None or not len(newest):
            return
        with np.errstate(invalid="ignore", divide="ignore"):
            grows, ratio = newest[0] >= before, self.usual / before
            by_itself = self.groups.is_isolated & (self.ratio >= threshold.nearly_ratio)
        for ranks in self.groups.stages:
            least = float(ratio[ranks].min())
            if grows[ranks].all() and least >= threshold.baseline_ratio and not by_itself[ranks].any():
                seconds, usual = (float(np.median(values[ranks])) for values in (self.usual, before))
                yield SlowRanks("stage", tuple(ranks.tolist()), -1, least, False, seconds, usual)


def median_known(values: Array, axis: int | None = None) -> Array:
    """Return the median without NaN values; NaN, without a warning, if there are no others."""
    along = values.ravel() if axis is None else np.moveaxis(values, axis, -1)
    if values.size <= _FEW_VALUES or np.isnan(values).any():
        return _median_of_last_axis(along)
    return np.asarray(np.median(along, axis=-1))


def _median_of_last_axis(values: Array) -> Array:
    """Return the median along the last axis without NaN values; NaN if there are no others."""
    length = values.shape[-1]
    if not length:
        return np.full(values.shape[:-1], np.nan)
    ordered = np.sort(values, axis=-1)  # NaN values come last
    missing = np.isnan(ordered[..., -1])
    if not missing.any():
        return np.asarray((ordered[..., (length - 1) // 2] + ordered[..., length // 2]) / 2)
    count = np.sum(~np.isnan(ordered), axis=-1, keepdims=True)
    ends = (np.maximum(count - 1, 0) // 2, np.minimum(count // 2, length - 1))
    low, high = (np.take_along_axis(ordered, end, axis=-1)[..., 0] for end in ends)
    return np.asarray((low + high) / 2)
