"""This rank's state into memory that outlives the rank, behind the next iteration.

    step N    update | take: hand over  ...forward, backward...  | settle | update | ...
    thread           '--- copies live memory into a slot --------'
    keeper                                              '--- hashes, stores, sends to another node ---

Nothing in the state changes between two updates, so the copy has the whole forward and backward pass;
training waits (`settle`) only for what is left of it when the next update is about to begin. On a GPU a side
stream copies into the same memory, pinned, and the update waits for it on the device, not here.
"""

import ctypes
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from myriad.checkpoint.keeper_client import KeeperClient
from myriad.checkpoint.memory import SnapshotMemory
from myriad.checkpoint.piece import Piece
from myriad.checkpoint.wire import Closed
from myriad.errors import RunFailedError
from myriad.model.rectangle import Rectangle

__all__ = ["Snapshots", "Wants"]

_LOG = logging.getLogger(__name__)

_POLL_SECONDS, _CHECK_SECONDS, _NICENESS = 0.01, 1.0, 10
_SMALL_BYTES = 2**26
"""A larger copy needs its share of the processor, or the next update waits for it."""
_SAY_SECONDS = 0.1
"""Between two words to the keeper of snapshots that it need not do anything with: it sees them in memory."""


_REJOINS = 5
"""Times that a keeper may die in one attempt."""


@dataclass(frozen=True)
class Wants:
    """What becomes of a snapshot besides staying in memory."""

    durable: bool = False
    copies: bool = False
    last: bool = False
    """Nothing comes after it: it is taken even if an earlier one must be waited for."""

    @property
    def hold(self) -> bool:
        """It may not be overwritten before that is done."""
        return self.durable or self.copies


@dataclass(frozen=True)
class _Copy:
    """Live memory and its first byte in a slot; what is contiguous is ``[n]``."""

    source: torch.Tensor
    start: int

    @property
    def num_bytes(self) -> int:
        return self.source.numel() * self.source.element_size()

    def with_next(self, other: "_Copy") -> "_Copy | None":
        """Both as one, when one follows the other here and there."""
        if self.source.dim() != 1 or other.source.dim() != 1:
            return None
        follows = self.source.data_ptr() + self.num_bytes == other.source.data_ptr()
        same = self.source.untyped_storage().data_ptr() == other.source.untyped_storage().data_ptr()
        if not (follows and same and self.start + self.num_bytes == other.start):
            return None
        size = self.source.numel() + other.source.numel()
        return _Copy(self.source.as_strided((size,), (1,)), self.start)


