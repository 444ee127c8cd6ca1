"""Snapshots of one attempt, a start of the ranks, on one node, and how the snapshot servers store and copy
them. Without torch.

complete ──► all ranks of rank 0's node have the step ──► its server asks all servers: store, or copy
                                                          then: release the slots held for it
all ranks exit ──► flush: store the newest step that all nodes have
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from myriad.checkpoint.format.checkpoint_manifest import StoredFile
from myriad.checkpoint.snapshots.checkpoint_writer import (
    CheckpointWriter,
    ReportEvent,
    Retention,
    SavedStep,
    StoreOutcome,
    read_progress,
    store_local,
)
from myriad.checkpoint.snapshots.peer_servers import PeerServers
from myriad.checkpoint.snapshots.rank_entry import RankEntry
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.wire.socket_channel import Message

__all__ = ["AttemptSnapshots"]

_OTHERS_WAIT_SECONDS = 60.0
"""How long a snapshot server waits for its own ranks' snapshots when another server asks for a step."""
_PASSED_REPORTED = 3
"""Report a fault after this many consecutive steps for which a rank of another node had no free slot."""


class _PassedOverError(OSError):
    """A rank had no free slot for a step and has snapshots of later steps."""


class AttemptSnapshots:
    """One attempt in a snapshot server.

    The server has the current attempt, and the earlier attempts that hold the step it resumed from."""

    def __init__(
        self, number: int, num_local: int, report: ReportEvent, on_copied: Callable[[int, int], None]
    ) -> None:
        """``num_local``: number of ranks on this node. ``on_copied(number, step)`` is called when other nodes
        have copies of all ranks' snapshots of a step."""
        self.number, self._num_local, self._report, self._on_copied = number, num_local, report, on_copied
        self._lock = threading.RLock()
        self._arrived = threading.Condition(self._lock)
        self._entries: dict[int, RankEntry] = {}
        self._wanted: dict[int, set[int]] = {}
        self._busy: Counter[int] = Counter()
        self._folder: CheckpointFolder | None = None
        self._copies: PeerServers | None = None
        self._storing: CheckpointWriter | None = None
        self._last_skipped, self._released, self._num_passed = -1, -1, 0
        self._newest_copy, self._is_copying = -1, False
        self._is_over = False

    def join(self, entry: RankEntry) -> None:
        """Add a rank. A rank that joins again replaces its earlier entry, whose memory is freed."""
        with self._lock:
            before = self._entries.get(entry.rank)
            self._entries[entry.rank] = entry
        if before is not None:
            before.close()

    def configure(self, message: Message, payload: memoryview) -> None:
        """Set how to store and copy. The first rank of the node sends this message."""
        folder = CheckpointFolder(message["url"])
        targets = {int(rank): node for rank, node in message["target_of"].items()}
        copies = PeerServers(
            message["nodes"], message["node"], message["token"], targets, encrypts=message["encrypt"]
        )
        if message["moved"]:
            host, port = message["nodes"][message["node"]]
            copies.request_all(self._order("moved", node=message["node"], host=host, port=port))
        with self._lock:
            self._folder, self._copies = folder, copies
            if message["node"] == 0:
                files, at = {}, 0
                for name, size in message["files"]:
                    files[name], at = bytes(payload[at : at + size]), at + size
                retention = Retention(message["keep"], message["max_age_seconds"])
                alarm_after, constant = message["alarm_after"], message["constant"]
                self._storing = CheckpointWriter(
                    folder, retention, constant, files, self._report, alarm_after
                )

    def _order(self, op: str, **fields: int | str) -> Message:
        """Return a request to the same attempt in the snapshot server of another node."""
        return {"op": op, "attempt": self.number, **fields}

    # Snapshots at hand

    def entries(self) -> list[RankEntry]:
        """Return the entries in order of rank."""
        with self._lock:
            return [self._entries[rank] for rank in sorted(self._entries)]

    def common_steps(self) -> list[int]:
        """Return the steps of which every rank of this node has a snapshot, ascending."""
        with self._lock:
            found = [set(entry.steps()) for entry in self._entries.values()]
            common = set.intersection(*found) if len(found) == self._num_local and found else set()
            return sorted(common)

    @property
    def is_idle(self) -> bool:
        """Whether no step is being stored or copied."""
        with self._lock:
            return not self._busy

    # Messages from the ranks of this node

    def on_complete(self, entry: RankEntry, message: Message) -> None:
        """Handle a rank's message that its snapshot is complete; start storing or copying the step."""
        step = message["step"]
        with self._lock:
            if self._is_over or self._entries.get(entry.rank) is not entry:
                return
            if message["durable"] and entry.rank == 0 and self._storing is not None:
                self._storing.expect(step)
            here = self._wanted.setdefault(step, set())
            here.add(entry.rank)
            self._arrived.notify_all()
            if len(here) < self._num_local:
                return
            self._drop_before(step)
            if self._storing is None:
                return  # the server of rank 0's node decides whether to store or copy
            if message["durable"]:
                self._begin(self._store, step)
            if message["copies"]:
                self._begin(self._copy, step)

    def _drop_before(self, step: int) -> None:
        """Drop the bookkeeping of earlier steps, and release their slots unless they are in use."""
        for earlier in [known for known in self._wanted if known < step]:
            del self._wanted[earlier]
        if self._storing is not None:
            self._release_before(step)

    def skipped(self, step: int) -> None:
        """Report, once a step, that a rank had no free slot for a snapshot that was to be stored."""
        with self._lock:
            is_known, self._last_skipped = step <= self._last_skipped, max(step, self._last_skipped)
        problem = "checkpoint not taken: earlier ones are still being stored"
        if not is_known and self._storing is not None:
            self._storing.give_up(step, problem)
        elif not is_known:
            self._report("fault", step=step, problem=problem)

    def leave(self, entry: RankEntry) -> None:
        """Mark a rank as gone. It may have completed a snapshot without reporting it."""
        with self._arrived:
            entry.gone = True
            self._arrived.notify_all()

    def wait_stored(self, step: int, seconds: float) -> StoreOutcome | None:
        """Return the storage outcome of a step; ``None``: it is still being stored or not yet requested.

        Valid in the snapshot server of rank 0's node."""
        if self._storing is None:
            time.sleep(seconds)
            return None
        return self._storing.wait(step, seconds)

    # Storing and copying

    def _begin(self, work: Callable[[int], None], step: int) -> None:
        """Start ``work`` in a thread. The caller holds the lock, so no later step releases this one first."""
        self._busy[step] += 1
        threading.Thread(target=self._work, args=(work, step), daemon=True).start()

    def _work(self, work: Callable[[int], None], step: int) -> None:
        try:
            work(step)
        finally:
            with self._lock:
                is_free = self._end_use(step)
                if is_free:
                    self._released = max(self._released, step)
            if is_free:
                self._release(step)
                if self._copies is not None:
                    self._copies.request_all(self._order("release", step=step))

    def _store(self, step: int, for_attempt: int | None = None) -> None:
        """Store a step. ``for_attempt``: the attempt number to commit under; default: this attempt's."""
        number = for_attempt or self.number
        storing = self._storing
        if storing is None or self._copies is None or not storing.begin(step):
            return
        first = self._entries.get(0)
        storing.trusted_step = -1 if first is None else first.memory.trusted

        def write() -> dict[str, StoredFile]:
            if self._is_over and number == self.number:
                raise OSError(f"another attempt of the run has taken over; this is attempt {number}")
            return self._write_all(step)

        storing.store(step, number, write, read_progress(self._entries.get(0), step))

    def _write_all(self, step: int, url: str | None = None) -> dict[str, StoredFile]:
        """Write the files of all ranks of all nodes. ``url``: another destination. Raises ``OSError``."""
        assert self._copies is not None, "configured"
        where = {} if url is None else {"url": url}
        answers = self._copies.request_all(self._order("store", step=step, **where))
        try:
            files = self.store_local(step, url)
            for answer in answers:
                files |= {name: StoredFile.parse(file) for name, file in answer()["files"].items()}
        finally:
            for answer in answers:  # the folder may be cleared only after the last writer has ended
                with suppress(OSError):
                    answer()
        return files

    def store_local(self, step: int, url: str | None = None) -> dict[str, StoredFile]:
        """Write the files of this node's ranks, once all of them have the snapshot.

        ``url``: a destination other than the run's storage. Raises ``OSError``."""
        with self._in_use(step):
            self._await_step(step)
            assert self._folder is not None, "configured"
            folder = self._folder if url is None else CheckpointFolder(url)
            return store_local(folder.storage, step, self.entries())

    def retry_store(self, step: int) -> None:
        """Retry a step that failed to store; `wait_stored` returns the outcome."""
        with self._lock:
            if self._storing is not None and not self._is_over:
                self._storing.expect(step)
                self._begin(self._store, step)

    def save(self, url: str, for_attempt: int) -> SavedStep | None:
        """Write the newest step that every rank has to another folder, under attempt number ``for_attempt``.

        Return ``None`` if this attempt has no such step. Raises ``OSError``."""
        storing = self._storing
        if storing is None or self._copies is None or not (common := self._steps_of_all_nodes()):
            return None
        step, folder, began = max(common), CheckpointFolder(url), time.monotonic()
        elsewhere = storing.elsewhere(folder)
        try:
            num_bytes = elsewhere.commit(
                step,
                for_attempt,
                lambda: self._write_all(step, url),
                read_progress(self._entries.get(0), step),
            )
        except Exception:
            elsewhere.clear(step, for_attempt)
            raise
        seconds, where = time.monotonic() - began, folder.at_step(step).where
        self._report("checkpoint", step=step, path=f"step-{step}", url=url, seconds=seconds, bytes=num_bytes)
        return SavedStep(step, num_bytes, where)

    def release_all(self) -> None:
        """Ask the snapshot servers of the other nodes to release what they hold."""
        if self._copies is not None:
            for answer in self._copies.request_all(self._order("unhold")):
                with suppress(OSError):
                    answer()

    @contextmanager
    def _in_use(self, step: int) -> Iterator[None]:
        """Keep a step from being released while it is in use."""
        with self._lock:
            self._busy[step] += 1
        try:
            yield
        finally:
            with self._lock:
                self._end_use(step)

    def _end_use(self, step: int) -> bool:
        """Drop one use of a step; return whether no use remains. The caller holds the lock."""
        self._busy[step] -= 1
        if self._busy[step]:
            return False
        del self._busy[step]
        return True

    def _copy(self, step: int) -> None:
        """Copy a step to other nodes, one step at a time.

        A step that has to wait is dropped when a newer one arrives. The last step before the ranks leave is
        therefore always copied."""
        with self._arrived:
            self._newest_copy = max(self._newest_copy, step)
            self._arrived.notify_all()
            self._arrived.wait_for(lambda: not self._is_copying or self._newest_copy > step)
            if self._newest_copy > step:
                return
            self._is_copying = True
        try:
            self._copy_everywhere(step)
        except OSError as error:
            self._report("fault", step=step, problem=f"snapshots not copied to other nodes: {error}")
        finally:
            with self._arrived:
                self._is_copying = False
                self._arrived.notify_all()

    def _copy_everywhere(self, step: int) -> None:
        copies = self._copies
        assert copies is not None
        answers = copies.request_all(self._order("copy", step=step))
        if not all([self.copy_local(step), *(answer()["has"] for answer in answers)]):
            return self._pass_over(step)
        self._num_passed, answers = 0, copies.request_all(self._order("copied", step=step))
        self._on_copied(self.number, step)
        for answer in answers:  # wait before the step is released
            answer()

    def _pass_over(self, step: int) -> None:
        """Count a step that was not copied; report a fault at `_PASSED_REPORTED` in a row."""
        self._num_passed += 1
        if self._num_passed == _PASSED_REPORTED:
            problem = f"for {_PASSED_REPORTED} steps in a row a rank had no memory left"
            self._report("fault", step=step, problem=f"snapshots not copied to other nodes: {problem}")

    def copy_local(self, step: int) -> bool:
        """Send this node's snapshots of a step to the nodes that keep their copies.

        Return False if a rank had no free slot for the step, so that no snapshot of it exists."""
        with self._in_use(step):
            try:
                self._await_step(step)
            except _PassedOverError:
                return False
            assert self._copies is not None
            self._copies.send_copies(step, self.entries())
            return True

    @property
    def makes_copies(self) -> bool:
        """Whether snapshots of this node are copied to other nodes."""
        return self._copies is not None and self._copies.has_targets

    def keep(self, step: int) -> None:
        """Keep this node's part of a step that other nodes have copies of, until newer copies exist."""
        for entry in self.entries():
            entry.memory.keep(step)

    def _await_step(self, step: int) -> None:
        """Wait until all ranks of this node have the step, or until the missing ranks never will.

        Raises ``OSError`` if a rank has no snapshot of the step."""

        def is_past(one: RankEntry) -> bool:
            return max(one.steps(), default=-1) > step

        def missing() -> list[RankEntry]:
            return [entry for entry in self.entries() if step not in entry.steps()]

        def settled() -> bool:
            never = all(one.gone or is_past(one) for one in missing())
            return never or self._is_over

        with self._arrived:
            self._arrived.wait_for(settled, _OTHERS_WAIT_SECONDS)
            if (left := missing()) or len(self._entries) < self._num_local:
                are_past = all(is_past(one) and not one.gone for one in left)
                is_full = len(self._entries) == self._num_local and not self._is_over
                error = _PassedOverError if is_full and are_past else OSError
                raise error(f"not all ranks of the node have a snapshot of step {step}")

    def _release(self, step: int) -> None:
        for entry in self.entries():
            entry.release(step)

    def _release_before(self, step: int) -> None:
        for entry in self.entries():
            for slot in entry.memory.complete():
                if slot.held and slot.step < step and slot.step not in self._busy:
                    entry.memory.release(slot.index)

    # Requests from the snapshot servers of other nodes

    def release_step(self, step: int) -> None:
        """Release a step and earlier ones, which the snapshot server of rank 0's node no longer needs."""
        self._release(step)
        self._release_before(step)

    def move(self, node: int, host: str, port: int) -> None:
        """Note the address of a new snapshot server that replaces the one of another node.

        If rank 0's node lost its server, the steps that it had requested are released, because the new server
        will not release them. The server of rank 0's node also repeats its last release to the new server:
        ranks may have joined that server before it could receive a release, and may have no free slot."""
        if self._copies is not None:
            self._copies.move(node, (host, port))
            if self._released >= 0:
                self._copies.ask(node, self._order("release", step=self._released))
        if node == 0:
            self._release_before(max((max(one.steps(), default=-1) for one in self.entries()), default=-1))

    # End of an attempt

    def end(self, resumed: int | None) -> bool:
        """End this attempt: a newer one has resumed from step ``resumed``. Later steps are invalid.

        Return whether this attempt has a snapshot of that step, to keep until the newer attempt has one."""
        with self._arrived:
            self._is_over = True
            for rank, entry in list(self._entries.items()):
                entry.newest = resumed
                if resumed is None or resumed not in entry.steps():
                    self._entries.pop(rank).close()
            self._arrived.notify_all()
            return bool(self._entries)

    def close(self) -> None:
        """Free the memory of all ranks."""
        with self._lock:
            for entry in self._entries.values():
                entry.close()
            self._entries = {}

    def flush(self, for_attempt: int) -> bool:
        """Store the newest step that every rank has, unless it is durable. Return whether there is one.

        ``for_attempt``: the newest attempt number, to commit under. Called when all ranks of this node are
        gone."""
        storing = self._storing
        if storing is None or self._copies is None:
            return False
        with suppress(OSError):
            common = self._steps_of_all_nodes()
            newest = max(common, default=-1)
            if newest > storing.stored_step:
                self._store(newest, for_attempt)
            return bool(common)
        return False

    def _steps_of_all_nodes(self) -> set[int]:
        """Return the steps of which every rank of the attempt has a snapshot. Raises ``OSError``."""
        common = set(self.common_steps())
        if common and self._copies is not None:
            for answer in self._copies.request_all(self._order("steps")):
                common &= set(answer()["steps"])
        return common
