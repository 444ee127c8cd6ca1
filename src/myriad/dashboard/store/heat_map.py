"""The store's sums by step, rank and phase: for the heat map, with each rank's distance from its peers, and
as the `PhaseTable` that the analyses start with. No span is read."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from myriad.dashboard.insight.phase_table import PhaseTable
from myriad.dashboard.insight.rank_arrays import Ranks
from myriad.dashboard.store.span_store import SpanStore
from myriad.telemetry.span_io.span_records import class_of
from myriad.telemetry.stragglers import PHASE_NOISE_SECONDS, compare, median_known

__all__ = ["Heat", "HeatMap", "StepFigures", "newest_table"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Heat:
    """The times of one phase on all ranks; NaN if unknown."""

    seconds: Array
    """Mean seconds per step of each rank."""
    z: Array
    peers_seconds: Array
    """Median seconds of each rank's peers."""
    first: int
    last: int

    @property
    def deviation(self) -> Array:
        """Seconds of each rank beyond those of its peers, as a share of theirs."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(self.seconds / self.peers_seconds - 1, np.float32)

    @property
    def missing(self) -> int:
        """Number of ranks without data."""
        return int(np.isnan(self.seconds).sum())


@dataclass(frozen=True)
class StepFigures:
    """The times of one phase by step."""

    step: Array
    worst_z: Array
    worst_deviation: Array
    median: Array


class HeatMap:
    """Computes times and distances from the store's sums."""

    def __init__(self, store: SpanStore, ranks: Ranks) -> None:
        self._store, self._ranks = store, ranks
        self._figures: dict[tuple[int, int], tuple[int, float, float, float]] = {}
        """(step, phase) to the state of the step for which the figures were computed, and the figures."""

    def heat(self, phase: str, first: int, last: int) -> Heat:
        """Return the times of a phase over the steps from ``first`` to ``last``."""
        number, world = self._store.names.phase_id(phase), self._store.world
        total, seen = np.zeros(world), np.zeros(world)
        for _, block in self._store.blocks(max(first, 0), last):
            if number is not None and number < len(block.seconds):
                row = block.seconds[number]
                known = row == row
                np.add(total, row, out=total, where=known)
                seen += known
        with np.errstate(invalid="ignore", divide="ignore"):
            seconds = total / seen
        scores = compare(seconds[None], self._ranks.peers, noise_seconds=PHASE_NOISE_SECONDS)
        return Heat(
            seconds.astype(np.float32), scores.z.astype(np.float32), scores.peers_seconds, first, last
        )

    def by_step(self, phase: str) -> StepFigures:
        """Return the worst z-score and the median of a phase, for every known step."""
        number = self._store.names.phase_id(phase)
        blocks = [(step, block) for step, block in self._store.blocks(0) if number is not None]
        figures = np.full((len(blocks), 3), np.nan, np.float32)
        for place, (step, block) in enumerate(blocks):
            key = (step, number or 0)
            known = self._figures.get(key)
            if known is None or known[0] != id(block) + block.changes:
                known = self._figures[key] = (
                    id(block) + block.changes,
                    *self._figures_of(block.seconds, number or 0),
                )
            figures[place] = known[1:]
        self._forget(blocks[0][0] if blocks else 0)
        return StepFigures(np.array([step for step, _ in blocks], np.int32), *figures.T)

    def _figures_of(self, seconds: Array, number: int) -> tuple[float, float, float]:
        if number >= len(seconds) or np.isnan(seconds[number]).all():
            return np.nan, np.nan, np.nan
        step = seconds[number][None].astype(np.float64)
        scores = compare(step, self._ranks.peers, noise_seconds=PHASE_NOISE_SECONDS)
        with np.errstate(invalid="ignore", divide="ignore"):
            worst = np.fmax.reduce(step[0] / scores.peers_seconds - 1)
        return float(np.fmax.reduce(scores.z)), float(worst), float(median_known(seconds[number]))

    def _forget(self, first: int) -> None:
        if len(self._figures) > 1_000_000:
            self._figures = {key: value for key, value in self._figures.items() if key[0] >= first}


_MOST_CELLS = 8_000_000


def newest_table(store: SpanStore, last: int | None, most_steps: int = 1000) -> PhaseTable | None:
    """Return the table of the newest steps up to ``last``; fewer steps for more ranks. ``None`` if there are
    none."""
    phases = tuple(store.names.phases)
    most = min(most_steps, max(2, _MOST_CELLS // (store.world * max(1, len(phases)))))
    blocks = store.blocks(0, last)[-most:]
    if not blocks or not phases:
        return None
    steps = np.array([step for step, _ in blocks])
    own = np.full((len(blocks), store.world, len(phases)), np.nan, np.float32)
    for place, (_, block) in enumerate(blocks):
        seconds = block.seconds
        own[place, :, : len(seconds)] = seconds.T
    begin = np.stack([block.begin_ns for _, block in blocks])
    end = np.stack([block.end_ns for _, block in blocks])
    classes = {store.names.phase_of(name): class_of(name) for name in store.names.names}
    known = np.isfinite(own)
    own = np.nan_to_num(own)
    kinds = tuple(classes[phase] for phase in phases)
    return PhaseTable(steps, phases, kinds, own, own, known, begin, _until(steps, begin, end))


def _until(steps: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return the end of each step on each rank: the begin of its next step, if that follows."""
    until = end.copy()
    follows = (begin[1:] > 0) & (np.diff(steps) == 1)[:, None]
    until[:-1] = np.where(follows, np.maximum(begin[1:], end[:-1]), end[:-1])
    return until