class Snapshots:
    """Takes one snapshot at a time."""

    def __init__(
        self,
        client: KeeperClient,
        memory: SnapshotMemory,
        rectangles: Sequence[Rectangle],
        pieces: Sequence[Piece],
        device: torch.device,
        rejoin: Callable[[], SnapshotMemory],
    ) -> None:
        """``rectangles``: views of memory that stays where it is, ``pieces`` those that `make_pieces` made of
        them; ``rejoin``: memory of a new keeper when the one that was there has died."""
        self._client, self._memory = client, memory
        self._copier = _CudaCopier(memory, device) if device.type == "cuda" else _HostCopier(memory)
        self._rejoin, self._rejoins = rejoin, 0
        self._copies = [part for one in _plan(rectangles, pieces) for part in _within_pins(one)]
        self._jobs: queue.SimpleQueue[tuple[int, Wants, int | None] | None] = queue.SimpleQueue()
        self._copied, self._told = threading.Event(), threading.Event()
        self._copied.set()
        self._told.set()
        self._error: BaseException | None = None
        self._said_at = 0.0
        self.lost_step = -1
        """Of the last snapshot, if its keeper died before it was told: another node's may have stored nothing
        for want of it, even where a new keeper was told since."""
        self.trusted_step = -1
        """Up to which replicas are known to hold the same; -1: nobody compares them."""
        self.skipped = 0
        """Snapshots not taken because the keeper still held every slot."""
        self._thread = threading.Thread(target=self._work, name="myriad-snapshot", daemon=True)
        self._thread.start()

    def take(self, step: int, wants: Wants, prepare: Callable[[], None]) -> None:
        """Begins a snapshot of the state as it is after ``step`` steps; nothing may change it before
        `settle`. ``prepare``: called before anything is copied, by whatever thread."""
        self.settle()
        self._told.wait()
        self._copied.clear()
        self._told.clear()
        self.lost_step = -1
        self._memory.trust(self.trusted_step)
        slot = self._memory.begin(step)
        self._copier.prepare = prepare
        if slot is not None:
            self._copier.begin(self._copies, slot)
        self._jobs.put((step, wants, slot))

    def settle(self) -> None:
        """Returns when the state may change: on a device, what is asked of it from here on may. Raises
        `RunFailedError` when keepers die again and again."""
        self._copier.settle(self._copied)
        if self._error is not None:
            raise RunFailedError(f"the checkpoint process is gone: {self._error}") from self._error

    def await_told(self) -> None:
        """Returns when the keeper has been told of the last snapshot."""
        self._told.wait()
        self.settle()

    def close(self) -> None:
        """After the last one."""
        self._jobs.put(None)
        self._thread.join()
        self._copier.close()

    def _work(self) -> None:
        self._copier.enter_thread()
        if sum(one.num_bytes for one in self._copies) < _SMALL_BYTES:
            with suppress(OSError):  # training's thread goes first where cores are scarce
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        self._memory.touch()
        while (job := self._jobs.get()) is not None:
            try:
                self._take_surely(*job)
            except BaseException as error:
                self._error = error
            finally:
                self._copied.set()
                self._told.set()

    def _take_surely(self, step: int, wants: Wants, slot: int | None) -> None:
        """Where the keeper has died a new one takes its place, and training goes on: it has lost the
        snapshots, this one too unless it is the ``last``, after which nothing changes any more."""
        try:
            self._take(step, wants, slot)
        except Closed:
            self.lost_step = step
            self._memory = self._rejoin_surely()
            self._copier.move(self._memory)
            if wants.last:
                self._take_surely(step, wants, self._fresh_slot(step))

    def _rejoin_surely(self) -> SnapshotMemory:
        """A new keeper may die while it is told what the old one knew."""
        while self._rejoins < _REJOINS:
            self._rejoins += 1
            with suppress(Closed):
                return self._rejoin()
        raise Closed(f"it died {_REJOINS} times")

    def _take(self, step: int, wants: Wants, slot: int | None) -> None:
        if slot is None and wants.last:
            slot = self._fresh_slot(step)
        if slot is None:
            self.skipped += 1
            if wants.durable:
                self._client.say_skipped(step)
            return
        self._copier.finish(self._copies, slot)
        self._memory.end(slot, hold=wants.hold)
        self._copied.set()
        if wants.hold or time.monotonic() - self._said_at > _SAY_SECONDS:
            self._client.say_whole(slot, step, durable=wants.durable, copies=wants.copies)
            self._said_at = time.monotonic()

    def _fresh_slot(self, step: int) -> int:
        """For the last snapshot: nothing changes any more, and there is time until one is free."""
        checked_at = time.monotonic()
        while (slot := self._memory.begin(step)) is None:
            if not self._client.is_alive():
                raise Closed("the snapshot server is gone and will release no slot")
            if time.monotonic() - checked_at > _CHECK_SECONDS:
                self._client.check()  # one that is stopped or hung releases none either
                checked_at = time.monotonic()
            time.sleep(_POLL_SECONDS)
        self._copier.begin(self._copies, slot)
        return slot


def _plan(rectangles: Sequence[Rectangle], pieces: Sequence[Piece]) -> list[_Copy]:
    """As few copies as possible: neighbours in live memory that are neighbours in the slot go together."""
    found: list[_Copy] = []
    for part, piece in zip(rectangles, pieces, strict=True):
        if not piece.num_bytes:
            continue
        values = part.values.detach()
        one = _Copy(values.view(-1) if values.is_contiguous() else values, piece.memory_start)
        both = found[-1].with_next(one) if found else None
        if both is not None:
            found[-1] = both
        else:
            found.append(one)
    return found


