"""Snapshot memory of one rank: the rank fills slots, the node's snapshot server reads them. Without torch.

    page 0   magic, geometry, the kept step, the trusted step; then (state, step) of each slot
    slots    a snapshot each, in pages of their own

    EMPTY ─begin─► FILLING ─end─► COMPLETE                  a later snapshot may overwrite it
                            └───► HELD ─release─► COMPLETE  not before the server has stored or copied it

Only the rank moves a slot to FILLING, COMPLETE and HELD. It also records the trusted step, the last one at
which replicas were known to be equal. The newest snapshot up to the trusted step stays, for a rollback. The
server moves HELD to COMPLETE; so does the rank if a newer step supersedes one that waits to be stored. The
server also records the kept step: the newest one that other nodes have copies of, which are useless without
this node's part.

Two slots rotate: a rank holds no snapshot that would leave it fewer (`can_hold`). Each rank decides alone; a
rank without a free slot for a snapshot that the others take would leave no step that all ranks have.

The memory is a memfd: it has no name, is not limited by the size of /dev/shm, and exists as long as a process
has it open. A rank that dies while it fills a slot leaves the slot in FILLING and earlier snapshots intact.
"""

import ctypes
import mmap
import os
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["SnapshotMemory", "SnapshotSlot"]

_MAGIC = 0x4D59524941440005
EMPTY, FILLING, COMPLETE, HELD = range(4)
_STATES = 8
"""Word of page 0 at which the states of the slots begin."""
_ROTATING = 2
"""Slots in which snapshots that nothing holds follow each other: the newest one and the next."""
_POPULATE_WRITE = 23
"""madvise: touch every page now (Linux 5.14)."""


@dataclass(frozen=True)
class SnapshotSlot:
    """A slot with a complete snapshot."""

    index: int
    step: int
    held: bool


class SnapshotMemory:
    """One process's mapping of a rank's snapshot memory."""

    def __init__(self, descriptor: int) -> None:
        """Map memory that `create` made; the descriptor may be closed afterwards."""
        self._map = mmap.mmap(descriptor, 0)
        self._words = memoryview(self._map)[: mmap.PAGESIZE].cast("q")
        assert self._words[0] == _MAGIC, "a descriptor from a snapshot server"
        self.num_slots, self.slot_bytes = self._words[1], self._words[2]
        self._fence_lock = threading.Lock()

    @classmethod
    def create(cls, num_slots: int, slot_bytes: int) -> int:
        """Create memory and return its descriptor."""
        slot_bytes = -(-max(1, slot_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        descriptor = os.memfd_create("myriad-snapshots", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, mmap.PAGESIZE + num_slots * slot_bytes)
            os.pwrite(descriptor, struct.pack("=4q", _MAGIC, num_slots, slot_bytes, -1), 0)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    @property
    def num_bytes(self) -> int:
        """Size of the whole mapping."""
        return len(self._map)

    @property
    def address(self) -> int:
        """Address of the first slot in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + mmap.PAGESIZE

    def touch(self) -> None:
        """Allocate every page now, so that no later copy waits for a page fault."""
        base = self.address - mmap.PAGESIZE
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.madvise(ctypes.c_void_p(base), ctypes.c_size_t(self.num_bytes), _POPULATE_WRITE):
            for start in range(mmap.PAGESIZE, self.num_bytes, mmap.PAGESIZE):
                self._map[start] = self._map[start]

    def slot_address(self, slot: int) -> int:
        """Return the address of a slot in this process."""
        return self.address + slot * self.slot_bytes

    def view(self, slot: int, start: int = 0, num_bytes: int | None = None) -> memoryview:
        """Return a view of the bytes of a slot."""
        first = mmap.PAGESIZE + slot * self.slot_bytes + start
        stop = first + (self.slot_bytes - start if num_bytes is None else num_bytes)
        return memoryview(self._map)[first:stop]

    # Called by the rank

    def begin(self, step: int) -> int | None:
        """Reserve a slot for a new snapshot and return it; ``None``: none is free.

        The oldest free slot is taken. The newest complete snapshot, which all ranks may have, is never
        overwritten, nor are the kept and the trusted one."""
        states = self._known_states()
        complete = [of for state, of in states if state >= COMPLETE]
        trusted = [of for of in complete if of <= self.trusted]
        stay = {max(complete, default=-1), self.kept, max(trusted, default=-1)}
        free = _overwritable(states, stay if self.num_slots > 1 else set())
        if not free:
            return None
        slot = min(free, key=lambda slot: (states[slot][0] == COMPLETE, states[slot][1]))
        self._set_state(slot, FILLING)
        self._fence()
        self._words[_STATES + 2 * slot + 1] = step
        self._fence()
        return slot

    def can_hold(self, slot: int, released: int = -1) -> bool:
        """Return whether snapshots can rotate in other slots while this one is held.

        ``released``: a held slot that would be released first."""
        states = self._known_states()
        if released >= 0:
            states[released] = COMPLETE, states[released][1]
        others = set(_overwritable(states, {self.kept})) - {slot}
        needed = _ROTATING + (self.trusted >= 0)  # the trusted snapshot may become another one
        return len(others) >= min(needed, self.num_slots - _ROTATING)

    def _known_states(self) -> list[tuple[int, int]]:
        """Return the state and the step of each slot."""
        return [self._state(slot) for slot in range(self.num_slots)]

    def _state(self, slot: int) -> tuple[int, int]:
        first = _STATES + 2 * slot
        return self._words[first], self._words[first + 1]

    def _set_state(self, slot: int, state: int) -> None:
        self._words[_STATES + 2 * slot] = state

    def trust(self, step: int) -> None:
        """Record that replicas were equal after this step."""
        self._words[4] = step + 1

    @property
    def trusted(self) -> int:
        """Newest step at which replicas were equal; -1: replicas are not compared."""
        return self._words[4] - 1

    def end(self, slot: int, *, hold: bool) -> None:
        """Mark the slot complete; ``hold``: the server must release it before it may be overwritten."""
        self._fence()
        self._set_state(slot, HELD if hold else COMPLETE)

    def release(self, slot: int) -> None:
        """Allow a held slot to be overwritten. The snapshot server calls it, too."""
        if self._state(slot)[0] == HELD:
            self._set_state(slot, COMPLETE)

    # Called by the snapshot server

    def keep(self, step: int) -> None:
        """Set the kept step, which replaces the previous one."""
        self._words[3] = step

    @property
    def kept(self) -> int:
        """The step that stays in memory because every node has confirmed its copies."""
        return self._words[3]

    def complete(self) -> list[SnapshotSlot]:
        """Return the snapshots that are complete at this moment, oldest first."""
        found = [
            SnapshotSlot(slot, step, state == HELD)
            for slot, (state, step) in enumerate(self._known_states())
            if state >= COMPLETE
        ]
        return sorted(found, key=lambda slot: slot.step)

    def step_of(self, slot: int) -> int | None:
        """Return the step of the snapshot in a slot; ``None``: the slot has no complete snapshot."""
        self._fence()
        state, step = self._state(slot)
        return step if state >= COMPLETE else None

    def _fence(self) -> None:
        """Order memory accesses before the call against those after it, also on weakly ordered processors."""
        with self._fence_lock:  # release then acquire: nothing passes both
            pass
        with self._fence_lock:
            pass


def _overwritable(states: Sequence[tuple[int, int]], stay: set[int]) -> list[int]:
    """Return the slots that are not held and have no complete snapshot of a step that stays."""
    return [
        slot
        for slot, (state, of) in enumerate(states)
        if state != HELD and (state != COMPLETE or of not in stay)
    ]
