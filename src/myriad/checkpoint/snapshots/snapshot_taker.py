"""Copy this rank's state into snapshot memory, overlapped with the next iteration.

    step N    update | take: hand over  ...forward, backward...  | settle | update | ...
    thread           '--- copies live memory into a slot --------'
    server                                              '--- hashes, stores, sends to another node ---

The state does not change between two updates, so the copy can take the whole forward and backward pass.
Training waits (`settle`) only for the rest of the copy when the next update is about to start. On a GPU a
side stream copies into the same memory, which is pinned, and the update waits for that stream on the device.
"""

import ctypes
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile

import torch

from myriad.checkpoint.format.stored_shard import StoredShard
from myriad.checkpoint.snapshots.snapshot_client import SnapshotClient
from myriad.checkpoint.snapshots.snapshot_memory import SnapshotMemory
from myriad.errors import RunFailedError
from myriad.model.tensor_shard import TensorShard
from myriad.wire.socket_channel import Closed

__all__ = ["SlotHolds", "SnapshotPurpose", "SnapshotTaker"]

_LOG = logging.getLogger(__name__)

_POLL_SECONDS, _CHECK_SECONDS, _NICENESS = 0.01, 1.0, 10
_SMALL_BYTES = 2**26
"""A copy of more bytes runs at normal priority, so that the next update does not wait for it."""
_REPORT_SECONDS = 0.1
"""Shortest interval of messages about snapshots that need no action: the server finds them in memory."""


_REJOINS = 5
"""How many times the snapshot server may die in one attempt."""


@dataclass(frozen=True)
class SnapshotPurpose:
    """What happens to a snapshot besides staying in memory."""

    durable: bool = False
    copies: bool = False
    last: bool = False
    """No snapshot follows: it is taken even if that means waiting for a free slot."""

    @property
    def hold(self) -> bool:
        """Whether the slot is held until the snapshot is stored or copied."""
        return self.durable or self.copies


class SlotHolds:
    """Decides which snapshots a rank holds for the server.

    The server stores one step at a time and copies one at a time; of the steps that wait it takes the newest.
    So of the holds for storing, and of those for copying, the oldest is in progress and the newest is next.
    Any other is released if a newer snapshot needs a slot."""

    def __init__(self, memory: SnapshotMemory) -> None:
        self._memory = memory
        self._purposes: dict[int, SnapshotPurpose] = {}

    def may_hold(self, slot: int, purpose: SnapshotPurpose) -> bool:
        """Return whether to hold the snapshot in ``slot``. May release an older one for it."""
        if not purpose.hold:
            return False
        if not (purpose.last or self._memory.can_hold(slot)):
            useful = [one for one in self._superseded(purpose) if self._memory.can_hold(slot, released=one)]
            if not useful:
                return False
            self._memory.release(useful[-1])
        self._purposes[slot] = purpose
        return True

    def _superseded(self, purpose: SnapshotPurpose) -> list[int]:
        """Return the slots that wait for what a snapshot of this purpose waits for, oldest first."""
        held = [one.index for one in self._memory.complete() if one.held and one.index in self._purposes]
        stores = [slot for slot in held if self._purposes[slot].durable]
        copies = [slot for slot in held if self._purposes[slot].copies]
        started = {*_maybe_in_progress(stores, self._purposes), *_maybe_in_progress(copies, self._purposes)}
        waiting = {slot: self._purposes[slot] for slot in held if slot not in started}
        return [
            slot
            for slot, of in waiting.items()
            if of.durable <= purpose.durable and of.copies <= purpose.copies
        ]


def _maybe_in_progress(held: Sequence[int], purposes: Mapping[int, SnapshotPurpose]) -> list[int]:
    """Return the oldest of the slots that are held for storing, or for copying. One that is held for both may
    be stored already and still be copied, so the slot after it may be in progress."""
    num_both = sum(1 for _ in takewhile(lambda slot: purposes[slot].durable and purposes[slot].copies, held))
    return list(held[: num_both + 1])


