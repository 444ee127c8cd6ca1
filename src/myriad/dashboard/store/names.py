"""Names of spans and their phases as numbers, the same over all batches."""

from typing import Any

import numpy as np
import numpy.typing as npt

from myriad.telemetry.records import PHASES, class_of, phase_of

__all__ = ["NameTable"]

_MOST_NAMES, _MOST_PHASES = 1024, 48
_OTHER = "other"
_ORDER = tuple(dict.fromkeys(phase for phase, _ in PHASES.values()))
"""Phases that a rank has by itself, as a step goes."""


class NameTable:
    """Grows as names are seen, up to a bound: what comes then is "other"."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.phases: list[str] = []
        self._name_ids: dict[str, int] = {}
        self._phase_ids: dict[str, int] = {}
        self._phase_of_name = np.zeros(0, np.int64)
        self._ids: dict[tuple[str, ...], npt.NDArray[np.int16]] = {}
        self._seen: set[int] = set()
        self.computing = np.zeros(0, bool)
        """Of each name."""

    def ids(self, names: tuple[str, ...]) -> npt.NDArray[np.int16]:
        """Of a batch's names, in their order."""
        if names not in self._ids:
            if len(self._ids) >= _MOST_NAMES:
                self._ids.clear()
            self._ids[names] = np.array([self._name(name) for name in names], np.int16)
        return self._ids[names]

    def phase_ids(self, name_ids: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """The phase of each of these names."""
        return self._phase_of_name[name_ids]

    def see(self, phase_ids: npt.NDArray[Any]) -> None:
        """There were spans of these phases."""
        self._seen.update(phase_ids.tolist())

    def phase_of(self, name: str) -> str:
        """As it is summed here."""
        return self.phases[int(self._phase_of_name[self._name_ids[name]])]

    def phase_id(self, phase: str) -> int | None:
        """``None``: no span of it was seen."""
        return self._phase_ids.get(phase)

    def phases_in_order(self) -> list[str]:
        """Those that were seen: a rank's own as a step goes, then the job's as they came."""
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
