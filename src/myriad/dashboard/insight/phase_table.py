"""The table of seconds by step, rank and phase, with which the heat map and all analyses start.

    own       time in spans of the phase, without spans inside of them: a second counts once
    total     with them
    wall      from the first span of a step to the first of the next one; of the last step to its last end
    idle      wall less all own times: nothing was recorded

Arrays are ``[step, rank, phase]``; a rank without spans in a step is not ``seen`` in it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from myriad.dashboard.insight.nesting import Nested, nested
from myriad.dashboard.insight.rank_arrays import Array
from myriad.telemetry.span_io.span_records import CLASSES, PHASES, Records, class_of, phase_of

__all__ = ["PhaseTable", "phase_table", "table_of"]

_EVALUATION = "evaluate"
_MOST_PHASES = 48
"""Maximum number of phases; the rest are merged."""


@dataclass(frozen=True)
class PhaseTable:
    """Seconds by step, rank and phase for all ranks."""

    steps: Array
    """Numbers of the steps in the table, ascending."""
    phases: tuple[str, ...]
    classes: tuple[str, ...]
    """Class of each phase, one of `CLASSES`."""
    own_seconds: Array
    total_seconds: Array
    count: Array
    """``[step, rank, phase]``: number of spans in the phase."""
    begin_ns: Array
    """``[step, rank]``: first start."""
    until_ns: Array
    """First start of the next step; for the last step its last end."""

    @property
    def world(self) -> int:
        """Number of ranks that the table has columns for."""
        return self.own_seconds.shape[1]

    @cached_property
    def seen(self) -> Array:
        """Whether a rank has spans in a step, ``[step, rank]``."""
        return np.asarray(self.count.any(axis=2))

    @cached_property
    def wall_seconds(self) -> Array:
        """``[step, rank]``; NaN where nothing was seen."""
        return np.where(self.seen, (self.until_ns - self.begin_ns) * 1e-9, np.nan)

    @cached_property
    def idle_seconds(self) -> Array:
        """``[step, rank]``; NaN where nothing was seen."""
        return self.wall_seconds - self.own_seconds.sum(axis=2)

    @cached_property
    def step_seconds(self) -> Array:
        """Seconds of each step: the median over its ranks."""
        return np.array([np.median(walls[~np.isnan(walls)]) for walls in self.wall_seconds])

    @property
    def usual_step_seconds(self) -> float:
        """Median seconds of the steps; NaN if there are none."""
        return float(np.median(self.step_seconds)) if len(self.steps) else np.nan

    def of_phase(self, phase: str) -> Array:
        """Own seconds ``[step, rank]``; NaN where the rank was not seen, or there is no such phase."""
        if phase not in self.phases:
            return np.full(self.seen.shape, np.nan)
        return np.where(self.seen, self.own_seconds[:, :, self.phases.index(phase)], np.nan)

    def by_class(self) -> Mapping[str, Array]:
        """Own seconds ``[step, rank]`` of every class; what was not recorded is in "other"."""
        found = {name: np.zeros(self.seen.shape) for name in CLASSES}
        for at, name in enumerate(self.classes):
            found[name] += self.own_seconds[:, :, at]
        found["other"] += np.where(self.seen, self.idle_seconds, 0.0)
        return found

    def window(self, first: int, last: int) -> "PhaseTable":
        """Return the steps from ``first`` to ``last``, inclusive."""
        return self.of_steps((self.steps >= first) & (self.steps <= last))

    def of_steps(self, keep: Array) -> "PhaseTable":
        """Return the steps where ``keep`` is true."""
        arrays = (self.own_seconds, self.total_seconds, self.count, self.begin_ns, self.until_ns)
        return PhaseTable(self.steps[keep], self.phases, self.classes, *(array[keep] for array in arrays))


def phase_table(records: Records, names: Sequence[str], world: int) -> PhaseTable:
    """Return the table of records in any order. Spans without a step (-1) or of ranks >= ``world`` are
    skipped."""
    known = (records["step"] >= 0) & (records["rank"] < world)
    return table_of(nested(records if known.all() else records[known]), names, world)


def table_of(spans: Nested, names: Sequence[str], world: int) -> PhaseTable:
    """Return the table of nested spans."""
    every = dict.fromkeys(phase_of(name) for name in sorted(names, key=lambda name: name not in PHASES))
    phases = (*list(every)[:_MOST_PHASES], *(["other"] if len(every) > _MOST_PHASES else []))
    classes = {phase_of(name): class_of(name) for name in names} | {"other": "other"}
    places = {phase: at for at, phase in enumerate(phases)}
    phase_at = np.array([places.get(phase_of(name), len(phases) - 1) for name in names], dtype=np.int64)
    records = spans.records
    steps, step_at = _places(records["step"])
    shape = (len(steps), world, len(phases))
    cell = step_at * world + records["rank"]
    place = cell * len(phases) + phase_at[_counted_as(spans, names)] if len(records) else cell
    size = int(np.prod(shape))
    own, total = (np.bincount(place, of, size).reshape(shape) * 1e-9 for of in (spans.own, spans.total))
    count = np.bincount(place, minlength=size).reshape(shape)
    begin, end = _ends(spans, cell, len(steps), world)
    kinds = tuple(classes[phase] for phase in phases)
    return PhaseTable(steps, phases, kinds, own, total, count, begin, _until(steps, begin, end))


def _until(steps: Array, begin: Array, end: Array) -> Array:
    """Return the end of each step on each rank."""
    until = end.copy()
    follows = (begin[1:] > 0) & (np.diff(steps) == 1)[:, None]
    until[:-1] = np.where(follows, np.maximum(begin[1:], end[:-1]), end[:-1])
    return until


def _counted_as(spans: Nested, names: Sequence[str]) -> Array:
    """Return the name under which each span counts. Spans inside an evaluation count as evaluation."""
    name = spans.records["name"]
    whole = [code for code, of in enumerate(names) if of == _EVALUATION]
    if not whole or not (name == whole[0]).any():
        return name
    name = name.copy()
    inner = np.flatnonzero(spans.parent >= 0)
    while len(inner := inner[(name[spans.parent[inner]] == whole[0]) & (name[inner] != whole[0])]):
        name[inner] = whole[0]
        inner = np.flatnonzero(spans.parent >= 0)
    return name


def _places(step: Array) -> tuple[Array, Array]:
    """Return the distinct steps, ascending, and the index of each record's step."""
    if len(step) == 0:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    first = int(step.min())
    if int(step.max()) - first > 2**24:
        steps, at = np.unique(step, return_inverse=True)
        return steps.astype(np.int64), at
    there = np.bincount(step - first) > 0
    return np.flatnonzero(there) + first, (np.cumsum(there) - 1)[step - first]


def _ends(spans: Nested, cell: Array, num_steps: int, world: int) -> tuple[Array, Array]:
    """Return first start and last end ``[step, rank]``; 0 without spans."""
    begin = np.zeros(num_steps * world, dtype=np.int64)
    end = begin.copy()
    outer = np.flatnonzero(spans.parent < 0)
    if len(outer):
        cells = cell[outer]
        # Spans of a rank are in order, and those of a step follow each other.
        first = np.flatnonzero(np.concatenate([[True], cells[1:] != cells[:-1]]))
        last = np.concatenate([first[1:], [len(cells)]]) - 1
        begin[cells[first[::-1]]] = spans.start[outer[first[::-1]]]
        end[cells[last]] = spans.end[outer[last]]
    return begin.reshape(num_steps, world), end.reshape(num_steps, world)