@dataclass(frozen=True)
class _MemoryCopy:
    """Live memory, and the offset of its copy in a slot. A contiguous source has shape ``[n]``."""

    source: torch.Tensor
    start: int

    @property
    def num_bytes(self) -> int:
        return self.source.numel() * self.source.element_size()

    def with_next(self, other: "_MemoryCopy") -> "_MemoryCopy | None":
        """Return both copies as one if they are adjacent in live memory and in the slot, else ``None``."""
        if self.source.dim() != 1 or other.source.dim() != 1:
            return None
        follows = self.source.data_ptr() + self.num_bytes == other.source.data_ptr()
        same = self.source.untyped_storage().data_ptr() == other.source.untyped_storage().data_ptr()
        if not (follows and same and self.start + self.num_bytes == other.start):
            return None
        size = self.source.numel() + other.source.numel()
        return _MemoryCopy(self.source.as_strided((size,), (1,)), self.start)


class SnapshotTaker:
    """Takes the snapshots of one rank, one at a time."""

    def __init__(
        self,
        client: SnapshotClient,
        memory: SnapshotMemory,
        shards: Sequence[TensorShard],
        stored_shards: Sequence[StoredShard],
        device: torch.device,
        rejoin: Callable[[], SnapshotMemory],
    ) -> None:
        """``shards``: views of memory that stays in place. ``stored_shards``: `make_stored_shards` of them.

        ``rejoin`` returns memory of a new snapshot server after the old one has died."""
        self._client, self._memory, self._holds = client, memory, SlotHolds(memory)
        self._copier = _CudaCopier(memory, device) if device.type == "cuda" else _HostCopier(memory)
        self._rejoin, self._rejoins = rejoin, 0
        self._copies = [part for one in _plan(shards, stored_shards) for part in _within_pins(one)]
        self._jobs: queue.SimpleQueue[tuple[int, SnapshotPurpose, int | None] | None] = queue.SimpleQueue()
        self._copied, self._reported = threading.Event(), threading.Event()
        self._copied.set()
        self._reported.set()
        self._error: BaseException | None = None
        self._reported_at = 0.0
        self.lost_step = -1
        """Step of the last snapshot if the server died before it was notified; -1: it was notified.

        Other nodes may then have failed to store the step, even if a new server was notified later."""
        self.trusted_step = -1
        """Newest step at which replicas were known to be equal; -1: replicas are not compared."""
        self.skipped = 0
        """Number of snapshots not taken because the server held every slot."""
        self._thread = threading.Thread(target=self._work, name="myriad-snapshot", daemon=True)
        self._thread.start()

    def take(self, step: int, purpose: SnapshotPurpose, prepare: Callable[[], None]) -> None:
        """Start a snapshot of the state after ``step`` steps. The state must not change before `settle`.

        ``prepare`` is called before the copy, in the calling or the snapshot thread."""
        self.settle()
        self._reported.wait()
        self._copied.clear()
        self._reported.clear()
        self.lost_step = -1
        self._memory.trust(self.trusted_step)
        slot = self._memory.begin(step)
        self._copier.prepare = prepare
        if slot is not None:
            self._copier.begin(self._copies, slot)
        self._jobs.put((step, purpose, slot))

    def settle(self) -> None:
        """Wait until the state may change. On a GPU only work queued from here on may change it.

        Raises `RunFailedError` if snapshot servers died too often."""
        self._copier.settle(self._copied)
        if self._error is not None:
            raise RunFailedError(f"the snapshot server has ended: {self._error}") from self._error

    def await_reported(self) -> None:
        """Wait until the snapshot server has been notified of the last snapshot."""
        self._reported.wait()
        self.settle()

    def close(self) -> None:
        """Finish the last snapshot and stop the thread."""
        self._jobs.put(None)
        self._thread.join()
        self._copier.close()

    def _work(self) -> None:
        self._copier.enter_thread()
        if sum(one.num_bytes for one in self._copies) < _SMALL_BYTES:
            with suppress(OSError):  # the training thread has priority if cores are scarce
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        self._memory.touch()
        while (job := self._jobs.get()) is not None:
            try:
                self._take_with_rejoin(*job)
            except BaseException as error:
                self._error = error
            finally:
                self._copied.set()
                self._reported.set()

    def _take_with_rejoin(self, step: int, purpose: SnapshotPurpose, slot: int | None) -> None:
        """Take a snapshot. If the snapshot server died, join a new one and go on.

        The snapshots in the old server are lost. Only the ``last`` one is taken again: the state no longer
        changes after it."""
        try:
            self._take(step, purpose, slot)
        except Closed:
            self.lost_step = step
            self._memory = self._rejoin_with_retries()
            self._holds = SlotHolds(self._memory)
            self._copier.move(self._memory)
            if purpose.last:
                self._take_with_rejoin(step, purpose, self._fresh_slot(step))

    def _rejoin_with_retries(self) -> SnapshotMemory:
        """Join a new server, and retry if it dies too. Raises `Closed` after `_REJOINS` failures."""
        while self._rejoins < _REJOINS:
            self._rejoins += 1
            with suppress(Closed):
                return self._rejoin()
        raise Closed(f"it died {_REJOINS} times")

    def _take(self, step: int, purpose: SnapshotPurpose, slot: int | None) -> None:
        if slot is None and purpose.last:
            slot = self._fresh_slot(step)
        if slot is None:
            self.skipped += 1
            if purpose.durable:
                self._client.report_skipped(step)
            return
        self._copier.finish(self._copies, slot)
        holds = self._holds.may_hold(slot, purpose)
        self._memory.end(slot, hold=holds)
        self._copied.set()
        if purpose.hold and not holds:  # the snapshot is in memory, and the server is not asked to store it
            if purpose.durable:
                self._client.report_skipped(step)
        elif holds or time.monotonic() - self._reported_at > _REPORT_SECONDS:
            self._client.report_complete(slot, step, durable=purpose.durable, copies=purpose.copies)
            self._reported_at = time.monotonic()

    def _fresh_slot(self, step: int) -> int:
        """Wait for a free slot for the last snapshot, and start the copy. The state no longer changes."""
        checked_at = time.monotonic()
        while (slot := self._memory.begin(step)) is None:
            if not self._client.is_alive():
                raise Closed("the snapshot server has ended and will release no slot")
            if time.monotonic() - checked_at > _CHECK_SECONDS:
                self._client.check()  # a server that is stopped or hung releases no slot either
                checked_at = time.monotonic()
            time.sleep(_POLL_SECONDS)
        self._copier.begin(self._copies, slot)
        return slot


