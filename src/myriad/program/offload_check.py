"""Static check of one rank's copies to and from host memory.

What a stage keeps of a micro-batch, and its optimizer state, is in one of four places: on the device, leaving
it, on the host, or coming back. Nothing is used while it is not on the device, each copy is waited for, and
no more stages have their optimizer state on the device than the program promises.
`myriad.program.checker` walks the rank's list and calls this module.
"""

from collections.abc import Sequence
from enum import Enum, auto

from myriad.program.actions import SEMANTICS, Action, Copy, Kind, Program, Resource

__all__ = ["Copies"]


class _Place(Enum):
    DEVICE = auto()
    LEAVING = auto()
    HOST = auto()
    COMING = auto()


_OF_STATE = (Copy.OFFLOAD_STATE, Copy.FETCH_STATE)


class Copies:
    """The copies of one rank between two actions. A ``..._fault`` method returns what is wrong, or None."""

    def __init__(self, program: Program, stages: Sequence[int]) -> None:
        lowering = program.lowering
        self._most_states = 0 if lowering is None else lowering.states_on_device
        on_host = frozenset[int]() if lowering is None else lowering.states_on_host
        self._activations: dict[tuple[int, int], _Place] = {}
        self._rests = {stage: _Place.HOST if stage in on_host else _Place.DEVICE for stage in stages}
        self._states = dict(self._rests)

    def fault(self, action: Action) -> str | None:
        """Check an action that starts or awaits a copy, and record it."""
        does = SEMANTICS[action.kind]
        copy = does.starts_copy or does.ends_copy
        assert copy is not None
        place = self._place(action, copy)
        if place is None:
            return "copies what the rank does not hold"
        begin, flying, end = (
            (_Place.DEVICE, _Place.LEAVING, _Place.HOST)
            if copy.is_to_host
            else (_Place.HOST, _Place.COMING, _Place.DEVICE)
        )
        needed, then = (begin, flying) if does.starts_copy else (flying, end)
        if place is not needed:
            return f"its data is {place.name.lower()}, not {needed.name.lower()}"
        if copy in _OF_STATE:
            self._states[action.stage] = then
            return self._bound_fault()
        self._activations[action.stage, action.micro_batch] = then
        return None

    def _place(self, action: Action, copy: Copy) -> _Place | None:
        if copy in _OF_STATE:
            return self._states[action.stage] if self._rests.get(action.stage) is _Place.HOST else None
        return self._activations.get((action.stage, action.micro_batch))

    def _bound_fault(self) -> str | None:
        moving = (stage for stage, rests in self._rests.items() if rests is _Place.HOST)
        held = sum(self._states[stage] is not _Place.HOST for stage in moving)
        if held <= self._most_states:
            return None
        return f"optimizer state of {held} stages is on the device, more than {self._most_states}"

    def compute_fault(self, action: Action) -> str | None:
        """Check that a backward finds its activations on the device, and record what a compute action keeps
        and drops."""
        where, does = (action.stage, action.micro_batch), SEMANTICS[action.kind]
        if Resource.ACTIVATIONS in does.frees and self._activations.pop(where, None) is not _Place.DEVICE:
            return "its activations are not on the device"
        if Resource.ACTIVATIONS in does.allocates:
            self._activations[where] = _Place.DEVICE
        return None

    def state_fault(self, action: Action) -> str | None:
        """Check that an update, or a gather of momentum, finds the optimizer state on the device."""
        uses = SEMANTICS[action.kind].updates or action.kind is Kind.START_GATHER_MOMENTUM
        stages = [action.stage] if action.stage >= 0 else list(self._states)
        if uses and any(self._states.get(stage) is not _Place.DEVICE for stage in stages):
            return "its optimizer state is not on the device"
        return None

    def fault_at_end(self) -> str | None:
        """Check that optimizer state is back where it rests."""
        left = sorted(stage for stage, place in self._states.items() if place is not self._rests[stage])
        return f"optimizer state of stages {left} is not back in host memory" if left else None
