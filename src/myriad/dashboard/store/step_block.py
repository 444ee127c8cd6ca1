"""The spans of one step in columns, the seconds of each phase on each rank, and the numbers of spans' names.

Columns grow by doubling. Old arrays are replaced, not changed, so that readers may keep using them. Names
and phases have the same numbers in all batches (`NameTable`).
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from myriad.telemetry.span_io.span_records import PHASES, class_of, phase_of

__all__ = ["COLUMNS", "SPAN_BYTES", "Columns", "NameTable", "StepBlock"]

Array = npt.NDArray[Any]
Columns = dict[str, Array]
"""One array for each of `COLUMNS`, all of one length."""

COLUMNS = {
    "start_ns": np.int64,
    "duration": np.float32,
    "rank": np.int32,
    "name": np.int16,
    "stage": np.int16,
    "micro_batch": np.int16,
    "chunk": np.int16,
}
SPAN_BYTES = sum(np.dtype(kind).itemsize for kind in COLUMNS.values())
_FIRST_CAPACITY = 64


class StepBlock:
    """The spans and sums of one step. One thread at a time may write."""

    def __init__(self, world: int, attempt: int) -> None:
        self.attempt, self.world = attempt, world
        self.count, self.changes = 0, 0
        """Number of spans; number of additions."""
        self.first_ns, self.last_ns = np.iinfo(np.int64).max, np.iinfo(np.int64).min
        """First start and last end of all spans."""
        self.seconds = np.full((0, world), np.nan, np.float32)
        """Seconds ``[phase, rank]``; NaN if there are no spans."""
        self.begin_ns, self.end_ns = np.zeros(world, np.int64), np.zeros(world, np.int64)
        """Each rank's first start and last end; 0 if it has no spans."""
        self._columns = {name: np.empty(0, kind) for name, kind in COLUMNS.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of memory of spans and sums."""
        return len(self._columns["rank"]) * SPAN_BYTES + self.sum_bytes

    @property
    def sum_bytes(self) -> int:
        """Bytes of memory of the sums."""
        return self.seconds.nbytes + self.begin_ns.nbytes + self.end_ns.nbytes

    def columns(self) -> Columns:
        """Return the current spans."""
        return {name: column[: self.count] for name, column in self._columns.items()}

    def append(self, spans: Columns) -> None:
        """Add spans. Their sums are added separately, by `add_seconds` and `add_ends`."""
        added = len(spans["rank"])
        if self.count + added > len(self._columns["rank"]):
            self._resize(max(_FIRST_CAPACITY, 2 * self.count, self.count + added))
        for name, column in self._columns.items():
            column[self.count : self.count + added] = spans[name]
        self.count += added

    def add_ends(self, ranks: Array, starts: Array, ends: Array) -> None:
        """Add starts and ends of spans, ordered by rank and start."""
        self.changes += 1
        self.first_ns = min(self.first_ns, int(starts.min()))
        self.last_ns = max(self.last_ns, int(ends.max()))
        edges = np.flatnonzero(np.diff(ranks, prepend=-1))
        present, begins = ranks[edges], starts[edges]
        known = self.begin_ns[present]
        self.begin_ns[present] = np.where((known > 0) & (known < begins), known, begins)
        self.end_ns[present] = np.maximum(self.end_ns[present], np.maximum.reduceat(ends, edges))

    def add_seconds(self, first_rank: int, totals: Array, counts: Array) -> None:
        """Add seconds and counts of spans, ``[phase, rank - first_rank]``."""
        if len(totals) > len(self.seconds):
            more = np.full((len(totals) - len(self.seconds), self.world), np.nan, np.float32)
            self.seconds = np.concatenate([self.seconds, more])
        place = self.seconds[: len(totals), first_rank : first_rank + totals.shape[1]]
        seen = counts > 0
        place[seen] = np.nan_to_num(place[seen]) + totals[seen]

    def trim(self) -> None:
        """Free the unused capacity."""
        if len(self._columns["rank"]) > self.count:
            self._resize(self.count)

    def drop_spans(self) -> None:
        """Drop the spans and keep the sums."""
        self.count = 0
        self._resize(0)

    def _resize(self, capacity: int) -> None:
        for name, old in self._columns.items():
            column = np.empty(capacity, old.dtype)
            column[: self.count] = old[: self.count]
            self._columns[name] = column


_MOST_NAMES, _MOST_PHASES = 1024, 48
_OTHER = "other"
_ORDER = tuple(dict.fromkeys(phase for phase, _ in PHASES.values()))
"""Phases that Myriad records, in the order of a step."""


class NameTable:
    """A table of names up to a limit; further names become "other"."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.phases: list[str] = []
        self._name_ids: dict[str, int] = {}
        self._phase_ids: dict[str, int] = {}
        self._phase_of_name = np.zeros(0, np.int64)
        self._ids: dict[tuple[str, ...], npt.NDArray[np.int16]] = {}
        self._seen: set[int] = set()
        self.computing = np.zeros(0, bool)
        """Whether each name is of class compute."""

    def ids(self, names: tuple[str, ...]) -> npt.NDArray[np.int16]:
        """Return the numbers of a batch's names, in their order."""
        if names not in self._ids:
            if len(self._ids) >= _MOST_NAMES:
                self._ids.clear()
            self._ids[names] = np.array([self._name(name) for name in names], np.int16)
        return self._ids[names]

    def phase_ids(self, name_ids: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return the phase of each of these names."""
        return self._phase_of_name[name_ids]

    def add(self, phase_ids: npt.NDArray[Any]) -> None:
        """Record that spans of these phases exist."""
        self._seen.update(phase_ids.tolist())

    def phase_of(self, name: str) -> str:
        """Return the phase under which spans of a name are summed."""
        return self.phases[int(self._phase_of_name[self._name_ids[name]])]

    def phase_id(self, phase: str) -> int | None:
        """Return the number of a phase; ``None`` if no span of it was seen."""
        return self._phase_ids.get(phase)

    def phases_in_order(self) -> list[str]:
        """Return the phases with spans: Myriad's in the order of a step, then the job's in order of
        arrival."""
        seen = [phase for number, phase in enumerate(self.phases) if number in self._seen]
        return sorted(seen, key=lambda phase: _ORDER.index(phase) if phase in _ORDER else len(_ORDER))

    def _name(self, name: str) -> int:
        if name not in self._name_ids:
            if len(self.names) >= _MOST_NAMES and name != _OTHER:
                return self._name(_OTHER)
            self._name_ids[name] = len(self.names)
            self.names.append(name)
            self._phase_of_name = np.append(self._phase_of_name, self._phase(phase_of(name)))
            self.computing = np.append(self.computing, class_of(name) == "compute")
        return self._name_ids[name]

    def _phase(self, phase: str) -> int:
        if phase not in self._phase_ids:
            if len(self.phases) >= _MOST_PHASES and phase != _OTHER:
                return self._phase(_OTHER)
            self._phase_ids[phase] = len(self.phases)
            self.phases.append(phase)
        return self._phase_ids[phase]