class _HostCopier:
    """Copies in the snapshot thread, without the interpreter's lock."""

    def __init__(self, memory: SnapshotMemory) -> None:
        self._memory = memory
        self.prepare: Callable[[], None]

    def enter_thread(self) -> None:
        """The calling thread is the one that calls `finish`."""

    def move(self, memory: SnapshotMemory) -> None:
        """From now on into this memory."""
        self._memory = memory

    def begin(self, copies: Sequence[_Copy], slot: int) -> None:
        """In training's thread: nothing yet."""

    def finish(self, copies: Sequence[_Copy], slot: int) -> None:
        """All of them."""
        self.prepare()
        base = self._memory.slot_address(slot)
        for one in copies:
            if one.source.is_contiguous():
                ctypes.memmove(base + one.start, one.source.data_ptr(), one.num_bytes)
            else:
                _place(self._memory, slot, one).copy_(one.source)

    def settle(self, copied: threading.Event) -> None:
        """Training waits until ``copied``."""
        copied.wait()

    def close(self) -> None:
        """Nothing is left open."""


_PIN_BYTES = 2**36
"""Most bytes that are registered with CUDA at once: drivers refuse hundreds of GiB. No copy may touch two
registrations."""


class _CudaCopier:
    """Copies on a stream of its own into the same memory, pinned; where CUDA does not pin it, in the snapshot
    thread, and the next update waits for that. Has run on no machine yet."""

    def __init__(self, memory: SnapshotMemory, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        # the snapshot thread sleeps until the second has passed: it would keep a core busy else
        self._updated, self._done = torch.cuda.Event(), torch.cuda.Event(blocking=True)
        self.prepare: Callable[[], None]
        self._pinned: list[int] = []
        self._pin(memory)

    def enter_thread(self) -> None:
        """Calls of CUDA from this thread are about this rank's device, and open no context on another."""
        torch.cuda.set_device(self._device)

    def move(self, memory: SnapshotMemory) -> None:
        """From now on into this memory."""
        self.close()
        self._pin(memory)

    def _pin(self, memory: SnapshotMemory) -> None:
        self._memory = memory
        for slot in range(memory.num_slots):
            for start in range(0, memory.slot_bytes, _PIN_BYTES):
                address = memory.slot_address(slot) + start
                size = min(_PIN_BYTES, memory.slot_bytes - start)
                code = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))
                if code:
                    self.close()
                    _forget_error(self._device)
                    _LOG.warning(
                        "snapshots are copied more slowly: CUDA error %d when their memory was pinned", code
                    )
                    return
                self._pinned.append(address)

    def begin(self, copies: Sequence[_Copy], slot: int) -> None:
        """Asks the device for all of them, once it has come this far in training's stream."""
        self.prepare()
        self._updated.record(torch.cuda.current_stream(self._device))
        if self._pinned:
            self._copy(copies, slot)

    def _copy(self, copies: Sequence[_Copy], slot: int) -> None:
        self._stream.wait_event(self._updated)
        with torch.cuda.stream(self._stream):
            for one in copies:
                _place(self._memory, slot, one).copy_(one.source, non_blocking=True)
        self._done.record(self._stream)

    def finish(self, copies: Sequence[_Copy], slot: int) -> None:
        """They are done when this returns; the device computes on."""
        if not self._pinned:
            self._copy(copies, slot)
        self._done.synchronize()

    def settle(self, copied: threading.Event) -> None:
        """Training's stream waits, not its thread; without pinned memory its thread waits too."""
        if not self._pinned:
            copied.wait()
        torch.cuda.current_stream(self._device).wait_event(self._done)

    def close(self) -> None:
        """Unpins."""
        while self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.pop())


def _forget_error(device: torch.device) -> None:
    """A failed call leaves its error to the next kernel that is started, which reports it as its own."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device)


def _within_pins(one: _Copy) -> Iterator[_Copy]:
    """The same copy in parts of which none touches two registrations of a slot."""
    if one.num_bytes <= _PIN_BYTES - one.start % _PIN_BYTES:
        yield one
        return
    rows_bytes = one.num_bytes // len(one.source)
    first = (_PIN_BYTES - one.start % _PIN_BYTES) // rows_bytes
    if first:
        yield from _within_pins(_Copy(one.source[:first], one.start))
    else:  # the first row is in both
        yield from _within_pins(_Copy(one.source[0], one.start))
        first = 1
    if first < len(one.source):
        yield from _within_pins(_Copy(one.source[first:], one.start + first * rows_bytes))


def _place(memory: SnapshotMemory, slot: int, one: _Copy) -> torch.Tensor:
    """Where a copy goes, as a tensor like its source."""
    view = memory.view(slot, one.start, one.num_bytes)
    return torch.frombuffer(view, dtype=one.source.dtype).view(one.source.shape)
