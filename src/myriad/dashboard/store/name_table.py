"""Number the names of spans and their phases, with the same numbers for all batches."""

from typing import Any

import numpy as np
import numpy.typing as npt

from myriad.telemetry.span_io.span_records import PHASES, class_of, phase_of

__all__ = ["NameTable"]

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
