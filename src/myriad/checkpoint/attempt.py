"""One attempt's ranks of one node: their snapshots, and how the keepers store and copy them. No torch here.

whole ──► all ranks of rank 0's node have a step ──► its keeper asks all: store, or copy
                                                     then: release what was held for it
the ranks are gone ──► flush: the newest step that all nodes have is stored
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from myriad.checkpoint.copies import Copies
from myriad.checkpoint.folder import CheckpointFolder
from myriad.checkpoint.manifest import FileRecord
from myriad.checkpoint.member import Member
from myriad.checkpoint.storing import Outcome, Retention, Storing, Tell, read_progress, store_own
from myriad.checkpoint.wire import Message

__all__ = ["Attempt", "Saved"]

_OTHERS_WAIT_SECONDS = 60.0
"""How long a keeper waits for its own ranks' snapshots when another asks for a step."""
_PASSED_TOLD = 3
"""Steps in a row that were to be copied and that a rank of another node had no memory left for."""


@dataclass(frozen=True)
class Saved:
    """A step that was written to a place of a person's choice."""

    step: int
    bytes: int
    where: str


class _PassedOverError(OSError):
    """A rank had no memory left for a step, and has later ones."""


class Attempt:
    """Of a keeper, which has one that is present, and those whose steps the present one went on from."""

    def __init__(
        self, number: int, num_local: int, tell: Tell, on_copied: Callable[[int, int], None]
    ) -> None:
        """``num_local``: ranks of this node; ``on_copied(number, step)``: other nodes have copies of all
        ranks' snapshots."""
        self.number, self._num_local, self._tell, self._on_copied = number, num_local, tell, on_copied
        self._lock = threading.RLock()
        self._arrived = threading.Condition(self._lock)
        self._members: dict[int, Member] = {}
        self._wanted: dict[int, set[int]] = {}
        self._busy: Counter[int] = Counter()
        self._folder: CheckpointFolder | None = None
        self._copies: Copies | None = None
        self._storing: Storing | None = None
        self._last_skipped, self._released, self._num_passed = -1, -1, 0
        self._newest_copy, self._is_copying = -1, False
        self._is_over = False

    def join(self, member: Member) -> None:
        """One of its ranks; one that joins again begins anew, and what it had is given back."""
        with self._lock:
            before = self._members.get(member.rank)
            self._members[member.rank] = member
        if before is not None:
            before.close()

    def configure(self, message: Message, payload: memoryview) -> None:
        """How to store, from the first rank of the node."""
        folder = CheckpointFolder(message["url"])
        targets = {int(rank): node for rank, node in message["target_of"].items()}
        copies = Copies(message["nodes"], message["node"], message["token"], targets)
        if message["moved"]:
            host, port = message["nodes"][message["node"]]
            copies.ask_all(self._order("moved", node=message["node"], host=host, port=port))
        with self._lock:
            self._folder, self._copies = folder, copies
            if message["node"] == 0:
                files, at = {}, 0
                for name, size in message["files"]:
                    files[name], at = bytes(payload[at : at + size]), at + size
                retention = Retention(message["keep"], message["max_age_seconds"])
                alarm_after, constant = message["alarm_after"], message["constant"]
                self._storing = Storing(folder, retention, constant, files, self._tell, alarm_after)

    def _order(self, op: str, **fields: int | str) -> Message:
        """To the same attempt in another keeper."""
        return {"op": op, "attempt": self.number, **fields}

    # What there is

    def members(self) -> list[Member]:
        """By rank."""
        with self._lock:
            return [self._members[rank] for rank in sorted(self._members)]

    def common_steps(self) -> list[int]:
        """Of which every rank of this node has a snapshot, ascending."""
        with self._lock:
            found = [set(member.steps()) for member in self._members.values()]
            whole = set.intersection(*found) if len(found) == self._num_local and found else set()
            return sorted(whole)

    @property
    def is_idle(self) -> bool:
        """Nothing is being stored or copied."""
        with self._lock:
            return not self._busy

    # From its ranks

    def whole(self, member: Member, message: Message) -> None:
        """A rank has copied its state into a slot."""
        step = message["step"]
        with self._lock:
            if self._is_over or self._members.get(member.rank) is not member:
                return
            if message["durable"] and member.rank == 0 and self._storing is not None:
                self._storing.expect(step)
            here = self._wanted.setdefault(step, set())
            here.add(member.rank)
            self._arrived.notify_all()
            if len(here) < self._num_local:
                return
            self._drop_before(step)
            if self._storing is None:
                return  # the keeper of rank 0's node says what becomes of it
            if message["durable"]:
                self._begin(self._store, step)
            if message["copies"]:
                self._begin(self._copy, step)

    def _drop_before(self, step: int) -> None:
        """Snapshots of earlier steps that nobody is at work with wait no longer."""
        for earlier in [known for known in self._wanted if known < step]:
            del self._wanted[earlier]
        if self._storing is not None:
            self._release_before(step)

    def skipped(self, step: int) -> None:
        """A rank had no memory left for a step that was to be stored: it is told once."""
        with self._lock:
            is_known, self._last_skipped = step <= self._last_skipped, max(step, self._last_skipped)
        problem = "checkpoint not taken: earlier ones are still being stored"
        if not is_known and self._storing is not None:
            self._storing.give_up(step, problem)
        elif not is_known:
            self._tell("fault", step=step, problem=problem)

    def leave(self, member: Member) -> None:
        """A rank is gone; what it has not said to be whole may be so."""
        with self._arrived:
            member.gone = True
            self._arrived.notify_all()

    def wait_stored(self, step: int, seconds: float) -> Outcome | None:
        """What became of a step; ``None``: it is still being stored, or the keeper was told nothing yet. Of
        the keeper of rank 0's node."""
        if self._storing is None:
            time.sleep(seconds)
            return None
        return self._storing.wait(step, seconds)

    # Storing and copying

    def _begin(self, work: Callable[[int], None], step: int) -> None:
        """With the lock held: no later step may release what is about to be stored."""
        self._busy[step] += 1
        threading.Thread(target=self._work, args=(work, step), daemon=True).start()

    def _work(self, work: Callable[[int], None], step: int) -> None:
        try:
            work(step)
        finally:
            with self._lock:
                is_free = self._leave_alone(step)
                if is_free:
                    self._released = max(self._released, step)
            if is_free:
                self._release(step)
                if self._copies is not None:
                    self._copies.ask_all(self._order("release", step=step))

    def _store(self, step: int, for_attempt: int | None = None) -> None:
        """``for_attempt``: the number under which it is committed, if not this one's."""
        number = for_attempt or self.number
        storing = self._storing
        if storing is None or self._copies is None or not storing.begin(step):
            return
        first = self._members.get(0)
        storing.trusted_step = -1 if first is None else first.memory.trusted

        def write() -> dict[str, FileRecord]:
            if self._is_over and number == self.number:
                raise OSError(f"another attempt of the run has taken over; this is attempt {number}")
            return self._write_all(step)

        storing.store(step, number, write, self._progress_at(step))

    def _progress_at(self, step: int) -> Mapping[str, Any]:
        """Where the run was after a step."""
        first = self._members.get(0)
        slot = None if first is None else first.slot_of(step)
        return {} if first is None or slot is None else read_progress(first, slot)

    def _write_all(self, step: int, url: str | None = None) -> dict[str, FileRecord]:
        """Files of all nodes' ranks; ``url``: where, if not where the run stores. Raises ``OSError``."""
        assert self._copies is not None, "configured"
        where = {} if url is None else {"url": url}
        answers = self._copies.ask_all(self._order("store", step=step, **where))
        try:
            files = self.store_own(step, url)
            for answer in answers:
                files |= {name: FileRecord.parse(file) for name, file in answer()["files"].items()}
        finally:
            for answer in answers:  # whoever clears the folder comes after the last writer
                with suppress(OSError):
                    answer()
        return files

    def store_own(self, step: int, url: str | None = None) -> dict[str, FileRecord]:
        """Files of this node's ranks, once all of them have the snapshot; ``url``: where, if not where the
        run stores. Raises ``OSError``."""
        with self._at_work(step):
            self._await_step(step)
            assert self._folder is not None, "configured"
            folder = self._folder if url is None else CheckpointFolder(url)
            return store_own(folder.storage, step, self.members())

    def store_again(self, step: int) -> None:
        """Try once more to store a step that failed; `wait_stored` says what becomes of it."""
        with self._lock:
            if self._storing is not None and not self._is_over:
                self._storing.expect(step)
                self._begin(self._store, step)

    def save(self, url: str, for_attempt: int) -> Saved | None:
        """Write the newest step that every rank has to another folder, under the number ``for_attempt``;
        ``None``: this attempt has no such step. Raises ``OSError``."""
        storing = self._storing
        if storing is None or self._copies is None or not (common := self._steps_of_all_nodes()):
            return None
        step, folder, began = max(common), CheckpointFolder(url), time.monotonic()
        elsewhere = storing.elsewhere(folder)
        try:
            num_bytes = elsewhere.commit(
                step, for_attempt, lambda: self._write_all(step, url), self._progress_at(step)
            )
        except Exception:
            elsewhere.clear(step, for_attempt)
            raise
        seconds, where = time.monotonic() - began, folder.at_step(step).where
        self._tell("checkpoint", step=step, path=f"step-{step}", url=url, seconds=seconds, bytes=num_bytes)
        return Saved(step, num_bytes, where)

    def release_all(self) -> None:
        """Ask the snapshot servers of the other nodes to release what they hold."""
        if self._copies is not None:
            for answer in self._copies.ask_all(self._order("unhold")):
                with suppress(OSError):
                    answer()

    @contextmanager
    def _at_work(self, step: int) -> Iterator[None]:
        """What is told of later steps releases this one not."""
        with self._lock:
            self._busy[step] += 1
        try:
            yield
        finally:
            with self._lock:
                self._leave_alone(step)

    def _leave_alone(self, step: int) -> bool:
        """With the lock held: whether nobody is at work with it any more."""
        self._busy[step] -= 1
        if self._busy[step]:
            return False
        del self._busy[step]
        return True

    def _copy(self, step: int) -> None:
        """One step at a time: one that comes meanwhile waits, and gives way to one that comes after it. The
        last before ranks leave is copied, however many came shortly before."""
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
            self._tell("fault", step=step, problem=f"snapshots not copied to other nodes: {error}")
        finally:
            with self._arrived:
                self._is_copying = False
                self._arrived.notify_all()

    def _copy_everywhere(self, step: int) -> None:
        copies = self._copies
        assert copies is not None
        answers = copies.ask_all(self._order("copy", step=step))
        if not all([self.copy_own(step), *(answer()["has"] for answer in answers)]):
            return self._pass_over(step)
        self._num_passed, answers = 0, copies.ask_all(self._order("copied", step=step))
        self._on_copied(self.number, step)
        for answer in answers:  # before the step is released
            answer()

    def _pass_over(self, step: int) -> None:
        """The next step will be copied; told once it is not."""
        self._num_passed += 1
        if self._num_passed == _PASSED_TOLD:
            problem = f"for {_PASSED_TOLD} steps in a row a rank had no memory left"
            self._tell("fault", step=step, problem=f"snapshots not copied to other nodes: {problem}")

    def copy_own(self, step: int) -> bool:
        """Sends this node's snapshots of a step to the nodes that keep copies of them. False: there is none
        of a rank that had no memory left for it."""
        with self._at_work(step):
            try:
                self._await_step(step)
            except _PassedOverError:
                return False
            assert self._copies is not None
            self._copies.send_own(step, self.members())
            return True

    @property
    def makes_copies(self) -> bool:
        """Whether snapshots of this node go to others."""
        return self._copies is not None and self._copies.has_targets

    def keep(self, step: int) -> None:
        """There are copies of a step: this node's own part of it stays until there are newer ones."""
        for member in self.members():
            member.memory.keep(step)

    def _await_step(self, step: int) -> None:
        """Until the ranks of this node have it, or those that have not never will. Raises ``OSError``."""

        def is_past(one: Member) -> bool:
            return max(one.steps(), default=-1) > step

        def missing() -> list[Member]:
            return [member for member in self.members() if step not in member.steps()]

        def settled() -> bool:
            never = all(one.gone or is_past(one) for one in missing())
            return never or self._is_over

        with self._arrived:
            self._arrived.wait_for(settled, _OTHERS_WAIT_SECONDS)
            if (left := missing()) or len(self._members) < self._num_local:
                are_past = all(is_past(one) and not one.gone for one in left)
                whole = len(self._members) == self._num_local and not self._is_over
                error = _PassedOverError if whole and are_past else OSError
                raise error(f"not all ranks of the node have a snapshot of step {step}")

    def _release(self, step: int) -> None:
        for member in self.members():
            member.release(step)

    def _release_before(self, step: int) -> None:
        for member in self.members():
            for slot in member.memory.whole():
                if slot.held and slot.step < step and slot.step not in self._busy:
                    member.memory.release(slot.index)

    # From the keepers of other nodes

    def release_step(self, step: int) -> None:
        """The keeper of rank 0's node needs a step no longer, nor those before."""
        self._release(step)
        self._release_before(step)

    def move(self, node: int, host: str, port: int) -> None:
        """The keeper of another node has died, and a new one is there. That of rank 0's node will not say any
        more that it needs what it had asked for. It itself says again which step nobody needs any more: the
        new keeper has ranks since before it could be told, and they may be out of memory."""
        if self._copies is not None:
            self._copies.move(node, (host, port))
            if self._released >= 0:
                self._copies.ask(node, self._order("release", step=self._released))
        if node == 0:
            self._release_before(max((max(one.steps(), default=-1) for one in self.members()), default=-1))

    # The end

    def end(self, resumed: int | None) -> bool:
        """A newer attempt has begun, from the step ``resumed``. Newer ones than that never count again: they
        were no good. Whether it has a snapshot of that step, to be kept until the newer attempt has some."""
        with self._arrived:
            self._is_over = True
            for rank, member in list(self._members.items()):
                member.newest = resumed
                if resumed is None or resumed not in member.steps():
                    self._members.pop(rank).close()
            self._arrived.notify_all()
            return bool(self._members)

    def close(self) -> None:
        """Its memory is needed no longer."""
        with self._lock:
            for member in self._members.values():
                member.close()
            self._members = {}

    def flush(self, for_attempt: int) -> bool:
        """Stores the newest step that every rank has, unless it is durable; ``for_attempt``: the newest one.
        Whether there is such a step. For when all ranks of this node are gone."""
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
            for answer in self._copies.ask_all(self._order("steps")):
                common &= set(answer()["steps"])
        return common
