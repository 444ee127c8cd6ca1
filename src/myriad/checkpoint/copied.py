"""Snapshots of other nodes' ranks in this node's memory. No torch here."""

import threading

from myriad.checkpoint.member import Member
from myriad.checkpoint.memory import SnapshotMemory
from myriad.checkpoint.piece import snapshot_bytes, split_pieces
from myriad.checkpoint.wire import Message

__all__ = ["CopiedMembers"]

_SLOTS = 2
"""The newest copy of a rank, and the one that is coming."""


class CopiedMembers:
    """By attempt and rank."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: dict[tuple[int, int], Member] = {}

    def begin(self, message: Message, payload: memoryview) -> None:
        """A rank of another node will send its snapshots here."""
        pieces = split_pieces(message["pieces"], bytes(payload))
        descriptor = SnapshotMemory.create(_SLOTS, snapshot_bytes(pieces))
        attempt, rank = message["attempt"], message["rank"]
        member = Member(attempt, message["world"], rank, pieces, descriptor, copied=True)
        with self._lock:
            self._members[attempt, rank] = member

    def take(self, message: Message, payload: memoryview) -> None:
        """One of them."""
        with self._lock:
            member = self._members[message["attempt"], message["rank"]]
        slot = member.memory.begin(message["step"])
        assert slot is not None, "nobody holds copies"
        member.memory.view(slot, 0, len(payload))[:] = payload
        member.note_hashes(slot, message["step"], message["hashes"])
        member.memory.end(slot, hold=False)

    def members(self) -> list[Member]:
        """All of them."""
        with self._lock:
            return list(self._members.values())

    def end(self, resumed: int | None) -> None:
        """A new attempt has begun, from the step ``resumed``: what has no snapshot of it goes, and newer ones
        never count again."""
        with self._lock:
            for key, member in list(self._members.items()):
                member.newest = resumed
                if resumed is None or resumed not in member.steps():
                    self._members.pop(key).close()

    def forget_before(self, attempt: int) -> None:
        """All copies of a step of this attempt are where they belong: those of earlier attempts may go."""
        with self._lock:
            gone = [key for key in self._members if key[0] < attempt]
            for key in gone:
                self._members.pop(key).close()
