"""The figures of a run's steps as arrays, and few enough of them for a chart.

A chart of a million steps shows two thousand. Steps are split into stretches of equal length; of each the
lowest and the highest loss, the longest step and one whose loss is no number are kept: a spike of one step,
or one NaN, is seen however long the run is.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from myriad.jsonl import Record
from myriad.run_lines import Peaks

__all__ = ["COLUMNS", "Curves"]

COLUMNS = ("step", "time", "loss", "tokens_per_second", "mfu", "step_seconds")
_KEPT_PER_STRETCH = 5


class Curves:
    """The figures of one run by step, as arrays; NaN where a line has no number."""

    def __init__(self) -> None:
        self._columns = {name: array("d") for name in COLUMNS}

    def add(self, lines: Iterable[Record]) -> None:
        """Lines of `StepLines.poll`. One of a step that is here already replaces it and all later ones."""
        steps = self._columns["step"]
        for line in lines:
            step = line["step"]
            if steps and steps[-1] >= step:
                end = bisect_left(steps, step)
                for column in self._columns.values():
                    del column[end:]
            for name, column in self._columns.items():
                value = line.get(name)
                column.append(float("nan") if value is None else value)

    def thinned(self, points: int, peaks: Peaks) -> dict[str, list[float | None]]:
        """Return about ``points`` steps at most, with the first and the last, and their MFU by ``peaks``."""
        # Another thread may add a step meanwhile, or take some away: all columns end where the shortest does.
        copies = {name: np.array(column) for name, column in self._columns.items()}
        length = min(map(len, copies.values()))
        places = _places({name: column[:length] for name, column in copies.items()}, length, points)
        found = {name: column[places].tolist() for name, column in copies.items()}
        lines = (dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True))
        return found | {"mfu": [peaks.mfu(line) for line in lines]}


def _places(columns: dict[str, npt.NDArray[np.float64]], length: int, points: int) -> npt.NDArray[np.int64]:
    if length <= points:
        return np.arange(length)
    stretches = max(1, (points - 2) // _KEPT_PER_STRETCH)
    size = -(-length // stretches)
    stretches = -(-length // size)

    def split(values: npt.NDArray[np.float64], filler: float) -> npt.NDArray[np.float64]:
        known = np.where(np.isfinite(values), values, filler)
        return np.pad(known, (0, stretches * size - length), constant_values=filler).reshape(stretches, size)

    loss, seconds = columns["loss"], columns["step_seconds"]
    begins = np.arange(stretches) * size
    kept = [
        split(loss, np.inf).argmin(axis=1),
        split(loss, -np.inf).argmax(axis=1),
        split(seconds, -np.inf).argmax(axis=1),
        split(np.where(np.isfinite(loss), 0.0, 1.0), -1.0).argmax(axis=1),
    ]
    found = np.concatenate([begins, *(begins + places for places in kept), [0, length - 1]])
    return np.unique(np.minimum(found, length - 1))
