"""One rank's snapshots in memory that outlives it: slots that the rank fills and the node's keeper reads.

    page 0   magic, geometry, the step that stays, the step that is trusted; then (state, step) of each slot
    slots    a snapshot each, in pages of their own

    EMPTY ─begin─► FILLING ─end─► WHOLE                    may be overwritten by a later snapshot
                            └───► HELD ─release─► WHOLE    not before the keeper has stored or copied it

The rank alone moves a slot to FILLING, WHOLE and HELD, and says after which step replicas were last known to
hold the same: the newest snapshot up to there stays, to go back to. The keeper alone moves HELD to WHOLE, and
says which step stays: the newest that other nodes have copies of, of no use to them without the rest of it.
The memory is a memfd: it has no name, is not bound by the size of /dev/shm, and lives as long as anybody has
it. A rank that dies while it fills a slot leaves FILLING behind, and the snapshots before it as they were. No
torch here.
"""

import ctypes
import mmap
import os
import threading
from dataclasses import dataclass

import numpy as np

__all__ = ["Slot", "SnapshotMemory"]

_MAGIC = 0x4D59524941440005
EMPTY, FILLING, WHOLE, HELD = range(4)
_POPULATE_WRITE = 23
"""madvise: touch every page now (Linux 5.14)."""


@dataclass(frozen=True)
class Slot:
    """A whole snapshot."""

    index: int
    step: int
    held: bool


class SnapshotMemory:
    """One process's view."""

    def __init__(self, descriptor: int) -> None:
        """Maps memory that `create` made; the descriptor may be closed afterwards."""
        self._map = mmap.mmap(descriptor, 0)
        words = np.frombuffer(self._map, np.int64, mmap.PAGESIZE // 8)
        assert int(words[0]) == _MAGIC, "a descriptor from a keeper"
        self.num_slots, self.slot_bytes = int(words[1]), int(words[2])
        self._words = words
        self._states = words[8 : 8 + 2 * self.num_slots].reshape(-1, 2)
        self._fence_lock = threading.Lock()

    @classmethod
    def create(cls, num_slots: int, slot_bytes: int) -> int:
        """The descriptor of new memory."""
        slot_bytes = -(-max(1, slot_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        descriptor = os.memfd_create("myriad-snapshots", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, mmap.PAGESIZE + num_slots * slot_bytes)
            header = np.array([_MAGIC, num_slots, slot_bytes, -1], np.int64)
            os.pwrite(descriptor, header.tobytes(), 0)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    @property
    def num_bytes(self) -> int:
        """Of all of it."""
        return len(self._map)

    @property
    def address(self) -> int:
        """Of the first slot in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + mmap.PAGESIZE

    def touch(self) -> None:
        """Gets every page now, so that no copy waits for one."""
        base = self.address - mmap.PAGESIZE
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.madvise(ctypes.c_void_p(base), ctypes.c_size_t(self.num_bytes), _POPULATE_WRITE):
            for start in range(mmap.PAGESIZE, self.num_bytes, mmap.PAGESIZE):
                self._map[start] = self._map[start]

    def slot_address(self, slot: int) -> int:
        """Of a slot in this process."""
        return self.address + slot * self.slot_bytes

    def view(self, slot: int, start: int = 0, num_bytes: int | None = None) -> memoryview:
        """Bytes of a slot."""
        first = mmap.PAGESIZE + slot * self.slot_bytes + start
        stop = first + (self.slot_bytes - start if num_bytes is None else num_bytes)
        return memoryview(self._map)[first:stop]

    # The rank

    def begin(self, step: int) -> int | None:
        """The slot to fill with a new snapshot: the oldest that nobody holds, but never the newest whole one,
        which all ranks may have, nor those that stay. ``None`` when there is no other."""
        states = [(int(state), int(of)) for state, of in self._states]
        whole = [of for state, of in states if state >= WHOLE]
        trusted = [of for of in whole if of <= self.trusted]
        stay = {max(whole, default=-1), int(self._words[3]), max(trusted, default=-1)}
        free = [
            slot
            for slot, (state, of) in enumerate(states)
            if state != HELD and (state != WHOLE or of not in stay or self.num_slots == 1)
        ]
        if not free:
            return None
        slot = min(free, key=lambda slot: (states[slot][0] == WHOLE, states[slot][1]))
        self._states[slot, 0] = FILLING
        self._fence()
        self._states[slot, 1] = step
        self._fence()
        return slot

    def trust(self, step: int) -> None:
        """After this step replicas were known to hold the same."""
        self._words[4] = step + 1

    @property
    def trusted(self) -> int:
        """The newest such step; -1: nobody compares them."""
        return int(self._words[4]) - 1

    def end(self, slot: int, *, hold: bool) -> None:
        """The slot is whole."""
        self._fence()
        self._states[slot, 0] = HELD if hold else WHOLE

    # The keeper

    def release(self, slot: int) -> None:
        """What was held may be overwritten."""
        if int(self._states[slot, 0]) == HELD:
            self._states[slot, 0] = WHOLE

    def keep(self, step: int) -> None:
        """From now on this step stays, and the one that stayed before no longer does."""
        self._words[3] = step

    @property
    def kept(self) -> int:
        """The step that stays in memory because every node has confirmed its copies."""
        return int(self._words[3])

    def whole(self) -> list[Slot]:
        """The snapshots that are whole at this moment, oldest first."""
        found = [
            Slot(slot, int(step), int(state) == HELD)
            for slot, (state, step) in enumerate(self._states)
            if int(state) >= WHOLE
        ]
        return sorted(found, key=lambda slot: slot.step)

    def step_of(self, slot: int) -> int | None:
        """Of the snapshot in a slot; ``None`` while it is none."""
        self._fence()
        state, step = (int(word) for word in self._states[slot])
        return step if state >= WHOLE else None

    def _fence(self) -> None:
        """Orders memory accesses before it against those after it, on weakly ordered processors too."""
        with self._fence_lock:  # release then acquire: nothing passes both
            pass
        with self._fence_lock:
            pass
