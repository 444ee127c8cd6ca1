"""What is new about a node's devices, from how they were and how they are. Pure.

A device is known by its place on the bus: one that is lost is in no list any more, or at its end. What was
reported before the watch began is old, and for the doctor to judge; a device that is gone is news whenever.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from myriad.resilience.doctor.devices import XIDS, Blame, DeviceState, Xid

__all__ = ["DeviceNews", "News"]

_UNKNOWN = Xid("unknown", "look it up in NVIDIA's Xid catalog")
_FAILURES = 3
"""Looks in a row at which whoever is to tell of the devices did not."""


@dataclass(frozen=True)
class News:
    """One thing."""

    device: int
    """-1: of none, but of whoever tells of them."""
    blame: Blame
    words: str
    lost: bool = False
    can_wait: bool = False


class DeviceNews:
    """Of one node."""

    def __init__(self) -> None:
        self._known: dict[str, DeviceState] = {}
        """By place."""
        self._failures = 0

    def failed(self, problem: str) -> list[News]:
        """Nobody answered."""
        self._failures += 1
        words = f"the devices' driver cannot be asked: {problem}"
        return [News(-1, "unknown", words)] if self._failures == _FAILURES else []

    def saw(self, states: Sequence[DeviceState]) -> list[News]:
        """As they are now."""
        if self._known and not any(not state.lost for state in states) and not any(s.lost for s in states):
            return self.failed("it names no device any more")
        self._failures = 0
        now = {_place(state): state for state in states}
        found = [news for place, state in now.items() for news in self._about(place, state)]
        if not any(state.lost for state in states):
            gone = [state for place, state in self._known.items() if place not in now and not state.lost]
            found += [_lost(state.index) for state in gone]
            now |= {_place(state): state.model_copy(update={"lost": True}) for state in gone}
        self._known |= now
        return found

    def _about(self, place: str, state: DeviceState) -> Iterator[News]:
        before = self._known.get(place, state.model_copy(update={"lost": False}))
        index = before.index
        for number in state.xids[len(before.xids) :]:
            xid = XIDS.get(number, _UNKNOWN)
            yield News(index, xid.blame, f"Xid {number}: {xid.meaning}", can_wait=xid.can_wait)
        if (more := state.uncorrected_errors - before.uncorrected_errors) > 0:
            yield News(index, "hardware", f"{more} uncorrectable memory error{'s' if more > 1 else ''}")
        if state.remap_failed and not before.remap_failed:
            yield News(index, "hardware", "a memory row could not be replaced")
        if state.lost and not before.lost:
            yield _lost(index)


def _place(state: DeviceState) -> str:
    return state.bus or str(state.index)


def _lost(index: int) -> News:
    return News(index, "hardware", "it no longer answers", lost=True)