def _plan(shards: Sequence[TensorShard], stored_shards: Sequence[StoredShard]) -> list[_MemoryCopy]:
    """Plan as few copies as possible: merge neighbours in live memory that are neighbours in the slot."""
    found: list[_MemoryCopy] = []
    for part, shard in zip(shards, stored_shards, strict=True):
        if not shard.num_bytes:
            continue
        values = part.values.detach()
        one = _MemoryCopy(values.view(-1) if values.is_contiguous() else values, shard.memory_start)
        both = found[-1].with_next(one) if found else None
        if both is not None:
            found[-1] = both
        else:
            found.append(one)
    return found


class _HostCopier:
    """Copies in the snapshot thread, without holding the GIL."""

    def __init__(self, memory: SnapshotMemory) -> None:
        self._memory = memory
        self.prepare: Callable[[], None]

    def enter_thread(self) -> None:
        """Prepare the calling thread, which will call `finish`."""

    def move(self, memory: SnapshotMemory) -> None:
        """Copy into this memory from now on."""
        self._memory = memory

    def begin(self, copies: Sequence[_MemoryCopy], slot: int) -> None:
        """Start the copies from the training thread. On the host there is nothing to start."""

    def finish(self, copies: Sequence[_MemoryCopy], slot: int) -> None:
        """Make all copies, and return when they are done."""
        self.prepare()
        base = self._memory.slot_address(slot)
        for one in copies:
            if one.source.is_contiguous():
                ctypes.memmove(base + one.start, one.source.data_ptr(), one.num_bytes)
            else:
                _place(self._memory, slot, one).copy_(one.source)

    def settle(self, copied: threading.Event) -> None:
        """Block the training thread until ``copied`` is set."""
        copied.wait()

    def close(self) -> None:
        """Release resources; a host copier has none."""


