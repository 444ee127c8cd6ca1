"""Who is slow: seconds of a phase on every rank over some steps, and how far each is from its peers."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from myriad.dashboard.insight.peers import compare, median_known
from myriad.dashboard.insight.ranks import Ranks
from myriad.dashboard.store.span_store import SpanStore

__all__ = ["Heat", "HeatMap", "StepFigures"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Heat:
    """Of one phase; NaN: not known."""

    seconds: Array
    """Mean of a step, each rank's."""
    z: Array
    peers_seconds: Array
    """The median of each rank's peers."""
    first: int
    last: int

    @property
    def missing(self) -> int:
        """Ranks of which nothing is known."""
        return int(np.isnan(self.seconds).sum())


@dataclass(frozen=True)
class StepFigures:
    """Of one phase, for each step."""

    step: Array
    worst_z: Array
    median: Array


class HeatMap:
    """Asks the store's sums."""

    def __init__(self, store: SpanStore, ranks: Ranks) -> None:
        self._store, self._ranks = store, ranks
        self._figures: dict[tuple[int, int], tuple[int, float, float]] = {}
        """(step, phase) to the state of the step for which worst z and median were computed, and both."""

    def heat(self, phase: str, first: int, last: int) -> Heat:
        """Over steps from first to last."""
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
        scores = compare(seconds[None], self._ranks)
        return Heat(
            seconds.astype(np.float32), scores.z.astype(np.float32), scores.peers_seconds, first, last
        )

    def by_step(self, phase: str) -> StepFigures:
        """Every step that is known: the worst z-score and the median."""
        number = self._store.names.phase_id(phase)
        blocks = [(step, block) for step, block in self._store.blocks(0) if number is not None]
        figures = np.full((len(blocks), 2), np.nan, np.float32)
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
        return StepFigures(np.array([step for step, _ in blocks], np.int32), figures[:, 0], figures[:, 1])

    def _figures_of(self, seconds: Array, number: int) -> tuple[float, float]:
        if number >= len(seconds) or np.isnan(seconds[number]).all():
            return np.nan, np.nan
        z = compare(seconds[number][None].astype(np.float64), self._ranks).z
        return float(np.fmax.reduce(z)), float(median_known(seconds[number]))

    def _forget(self, first: int) -> None:
        if len(self._figures) > 1_000_000:
            self._figures = {key: value for key, value in self._figures.items() if key[0] >= first}
