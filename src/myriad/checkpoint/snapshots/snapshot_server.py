"""Snapshot server: one process per node that owns the snapshot memory of its ranks and stores snapshots.

    rank ──join──► memory (a memfd, touched) ──► rank copies its state into a slot, reports it complete
                                                 the server of rank 0's node has all nodes store or copy it
    rank dies      the snapshots stay; the newest step that all ranks have is stored at once
    new ranks      find the server by the run's name and resume from memory

The server needs no torch and is not part of training: a rank waits only for its own copy. The server exits
after every rank has ended its session. If ranks disappear without that, it stores their newest step, waits
``linger_seconds`` for new ranks, and exits.

It also receives copies of other nodes' snapshots (`ReceivedCopies`).
"""

import threading
import time
from pathlib import Path
from typing import Any

from myriad.checkpoint.format.stored_shard import decode_shards, snapshot_bytes
from myriad.checkpoint.snapshots.attempt_snapshots import AttemptSnapshots
from myriad.checkpoint.snapshots.checkpoint_writer import SavedStep
from myriad.checkpoint.snapshots.rank_entry import Hasher, RankEntry
from myriad.checkpoint.snapshots.snapshot_memory import SnapshotMemory
from myriad.system.jsonl import LineFile
from myriad.wire.socket_channel import Message

__all__ = ["RANKS_CONNECTED", "SnapshotServer"]

RANKS_CONNECTED = "its ranks are at work; stop the run first (Ctrl-C saves to where it stores)"


class SnapshotServer:
    """State and operations of the snapshot server, without sockets
    (`myriad.checkpoint.snapshots.snapshot_server_process`)."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.copied = ReceivedCopies()
        self._present = AttemptSnapshots(0, 0, self.report, self.on_copied)
        self._past: list[AttemptSnapshots] = []
        self._events: LineFile | None = None
        self._hasher = Hasher()
        self._num_flushes = 0
        self.linger_seconds = 0.0
        self.held_step: int | None = None
        """A last step that could not be stored. Its memory stays until it is stored or given up."""

    def attempt(self, number: int) -> AttemptSnapshots:
        """Return the current attempt, or an earlier one that it resumed from. Raises ``OSError`` for
        others."""
        with self._lock:
            for attempt in self._attempts():
                if attempt.number == number:
                    return attempt
            raise OSError(f"attempt {self._present.number} has taken over; this is attempt {number}")

    def _attempts(self) -> list[AttemptSnapshots]:
        """Return the attempts, newest first."""
        return [self._present, *self._past]

    def join(self, message: Message, payload: memoryview) -> RankEntry:
        """Add a rank of the newest attempt. Raises ``OSError`` if its attempt is older."""
        number, world, rank, num_local, resumed = (
            message[key] for key in ("attempt", "world", "rank", "num_local", "resumed")
        )
        with self._lock:
            if number < self._present.number:
                raise OSError(f"attempt {self._present.number} has taken over; this is attempt {number}")
        # Parse before anything of an earlier attempt ends: a malformed message must lose no snapshot.
        stored_shards = decode_shards(message["pieces"], bytes(payload))
        descriptor = SnapshotMemory.create(message["num_slots"], snapshot_bytes(stored_shards))
        entry = RankEntry(number, world, rank, stored_shards, descriptor, tuple(message["holds"]))
        try:
            with self._lock:
                if number > self._present.number:
                    self._set_past(resumed)
                    self._present = AttemptSnapshots(number, num_local, self.report, self.on_copied)
                self.attempt(number).join(entry)
        except OSError:
            entry.close()
            raise
        threading.Thread(target=entry.memory.touch, daemon=True).start()
        return entry

    def _set_past(self, resumed: int | None) -> None:
        """Keep the step that a new attempt resumes from until the new attempt has its own snapshots.

        The step may belong to any earlier attempt."""
        self._past = [attempt for attempt in self._attempts() if attempt.end(resumed)]
        self.copied.end(resumed)

    def _forget_past(self) -> None:
        for attempt in self._past:
            attempt.close()
        self._past = []

    def configure(self, number: int, message: Message, payload: memoryview) -> None:
        """Set how an attempt stores. The first rank of the node sends this message.

        Raises ``OSError`` if the attempt is older than the current one."""
        events = Path(message["events"])
        if self._events is None or self._events.path != events:
            self._events = LineFile(events, marks_late=True)
        self.linger_seconds = message["linger_seconds"]
        self.attempt(number).configure(message, payload)

    def is_present(self, entry: RankEntry) -> bool:
        """Whether a rank belongs to the newest attempt."""
        with self._lock:
            return entry.attempt == self._present.number

    def on_complete(self, entry: RankEntry, message: Message) -> None:
        """Handle a rank's message that its snapshot is complete."""
        with self._lock:
            present = self._present
            if entry.attempt != present.number:
                return
            if not message["durable"]:  # storing computes the hashes itself
                self._hasher.put(entry, message["slot"], message["step"])
            present.on_complete(entry, message)
            if self._past and not present.makes_copies and len(present.common_steps()) > 1:
                self._forget_past()

    def on_copied(self, number: int, step: int) -> None:
        """Free snapshots of earlier attempts: other nodes have copies of all ranks' snapshots of ``step``.

        ``number``: the attempt that the copies belong to."""
        with self._lock:
            if number != self._present.number:
                return  # the current attempt may have resumed from this late copy
            self._present.keep(step)
            self._forget_past()
            self.copied.forget_before(number)

    def flush(self) -> None:
        """Start to store the newest step that every rank has, after all ranks of this node are gone.

        The step may belong to an earlier attempt that the current one resumed from. A separate thread does
        the work, so that an error cannot end the server and lose its snapshots."""
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

    def save(self, url: str) -> SavedStep:
        """Write the newest step in memory to another folder, for a run whose ranks have ended.

        Raises ``OSError``, also while ranks are connected."""
        with self._lock:
            attempts, newest = self._attempts(), self._present.number
            self._num_flushes += 1
        try:
            if self.has_ranks:
                raise OSError(RANKS_CONNECTED)
            for attempt in attempts:
                if (saved := attempt.save(url, newest)) is not None:
                    return saved
            raise OSError("this snapshot server has no step of all ranks, or is not the one of rank 0's node")
        finally:
            with self._lock:
                self._num_flushes -= 1

    @property
    def has_ranks(self) -> bool:
        """Whether a rank of the newest attempt is connected."""
        return any(not entry.gone for entry in self._present.entries())

    def release_held(self) -> None:
        """Stop holding the last step, here and on the other nodes."""
        self.held_step = None
        with self._lock:
            attempts = self._attempts()
        for attempt in attempts:
            attempt.release_all()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being stored or copied."""
        with self._lock:
            return not self._num_flushes and all(attempt.is_idle for attempt in self._attempts())

    def snapshots(self) -> list[RankEntry]:
        """Return the entries of all ranks, of this node and copied, that a new attempt may load from."""
        with self._lock:
            own = [entry for attempt in self._attempts() for entry in attempt.entries()]
            return own + self.copied.entries()

    def find(self, attempt: int, rank: int, step: int, copied: bool) -> RankEntry | None:
        """Return the entry with such a snapshot, or ``None``."""
        wanted = attempt, rank, copied
        for entry in self.snapshots():
            if (entry.attempt, entry.rank, entry.copied) == wanted and step in entry.steps():
                return entry
        return None

    def report(self, event: str, **fields: Any) -> None:
        """Append to the run's event log. A file system that hangs delays this call by at most 5 s."""
        if self._events is not None:
            line = {"time": time.time(), "event": event, **fields}
            writer = threading.Thread(target=self._events.append, args=(line,), daemon=True)
            writer.start()
            writer.join(5.0)