_PIN_BYTES = 2**36
"""Largest number of bytes registered with CUDA at once: drivers refuse hundreds of GiB. A copy must not span
two registrations."""


class _CudaCopier:
    """Copies on a side stream into pinned memory. Has run on no machine yet.

    State that is in host memory anyway (layout.offload_optimizer) is copied by the snapshot thread. If CUDA
    cannot pin the memory, that thread copies everything. In both cases the next update waits for it."""

    def __init__(self, memory: SnapshotMemory, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        # blocking=True: the snapshot thread sleeps while it waits instead of keeping a core busy
        self._updated, self._done = torch.cuda.Event(), torch.cuda.Event(blocking=True)
        self.prepare: Callable[[], None]
        self._pinned: list[int] = []
        self._copies_on_host = False
        """Whether the snapshot in progress has state in host memory."""
        self._pin(memory)

    def enter_thread(self) -> None:
        """Select this rank's device in the snapshot thread, so that it creates no context on another one."""
        torch.cuda.set_device(self._device)

    def move(self, memory: SnapshotMemory) -> None:
        """Copy into this memory from now on."""
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

    def begin(self, copies: Sequence[_MemoryCopy], slot: int) -> None:
        """Queue all copies on the device, behind the work already queued on the training stream."""
        self.prepare()
        self._copies_on_host = not all(map(_is_on_device, copies))
        self._updated.record(torch.cuda.current_stream(self._device))
        if self._pinned:
            self._copy(copies, slot)

    def _copy(self, copies: Sequence[_MemoryCopy], slot: int) -> None:
        self._stream.wait_event(self._updated)
        with torch.cuda.stream(self._stream):
            for one in filter(_is_on_device, copies):
                _place(self._memory, slot, one).copy_(one.source, non_blocking=True)
        self._done.record(self._stream)

    def finish(self, copies: Sequence[_MemoryCopy], slot: int) -> None:
        """Return when the copies are done; the device continues to compute meanwhile."""
        if not self._pinned:
            self._copy(copies, slot)
        if self._copies_on_host:
            self._updated.synchronize()  # the copies of the last update to host memory have ended
            for one in copies:
                if not _is_on_device(one):
                    _place(self._memory, slot, one).copy_(one.source)
        self._done.synchronize()

    def settle(self, copied: threading.Event) -> None:
        """Make the training stream wait. If the snapshot thread copies, the training thread waits too."""
        if not self._pinned or self._copies_on_host:
            copied.wait()
        torch.cuda.current_stream(self._device).wait_event(self._done)

    def close(self) -> None:
        """Unregister the pinned memory."""
        while self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.pop())


def _is_on_device(one: _MemoryCopy) -> bool:
    return one.source.device.type != "cpu"


def _forget_error(device: torch.device) -> None:
    """Clear the CUDA error of a failed call, which the next kernel launch would report as its own."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device)


def _within_pins(one: _MemoryCopy) -> Iterator[_MemoryCopy]:
    """Split a copy so that no part spans two registrations of a slot."""
    if one.num_bytes <= _PIN_BYTES - one.start % _PIN_BYTES:
        yield one
        return
    rows_bytes = one.num_bytes // len(one.source)
    first = (_PIN_BYTES - one.start % _PIN_BYTES) // rows_bytes
    if first:
        yield from _within_pins(_MemoryCopy(one.source[:first], one.start))
    else:  # the first row spans the boundary
        yield from _within_pins(_MemoryCopy(one.source[0], one.start))
        first = 1
    if first < len(one.source):
        yield from _within_pins(_MemoryCopy(one.source[first:], one.start + first * rows_bytes))


def _place(memory: SnapshotMemory, slot: int, one: _MemoryCopy) -> torch.Tensor:
    """Return the destination of a copy in the slot, as a tensor like its source."""
    view = memory.view(slot, one.start, one.num_bytes)
    return torch.frombuffer(view, dtype=one.source.dtype).view(one.source.shape)
