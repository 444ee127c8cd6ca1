"""A ring of batch slots in memory that all ranks of a node share: one writer, several readers, no locks.

    header  magic, owner, geometry, progress, error | step held by each slot | step asked for by each reader |
    attached slots   int32 [rows, sequence + 1] each; step s lives in slot s % num_slots

A reader that requests step s releases all other steps with the same write. The writer fills steps from the
lowest requested one, as many as there are slots, and never a slot that holds a requested step. It therefore
needs no acknowledgement before it reuses a slot, may be killed and replaced at any instant, and a seek needs
no special case. A slot's step number is set only while its content is whole.

Both sides write their own word, then a fence, then read the other's (Dekker): of two sides that collide, at
least one sees the other's word.
"""

import mmap
import os
import stat
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from myriad.errors import RunFailedError
from myriad.system.processes import process_start_ticks
from myriad.units import format_bytes

__all__ = ["Geometry", "Ring", "rendezvous_paths"]

_MAGIC = 0x4D59524941440001
_PREFIX = "myriad-loader-"
_ERROR_BYTES = 2048
_OWNER_PID, _OWNER_START, _PROGRESS, _ERROR_LENGTH, _FIRST_SAMPLE = 1, 2, 7, 8, 9
_FIXED = 10
_EMPTY = -1
_NOT_ASKED = -1


