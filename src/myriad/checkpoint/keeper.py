"""The keeper: one process a node that owns the memory of all its ranks' snapshots and stores them.

    rank ──join──► memory (a memfd, touched) ──► rank copies its state into a slot, says "whole"
                                                 the keeper of rank 0's node has all nodes store or copy it
    rank dies      the snapshots stay; what all ranks have is stored at once
    new ranks      find the keeper by the run's name and go on from memory

No torch, no part in training: a rank only ever waits for its own copy. When every rank has said good-bye the
keeper ends; when they are gone without a word it stores, lingers for new ones, then ends.
"""

import threading
import time
from pathlib import Path
from typing import Any

from myriad.checkpoint.attempt import Attempt, Saved
from myriad.checkpoint.copied import CopiedMembers
from myriad.checkpoint.member import Hasher, Member
from myriad.checkpoint.memory import SnapshotMemory
from myriad.checkpoint.piece import snapshot_bytes, split_pieces
from myriad.checkpoint.wire import Message
from myriad.jsonl import LineFile

__all__ = ["AT_WORK", "Keeper"]

AT_WORK = "its ranks are at work; stop the run first (Ctrl-C saves to where it stores)"


class Keeper:
    """Everything but the sockets (`myriad.checkpoint.keeper_process`)."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.copied = CopiedMembers()
        self._present = Attempt(0, 0, self.tell, self.on_copied)
        self._past: list[Attempt] = []
        self._events: LineFile | None = None
        self._hasher = Hasher()
        self._num_flushes = 0
        self.linger_seconds = 0.0
        self.held_step: int | None = None
        """A last step that could not be stored: the memory stays until it is, or until it is given up."""

    def attempt(self, number: int) -> Attempt:
        """The present one, or one whose step it went on from. Raises ``OSError`` for any other."""
        with self._lock:
            for attempt in self._attempts():
                if attempt.number == number:
                    return attempt
            raise OSError(f"attempt {self._present.number} has taken over; this is attempt {number}")

    def _attempts(self) -> list[Attempt]:
        """The newest first."""
        return [self._present, *self._past]

    def join(self, message: Message, payload: memoryview) -> Member:
        """A rank of the newest attempt. Raises ``OSError`` for one of an older attempt."""
        number, world, rank, num_local, resumed = (
            message[key] for key in ("attempt", "world", "rank", "num_local", "resumed")
        )
        with self._lock:
            if number < self._present.number:
                raise OSError(f"attempt {self._present.number} has taken over; this is attempt {number}")
        # before anything of an earlier attempt ends: a wrong message loses no snapshot
        pieces = split_pieces(message["pieces"], bytes(payload))
        descriptor = SnapshotMemory.create(message["num_slots"], snapshot_bytes(pieces))
        member = Member(number, world, rank, pieces, descriptor)
        try:
            with self._lock:
                if number > self._present.number:
                    self._set_past(resumed)
                    self._present = Attempt(number, num_local, self.tell, self.on_copied)
                self.attempt(number).join(member)
        except OSError:
            member.close()
            raise
        threading.Thread(target=member.memory.touch, daemon=True).start()
        return member

    def _set_past(self, resumed: int | None) -> None:
        """The step that a new attempt goes on from stays, from however many attempts ago, until the new one
        has snapshots of its own."""
        self._past = [attempt for attempt in self._attempts() if attempt.end(resumed)]
        self.copied.end(resumed)

    def _forget_past(self) -> None:
        for attempt in self._past:
            attempt.close()
        self._past = []

    def configure(self, number: int, message: Message, payload: memoryview) -> None:
        """How an attempt stores, from the first rank of the node. Raises ``OSError`` for one of an older
        attempt."""
        events = Path(message["events"])
        if self._events is None or self._events.path != events:
            self._events = LineFile(events, marks_late=True)
        self.linger_seconds = message["linger_seconds"]
        self.attempt(number).configure(message, payload)

    def is_present(self, member: Member) -> bool:
        """Whether a rank is of the newest attempt."""
        with self._lock:
            return member.attempt == self._present.number

    def whole(self, member: Member, message: Message) -> None:
        """A rank has copied its state into a slot."""
        with self._lock:
            present = self._present
            if member.attempt != present.number:
                return
            if not message["durable"]:  # storing hashes as it writes
                self._hasher.put(member, message["slot"], message["step"])
            present.whole(member, message)
            if self._past and not present.makes_copies and len(present.common_steps()) > 1:
                self._forget_past()

    def on_copied(self, number: int, step: int) -> None:
        """Other nodes have copies of a step of all ranks: those of the attempt ``number``. Nobody needs any
        more what earlier attempts had."""
        with self._lock:
            if number != self._present.number:
                return  # what an earlier one has copied at last may be what this one goes on from
            self._present.keep(step)
            self._forget_past()
            self.copied.forget_before(number)

    def flush(self) -> None:
        """All ranks of this node are gone: begins to store the newest snapshot that every rank has, be it of
        an attempt that the present one went on from. In a thread of its own: what goes wrong there may not
        end the keeper, and with it the snapshots."""
        with self._lock:
            self._num_flushes += 1
        threading.Thread(target=self._flush, daemon=True).start()

    def _flush(self) -> None:
        try:
            with self._lock:
                attempts, newest = self._attempts(), self._present.number
            for attempt in attempts:
                if attempt.flush(newest):
                    return
        finally:
            with self._lock:
                self._num_flushes -= 1

    def save(self, url: str) -> Saved:
        """Write the newest step in memory to another folder, for a run whose ranks have ended. Raises
        ``OSError``."""
        with self._lock:
            attempts, newest = self._attempts(), self._present.number
            self._num_flushes += 1
        try:
            if self.has_ranks:
                raise OSError(AT_WORK)
            for attempt in attempts:
                if (saved := attempt.save(url, newest)) is not None:
                    return saved
            raise OSError("this snapshot server has no step of all ranks, or is not the one of rank 0's node")
        finally:
            with self._lock:
                self._num_flushes -= 1

    @property
    def has_ranks(self) -> bool:
        """Whether a rank of the newest attempt is there."""
        return any(not member.gone for member in self._present.members())

    def unhold(self) -> None:
        """Nothing is held any more, here and on the other nodes."""
        self.held_step = None
        with self._lock:
            attempts = self._attempts()
        for attempt in attempts:
            attempt.release_all()

    @property
    def is_idle(self) -> bool:
        """Nothing is being stored or copied."""
        with self._lock:
            return not self._num_flushes and all(attempt.is_idle for attempt in self._attempts())

    def snapshots(self) -> list[Member]:
        """Whatever a new attempt may load from."""
        with self._lock:
            own = [member for attempt in self._attempts() for member in attempt.members()]
            return own + self.copied.members()

    def find(self, attempt: int, rank: int, step: int, copied: bool) -> Member | None:
        """The member that has such a snapshot."""
        wanted = attempt, rank, copied
        for member in self.snapshots():
            if (member.attempt, member.rank, member.copied) == wanted and step in member.steps():
                return member
        return None

    def tell(self, event: str, **fields: Any) -> None:
        """A line in the run's events; a file system that hangs holds up nobody but this line."""
        if self._events is not None:
            line = {"time": time.time(), "event": event, **fields}
            writer = threading.Thread(target=self._events.append, args=(line,), daemon=True)
            writer.start()
            writer.join(5.0)
