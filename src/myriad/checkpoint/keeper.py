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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from myriad.checkpoint.copied import CopiedMembers
from myriad.checkpoint.copies import Copies
from myriad.checkpoint.folder import CheckpointFolder
from myriad.checkpoint.manifest import FileRecord
from myriad.checkpoint.member import Hasher, Member
from myriad.checkpoint.memory import SnapshotMemory
from myriad.checkpoint.piece import snapshot_bytes, split_pieces
from myriad.checkpoint.storing import Outcome, Retention, Storing, read_progress, store_own
from myriad.checkpoint.wire import Message
from myriad.jsonl import append_line

__all__ = ["Keeper"]

_OTHERS_WAIT_SECONDS = 60.0
"""How long a keeper waits for its own ranks' snapshots when another asks for a step."""


class Keeper:
    """Everything but the sockets (`myriad.checkpoint.keeper_process`)."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._members: dict[int, Member] = {}
        self._past: list[Member] = []
        self.copied = CopiedMembers()
        self._attempt, self._num_local = 0, 0
        self._wanted: dict[int, dict[int, Message]] = {}
        self._arrived = threading.Condition(self._lock)
        self._storing: Storing | None = None
        self._folder: CheckpointFolder | None = None
        self._copies: Copies | None = None
        self._events: Path | None = None
        self._hasher = Hasher()
        self._busy: dict[int, int] = {}
        self.linger_seconds = 0.0

    # Messages of the ranks of this node

    def join(self, message: Message, payload: memoryview) -> Member:
        """A rank of the newest attempt. Raises ``OSError`` for one of an older attempt."""
        attempt = message["attempt"]
        with self._lock:
            if attempt < self._attempt:
                raise OSError(f"attempt {self._attempt} has taken over; this is attempt {attempt}")
            if attempt > self._attempt:
                self._set_past(message["resumed"])
                self._members, self._wanted, self._busy = {}, {}, {}
                self._attempt, self._num_local = attempt, message["num_local"]
                self._storing = self._copies = None
                self._arrived.notify_all()
        pieces = split_pieces(message["pieces"], bytes(payload))
        descriptor = SnapshotMemory.create(message["num_slots"], snapshot_bytes(pieces))
        member = Member(message["attempt"], message["world"], message["rank"], pieces, descriptor)
        threading.Thread(target=member.memory.touch, daemon=True).start()
        with self._lock:
            self._members[member.rank] = member
        return member

    def _set_past(self, resumed: int | None) -> None:
        """The step that a new attempt goes on from stays, from however many attempts ago, until the new one
        has snapshots of its own. Newer ones never count again: they were no good."""
        before = {id(one): one for one in (*self._past, *self._members.values(), *self.copied.members())}
        kept = {key for key, one in before.items() if resumed is not None and resumed in one.steps()}
        self._past = [one for key, one in before.items() if key in kept and not one.copied]
        self.copied.keep([one for key, one in before.items() if key in kept and one.copied])
        for key, one in before.items():
            one.newest = resumed
            if key not in kept:
                one.close()

    def configure(self, message: Message, payload: memoryview) -> None:
        """How this attempt stores, from the first rank of the node."""
        self._events = Path(message["events"])
        self.linger_seconds = message["linger_seconds"]
        with self._lock:
            self._folder = CheckpointFolder(message["url"])
            targets = {int(rank): node for rank, node in message["target_of"].items()}
            self._copies = Copies(message["nodes"], message["node"], message["token"], targets)
        if message["moved"]:
            host, port = message["nodes"][message["node"]]
            self._copies.ask_all({"op": "moved", "node": message["node"], "host": host, "port": port})
        if message["node"]:
            return
        files, at = {}, 0
        for name, size in message["files"]:
            files[name], at = bytes(payload[at : at + size]), at + size
        retention = Retention(message["keep"], message["max_age_seconds"])
        self._storing = Storing(
            self._folder, retention, message["constant"], files, self.tell, message["alarm_after"]
        )

    def whole(self, member: Member, message: Message) -> None:
        """A rank has copied its state into a slot."""
        step = message["step"]
        with self._lock:
            if self._members.get(member.rank) is not member:
                return  # of an earlier attempt
            if not message["durable"]:  # storing hashes as it writes
                self._hasher.put(member, message["slot"], step)
            elif member.rank == 0 and self._storing is not None:
                self._storing.expect(step)
            here = self._wanted.setdefault(step, {})
            here[member.rank] = message
            self._arrived.notify_all()
            if len(here) < self._num_local:
                return
            self._drop_before(step)
            if self._storing is None:
                return
            if message["durable"]:
                self._begin(self._store, step)
            if message["copies"] and self._copies is not None:
                self._begin(self._copy, step)

    def _begin(self, work: Callable[[int], None], step: int) -> None:
        """With the lock held: no later step may release what is about to be stored."""
        self._busy[step] = self._busy.get(step, 0) + 1
        threading.Thread(target=self._work, args=(work, step), daemon=True).start()

    def _work(self, work: Callable[[int], None], step: int) -> None:
        try:
            work(step)
        finally:
            with self._lock:
                self._busy[step] = self._busy.get(step, 1) - 1
                free = self._busy[step] <= 0
                if free:
                    self._busy.pop(step, None)
            if free:
                self._release(step)
                if self._copies is not None and self._storing is not None:
                    self._copies.ask_all({"op": "release", "step": step})

    def _release(self, step: int) -> None:
        for member in self.members():
            member.release(step)

    def _drop_before(self, step: int) -> None:
        """Snapshots of earlier steps that nobody is at work with wait no longer."""
        for earlier in [known for known in self._wanted if known < step]:
            del self._wanted[earlier]
        if len(self.common_steps()) > 1:
            self._forget_past()
        if self._storing is None:
            return  # the keeper of rank 0's node says when
        for member in self._members.values():
            for slot in member.memory.whole():
                if slot.held and slot.step < step and slot.step not in self._busy:
                    member.memory.release(slot.index)

    def common_steps(self) -> list[int]:
        """Steps of which all present ranks of this node have a snapshot: with two, no past is needed."""
        found = [set(member.steps()) for member in self._members.values()]
        whole = set.intersection(*found) if len(found) == self._num_local and found else set()
        return sorted(whole)

    def _forget_past(self) -> None:
        for member in self._past:
            member.close()
        self._past = []

    # Storing and copying

    def _store(self, step: int) -> None:
        with self._lock:
            storing, copies, attempt = self._storing, self._copies, self._attempt
            first = self._members.get(0)
        if storing is None or copies is None or first is None:
            return  # a new attempt has begun
        if not storing.begin(step):
            return
        slot = first.slot_of(step)
        progress = {} if slot is None else read_progress(first, slot)

        def write() -> dict[str, FileRecord]:
            answers = copies.ask_all({"op": "store", "step": step, "attempt": attempt})
            files = self.store_own(step, attempt)
            for answer in answers:
                files |= {name: FileRecord.parse(file) for name, file in answer()["files"].items()}
            return files

        storing.store(step, attempt, write, progress)

    def store_own(self, step: int, attempt: int) -> dict[str, FileRecord]:
        """Files of this node's ranks, once all of them have the snapshot. Raises ``OSError``."""
        with self._lock:
            self._await_step(step, attempt)
            assert self._folder is not None, "configured"
            storage, members = self._folder.storage, self.members()
        return store_own(storage, step, members)

    def _copy(self, step: int) -> None:
        copies = self._copies
        assert copies is not None
        with copies.one_at_a_time() as free:
            if not free:
                return
            try:
                answers = copies.ask_all({"op": "copy", "step": step})
                self.copy_own(step)
                for answer in answers:
                    answer()
                copies.ask_all({"op": "copied"})
                self.forget_copies()
            except OSError as error:
                self.tell("fault", step=step, problem=f"snapshots not copied to other nodes: {error}")

    def copy_own(self, step: int) -> None:
        """Sends this node's snapshots of a step to the nodes that keep copies of them."""
        self._await_step(step)
        assert self._copies is not None
        self._copies.send_own(step, self.members())

    def forget_copies(self) -> None:
        """Those of earlier attempts: all of this one's are there."""
        self.copied.forget_before(self._attempt)

    def move(self, message: Message) -> None:
        """The keeper of another node has died, and a new one is there. That of rank 0's node will not say any
        more that it needs what it had asked for."""
        if self._copies is not None:
            self._copies.move(message["node"], (message["host"], message["port"]))
        if message["node"] == 0:
            self._release_before(max((max(one.steps(), default=-1) for one in self.members()), default=-1))

    def release_step(self, step: int) -> None:
        """The keeper of rank 0's node needs a step no longer."""
        self._release(step)
        self._release_before(step)

    def _release_before(self, step: int) -> None:
        for member in self.members():
            for slot in member.memory.whole():
                if slot.held and slot.step < step:
                    member.memory.release(slot.index)

    def leave(self, member: Member) -> None:
        """A rank is gone; what it has not said to be whole may be so."""
        with self._arrived:
            member.gone = True
            self._arrived.notify_all()

    def _await_step(self, step: int, attempt: int | None = None) -> None:
        """Until the ranks of this node have it, or those that have not never will; ``attempt``: nor once a
        newer one than this has begun."""

        def missing() -> list[Member]:
            return [member for member in self.members() if step not in member.steps()]

        def settled() -> bool:
            if attempt is not None and attempt != self._attempt:
                return True
            return all(one.gone or max(one.steps(), default=-1) > step for one in missing())

        with self._arrived:
            self._arrived.wait_for(settled, _OTHERS_WAIT_SECONDS)
            if attempt is not None and attempt != self._attempt:
                raise OSError(f"attempt {self._attempt} has taken over; this is attempt {attempt}")
            if missing() or len(self._members) < self._num_local:
                raise OSError(f"not all ranks of the node have a snapshot of step {step}")

    def wait_stored(self, step: int, seconds: float) -> Outcome | None:
        """What became of a step; ``None``: it is still being stored. Of the keeper of rank 0's node."""
        storing = self._storing
        if storing is None:  # of another node, or so new that it was told nothing yet
            time.sleep(seconds)
            return None
        return storing.wait(step, seconds)

    # The end

    def flush(self) -> None:
        """All ranks of this node are gone: begins to store the newest snapshot that every rank has. In a
        thread of its own: what goes wrong there may not end the keeper, and with it the snapshots."""
        with self._lock:
            self._begin(self._flush, -1)

    def _flush(self, _: int) -> None:
        storing, copies = self._storing, self._copies
        if storing is None or copies is None or len(self._members) < self._num_local:
            return
        with suppress(OSError):
            common = set(self.common_steps())
            for answer in copies.ask_all({"op": "steps"}):
                common &= set(answer()["steps"])
            newest = max(common, default=-1)
            if newest > storing.stored_step:
                self._store(newest)

    @property
    def is_idle(self) -> bool:
        """Nothing is being stored or copied."""
        with self._lock:
            return not self._busy

    # Everybody

    def members(self) -> list[Member]:
        """The ranks of the present attempt, of this node."""
        with self._lock:
            return [self._members[rank] for rank in sorted(self._members)]

    def snapshots(self) -> list[Member]:
        """Whatever a new attempt may load from."""
        with self._lock:
            return [*self._members.values(), *self._past, *self.copied.members()]

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
            writer = threading.Thread(target=_append, args=(self._events, line), daemon=True)
            writer.start()
            writer.join(5.0)


def _append(path: Path, line: dict[str, Any]) -> None:
    with suppress(OSError):
        append_line(path, line)
