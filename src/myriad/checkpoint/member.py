"""What a keeper has of one rank: its pieces, the memory of its snapshots, and their hashes. No torch."""

import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from myriad.checkpoint.manifest import hash_of
from myriad.checkpoint.memory import Slot, SnapshotMemory
from myriad.checkpoint.piece import Piece, join_pieces, snapshot_bytes

__all__ = ["Hasher", "Member", "Opened"]

_HASH_SECONDS = 0.2


@dataclass
class Member:
    """One rank of one attempt; ``copied``: one of another node, whose snapshots were sent here."""

    attempt: int
    world: int
    rank: int
    pieces: list[Piece]
    descriptor: int
    copied: bool = False
    newest: int | None = None
    """Of an earlier attempt: the step that the present one goes on from. What is newer is an abandoned past,
    in which a rank may be at work that everybody thinks dead."""
    gone: bool = False
    """The rank is no longer there."""
    memory: SnapshotMemory = field(init=False)

    def __post_init__(self) -> None:
        self.memory = SnapshotMemory(self.descriptor)
        self._hashes: dict[int, tuple[int, list[str]]] = {}
        self._hashing = threading.Lock()

    def slot_of(self, step: int) -> int | None:
        """Where the snapshot of a step is, if it is here and whole."""
        return next((slot.index for slot in self._whole() if slot.step == step), None)

    def steps(self) -> list[int]:
        """Of the whole snapshots, ascending."""
        return [slot.step for slot in self._whole()]

    def _whole(self) -> list[Slot]:
        return [slot for slot in self.memory.whole() if self.newest is None or slot.step <= self.newest]

    def hashes(self, slot: int, step: int) -> list[str] | None:
        """Of each piece's data; ``None`` when the slot is being filled anew."""
        with self._hashing:
            known = self._hashes.get(slot)
            if known is None or known[0] != step:
                found = [hash_of(self.data(slot, piece)) for piece in self.pieces]
                if self.memory.step_of(slot) != step:
                    return None
                known = self._hashes[slot] = (step, found)
            return known[1]

    def note_hashes(self, slot: int, step: int, hashes: list[str]) -> None:
        """Those that came with a copy."""
        with self._hashing:
            self._hashes[slot] = (step, hashes)

    def data(self, slot: int, piece: Piece) -> memoryview:
        """The bytes of a piece."""
        return self.memory.view(slot, piece.memory_start, piece.num_bytes)

    def data_in(self, slot: int) -> Callable[[Piece], memoryview]:
        """The bytes of any piece of one snapshot."""
        return lambda piece: self.data(slot, piece)

    def release(self, step: int) -> None:
        """Nobody stores or copies that snapshot any more."""
        slot = self.slot_of(step)
        if slot is not None:
            self.memory.release(slot)

    def close(self) -> None:
        """Gives the memory back, once nobody else has it."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def summary(self) -> dict[str, Any]:
        """For whoever looks for a state to go on from."""
        return {
            "attempt": self.attempt,
            "world": self.world,
            "rank": self.rank,
            "copied": self.copied,
            "steps": self.steps(),
            "copied_step": self.memory.kept,
            "bytes": snapshot_bytes(self.pieces),
        }

    def opened(self, step: int) -> tuple[dict[str, Any], bytes] | None:
        """Everything but the bytes of one snapshot, as a message and its payload."""
        slot = self.slot_of(step)
        if slot is None or (hashes := self.hashes(slot, step)) is None:
            return None
        values, envelopes = join_pieces(self.pieces)
        return {"slot": slot, "hashes": hashes, "pieces": values}, envelopes


@dataclass(frozen=True)
class Opened:
    """A snapshot as a rank sees it, to load from."""

    rank: int
    pieces: list[Piece]
    hashes: list[str]
    memory: SnapshotMemory
    slot: int

    def data(self, index: int) -> memoryview:
        """The bytes of a piece by its number."""
        piece = self.pieces[index]
        return self.memory.view(self.slot, piece.memory_start, piece.num_bytes)


class Hasher:
    """Hashes snapshots in a thread of its own, a little after they were taken: those that are overwritten
    sooner are not hashed, as where steps are short that would cost most of a core."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[Member, int, int]] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def put(self, member: Member, slot: int, step: int) -> None:
        """A slot has a new snapshot."""
        self._waiting.put((member, slot, step))

    def _work(self) -> None:
        while True:
            taken = [self._waiting.get()]
            time.sleep(_HASH_SECONDS)
            with suppress(queue.Empty):
                while True:
                    taken.append(self._waiting.get_nowait())
            newest = {id(one[0]): one for one in taken}
            for member, slot, step in newest.values():
                with suppress(ValueError):  # closed meanwhile
                    if member.memory.step_of(slot) == step:
                        member.hashes(slot, step)
            del taken, newest, member  # or the memory of one that has ended would stay until the next
