"""One rank's entry in the snapshot server: its stored shards, snapshot memory and hashes. Without torch."""

import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from myriad.checkpoint.format.checkpoint_manifest import hash_of
from myriad.checkpoint.format.stored_shard import StoredShard, encode_shards, snapshot_bytes
from myriad.checkpoint.snapshots.snapshot_memory import SnapshotMemory, SnapshotSlot

__all__ = ["Hasher", "OpenedSnapshot", "RankEntry"]

_HASH_SECONDS = 0.2


@dataclass
class RankEntry:
    """One rank of one attempt. ``copied``: a rank of another node, whose snapshots were sent here."""

    attempt: int
    world: int
    rank: int
    stored_shards: list[StoredShard]
    descriptor: int
    holds: tuple[int, ...]
    """Ranks whose shards are all in each snapshot: this rank, and those that it mirrors."""
    copied: bool = False
    newest: int | None = None
    """For an earlier attempt: the step that the current attempt resumed from. Later steps are invalid: a rank
    that is believed dead may still write them."""
    gone: bool = False
    """Whether the rank has disconnected."""
    memory: SnapshotMemory = field(init=False)

    def __post_init__(self) -> None:
        self.memory = SnapshotMemory(self.descriptor)
        self._hashes: dict[int, tuple[int, list[str]]] = {}
        self._hashing = threading.Lock()

    def slot_of(self, step: int) -> int | None:
        """Return the slot of a step's complete snapshot, or ``None``."""
        return next((slot.index for slot in self._complete() if slot.step == step), None)

    def steps(self) -> list[int]:
        """Return the steps of the complete snapshots, ascending."""
        return [slot.step for slot in self._complete()]

    def _complete(self) -> list[SnapshotSlot]:
        return [slot for slot in self.memory.complete() if self.newest is None or slot.step <= self.newest]

    def hashes(self, slot: int, step: int) -> list[str] | None:
        """Return the hash of each shard's data; ``None``: the slot is being overwritten."""
        with self._hashing:
            known = self._hashes.get(slot)
            if known is None or known[0] != step:
                found = [hash_of(self.data(slot, shard)) for shard in self.stored_shards]
                if self.memory.step_of(slot) != step:
                    return None
                known = self._hashes[slot] = (step, found)
            return known[1]

    def record_hashes(self, slot: int, step: int, hashes: list[str]) -> None:
        """Record hashes that are known: of a copy, or of the shards that were stored."""
        mirrors = self.stored_shards[len(hashes) :]
        known = [*hashes, *(hash_of(self.data(slot, shard)) for shard in mirrors)]
        if mirrors and self.memory.step_of(slot) != step:
            return  # the slot was overwritten while its mirrors were hashed
        with self._hashing:
            self._hashes[slot] = (step, known)

    def data(self, slot: int, shard: StoredShard) -> memoryview:
        """Return the bytes of a shard."""
        return self.memory.view(slot, shard.memory_start, shard.num_bytes)

    def data_in(self, slot: int) -> Callable[[StoredShard], memoryview]:
        """Return a function that maps a shard of one snapshot to its bytes."""
        return lambda shard: self.data(slot, shard)

    def release(self, step: int) -> None:
        """Release the slot of a step that is no longer being stored or copied."""
        slot = self.slot_of(step)
        if slot is not None:
            self.memory.release(slot)

    def close(self) -> None:
        """Close the descriptor. The kernel frees the memory once no process maps it."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def summary(self) -> dict[str, Any]:
        """Describe the snapshots for a search for a state to resume from."""
        return {
            "attempt": self.attempt,
            "world": self.world,
            "rank": self.rank,
            "holds": self.holds,
            "copied": self.copied,
            "steps": self.steps(),
            "copied_step": self.memory.kept,
            "bytes": snapshot_bytes(self.stored_shards),
        }

    def opened(self, step: int) -> tuple[dict[str, Any], bytes] | None:
        """Return all but the data of one snapshot, as a message and its payload; ``None``: no such one."""
        slot = self.slot_of(step)
        if slot is None or (hashes := self.hashes(slot, step)) is None:
            return None
        values, envelopes = encode_shards(self.stored_shards)
        return {"slot": slot, "hashes": hashes, "pieces": values}, envelopes


@dataclass(frozen=True)
class OpenedSnapshot:
    """A snapshot that a rank has opened for loading."""

    rank: int
    stored_shards: list[StoredShard]
    hashes: list[str]
    memory: SnapshotMemory
    slot: int

    def data(self, index: int) -> memoryview:
        """Return the bytes of the shard with this index."""
        shard = self.stored_shards[index]
        return self.memory.view(self.slot, shard.memory_start, shard.num_bytes)


class Hasher:
    """Hashes snapshots in a separate thread, shortly after they are taken.

    Snapshots that are overwritten sooner are not hashed: with short steps that would use most of a core."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[RankEntry, int, int]] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def put(self, entry: RankEntry, slot: int, step: int) -> None:
        """Queue a new snapshot."""
        self._waiting.put((entry, slot, step))

    def _work(self) -> None:
        while True:
            taken = [self._waiting.get()]
            time.sleep(_HASH_SECONDS)
            with suppress(queue.Empty):
                while True:
                    taken.append(self._waiting.get_nowait())
            newest = {id(one[0]): one for one in taken}
            for entry, slot, step in newest.values():
                with suppress(ValueError):  # the memory was closed meanwhile
                    if entry.memory.step_of(slot) == step:
                        entry.hashes(slot, step)
            del taken, newest, entry  # else this frame keeps the last memory alive until the next snapshot