class Geometry(NamedTuple):
    """Sizes of a ring, with the offsets that follow from them."""

    num_slots: int
    rows: int
    width: int
    num_readers: int

    @property
    def words(self) -> int:
        """64-bit words of the header before the error text."""
        return _FIXED + self.num_slots + 2 * self.num_readers

    @property
    def data_offset(self) -> int:
        """First byte of the first slot; slots start on a page."""
        return -(-(self.words * 8 + _ERROR_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole ring."""
        return self.data_offset + self.num_slots * self.rows * self.width * 4


class Ring:
    """One process's view of the shared ring."""

    def __init__(self, descriptor: int, path: Path | None = None) -> None:
        """Map an initialised ring. ``path`` is set for a process that may have to remove its name."""
        self._path = path
        self._memory = mmap.mmap(descriptor, 0)
        fixed = np.frombuffer(self._memory, np.int64, _FIXED)
        self.geometry = geometry = Geometry(*(int(value) for value in fixed[3:7]))
        self._words = np.frombuffer(self._memory, np.int64, geometry.words)
        self._held = self._words[_FIXED : _FIXED + geometry.num_slots]
        self._asked, self._attached = self._words[_FIXED + geometry.num_slots :].reshape(2, -1)
        shape = (geometry.num_slots, geometry.rows, geometry.width)
        slots = np.frombuffer(self._memory, np.int32, offset=geometry.data_offset)
        self._slots: NDArray[np.int32] = slots.reshape(shape)
        self._fence_lock = threading.Lock()

    @classmethod
    def create(cls, name: str, geometry: Geometry, first_step: int | None) -> tuple["Ring", int]:
        """Create a ring under the name, and return it with its descriptor for the writer.

        Readers start at ``first_step``; if it is None, the writer waits until every reader has requested a
        step.
        """
        _remove_stale()
        for path in rendezvous_paths(name):
            with suppress(OSError):  # another user's file stays, and the next folder is tried
                path.unlink(missing_ok=True)
        error: OSError | None = None
        for path in rendezvous_paths(name):
            try:
                descriptor = _create_file(path, geometry, first_step)
                return cls(descriptor, path), descriptor
            except OSError as failure:  # a small /dev/shm (containers): try the next folder
                error = failure
        size = format_bytes(geometry.num_bytes)
        raise RunFailedError(f"no room for {size} of batches in /dev/shm or {tempfile.gettempdir()}: {error}")

    @classmethod
    def attach(cls, name: str) -> "Ring | None":
        """Return the ring of that name, or None if it is missing or its owner has ended.

        The folders are open to all users of the machine, so a link or another user's file is not a ring."""
        for path in rendezvous_paths(name):
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:
                continue
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
                os.close(descriptor)
                continue
            ring = cls(descriptor, path)
            os.close(descriptor)  # the mapping keeps the memory
            if ring.owner_is_alive():
                return ring
        return None

    def owner_is_alive(self) -> bool:
        """Return whether the process that created the ring still runs."""
        return process_start_ticks(int(self._words[_OWNER_PID])) == int(self._words[_OWNER_START])

    def mark_attached(self, reader: int) -> None:
        """Mark that a reader has mapped the ring."""
        self._attached[reader] = 1

    def remove_name_when_attached(self) -> None:
        """Remove the name once all readers have attached, so that no file remains however the run ends."""
        if self._path is not None and self._attached.all():
            self._path.unlink(missing_ok=True)
            self._path = None

    def remove_name(self) -> None:
        """Remove the name at the end, even if some readers never attached."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None

    # Readers

    def ask(self, reader: int, step: int) -> None:
        """Request a step for a reader, and release all other steps."""
        self._asked[reader] = step
        self._fence()

    def set_first_sample(self, sample: int) -> None:
        """Set the number of step 0's first sample. Only the ring's owner calls it, before it requests a
        step."""
        self._words[_FIRST_SAMPLE] = sample
        self._fence()

    def is_ready(self, step: int) -> bool:
        """Return whether the step is whole in its slot."""
        ready = int(self._held[step % self.geometry.num_slots]) == step
        self._fence()
        return ready

    def view(self, step: int) -> NDArray[np.int32]:
        """Return the [rows, width] of a step that is ready; valid until the reader requests another."""
        rows: NDArray[np.int32] = self._slots[step % self.geometry.num_slots]
        return rows

    # Writer

    def next_to_fill(self) -> int | None:
        """Return the next step to prepare, or None if no slot is free for it."""
        asked = self._asked.tolist()
        if _NOT_ASKED in asked:
            return None
        for step in range(min(asked), min(asked) + self.geometry.num_slots):
            held = int(self._held[step % self.geometry.num_slots])
            if held != step and held not in asked:
                return step
        return None

    def begin(self, step: int) -> NDArray[np.int32] | None:
        """Return the slot to fill, or None if a reader requests the slot's step at this moment."""
        slot = step % self.geometry.num_slots
        held = int(self._held[slot])
        self._held[slot] = _EMPTY
        self._fence()
        if held != _EMPTY and held in self._asked.tolist():
            self._held[slot] = held
            return None
        rows: NDArray[np.int32] = self._slots[slot]
        return rows

    def commit(self, step: int) -> None:
        """Mark the slot as whole."""
        self._fence()
        self._held[step % self.geometry.num_slots] = step
        self._words[_PROGRESS] += 1

    # Readers and writer

    @property
    def first_sample(self) -> int:
        """Number of step 0's first sample: not 0 where earlier steps had batches of another size."""
        return int(self._words[_FIRST_SAMPLE])

    @property
    def progress(self) -> int:
        """Slots filled since the ring was made, over all writers."""
        return int(self._words[_PROGRESS])

    def fail(self, message: str) -> None:
        """Report to all readers why no batch will come."""
        text = message.encode()[:_ERROR_BYTES]
        start = self.geometry.words * 8
        self._memory[start : start + len(text)] = text
        self._fence()
        self._words[_ERROR_LENGTH] = len(text)

    @property
    def error(self) -> str | None:
        """The reason why no batch will come, or None without an error."""
        length = int(self._words[_ERROR_LENGTH])
        self._fence()
        start = self.geometry.words * 8
        return self._memory[start : start + length].decode(errors="replace") if length else None

    def _fence(self) -> None:
        """Order memory accesses before it against those after it, on weakly ordered processors too."""
        with self._fence_lock:  # release then acquire: no access passes both
            pass
        with self._fence_lock:
            pass


def rendezvous_paths(name: str) -> list[Path]:
    """Return the possible paths of a ring's name: shared memory first, then the folder for temporary
    files."""
    return [folder / f"{_own_prefix()}{name}" for folder in _folders()]


def _own_prefix() -> str:
    """Return a prefix for this user and process namespace: containers may share /dev/shm, but not pids."""
    return f"{_PREFIX}{os.getuid()}-{os.stat('/proc/self/ns/pid').st_ino}-"


def _folders() -> list[Path]:
    shared = Path("/dev/shm")
    temporary = Path(tempfile.gettempdir())
    return [shared, temporary] if shared.is_dir() else [temporary]


def _create_file(path: Path, geometry: Geometry, first_step: int | None) -> int:
    """Create a complete ring file before it gets its name, so that any process that finds it can use it."""
    descriptor, partial = tempfile.mkstemp(prefix=_own_prefix(), suffix=".partial", dir=path.parent)
    try:
        start = process_start_ticks(os.getpid())
        header = np.zeros(geometry.words, np.int64)
        header[:_FIXED] = [_MAGIC, os.getpid(), start or 0, *geometry, 0, 0, 0]
        header[_FIXED : _FIXED + geometry.num_slots] = _EMPTY
        header[_FIXED + geometry.num_slots :].reshape(2, -1)[0] = (
            _NOT_ASKED if first_step is None else first_step
        )
        os.pwrite(descriptor, header.tobytes(), 0)
        os.posix_fallocate(descriptor, 0, geometry.num_bytes)
        os.rename(partial, path)
    except OSError:
        os.close(descriptor)
        os.unlink(partial)
        raise
    return descriptor


def _remove_stale() -> None:
    """Remove names left by processes of this user that were killed before their readers attached."""
    for folder in _folders():
        for path in folder.glob(f"{_own_prefix()}*"):
            try:
                with path.open("rb") as file:
                    words = np.frombuffer(file.read(_FIXED * 8), np.int64)
            except OSError:
                continue
            whole = len(words) == _FIXED and words[0] == _MAGIC
            if whole and process_start_ticks(int(words[_OWNER_PID])) != words[_OWNER_START]:
                path.unlink(missing_ok=True)