_SLOTS = 2
"""Slots of a copied rank: the newest copy, and the one being received."""


class ReceivedCopies:
    """The ranks of other nodes whose snapshots are copied here, keyed by attempt and rank."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[tuple[int, int], RankEntry] = {}

    def begin(self, message: Message, payload: memoryview) -> None:
        """Allocate memory for the copies of a rank of another node."""
        stored_shards = decode_shards(message["pieces"], bytes(payload))
        descriptor = SnapshotMemory.create(_SLOTS, snapshot_bytes(stored_shards))
        attempt, rank = message["attempt"], message["rank"]
        entry = RankEntry(attempt, message["world"], rank, stored_shards, descriptor, (rank,), copied=True)
        with self._lock:
            self._entries[attempt, rank] = entry

    def take(self, message: Message, payload: memoryview) -> None:
        """Store one copy in a slot of its rank."""
        with self._lock:
            entry = self._entries[message["attempt"], message["rank"]]
        slot = entry.memory.begin(message["step"])
        assert slot is not None, "no copy is held"
        entry.memory.view(slot, 0, len(payload))[:] = payload
        entry.record_hashes(slot, message["step"], message["hashes"])
        entry.memory.end(slot, hold=False)

    def entries(self) -> list[RankEntry]:
        """Return all copied ranks."""
        with self._lock:
            return list(self._entries.values())

    def end(self, resumed: int | None) -> None:
        """End the earlier attempts: a new one has resumed from step ``resumed``.

        Ranks without a snapshot of that step are freed, and later steps become invalid."""
        with self._lock:
            for key, entry in list(self._entries.items()):
                entry.newest = resumed
                if resumed is None or resumed not in entry.steps():
                    self._entries.pop(key).close()

    def forget_before(self, attempt: int) -> None:
        """Free the copies of attempts before ``attempt``, which now has complete copies of a step."""
        with self._lock:
            gone = [key for key in self._entries if key[0] < attempt]
            for key in gone:
                self._entries.pop(key).close()
