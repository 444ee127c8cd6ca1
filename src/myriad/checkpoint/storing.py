"""From snapshots in memory to a durable checkpoint, by the keepers of all nodes. No torch here.

    keeper of rank 0                        the other nodes' keepers
    empties step-N/
    asks all to write   ───────────────►    write, fsync, read back their ranks' files
    writes its own                          answer with hashes      (`store_own`)
    .metadata, job.toml, manifest: committed; older ones pruned

Nothing here is waited for by training. What fails is an event; after several in a row a loud one.
"""

import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from myriad.checkpoint.folder import CheckpointFolder, verify
from myriad.checkpoint.manifest import FileRecord, Manifest
from myriad.checkpoint.member import Member
from myriad.checkpoint.piece import files_of_rank
from myriad.checkpoint.storage import Storage
from myriad.checkpoint.writing import put_and_check, write_and_check

__all__ = ["PROGRESS", "Outcome", "Storing", "read_progress", "store_own"]

PROGRESS = "progress"
"""Name of the tensor of bytes (JSON, spaces behind it) that says where the run was."""

_WRITERS = 3
"""Files that are written or read back at a time."""

Tell = Callable[..., None]
"""``tell(event, **fields)``: a line in the run's events."""


def store_own(storage: Storage, step: int, members: Sequence[Member]) -> dict[str, FileRecord]:
    """Writes and reads back the files of this node's ranks, some at a time. Raises ``OSError``."""
    files: dict[str, FileRecord] = {}
    hashes: dict[tuple[int, int], list[str]] = defaultdict(list)
    with ThreadPoolExecutor(_WRITERS) as pool:
        waiting = []
        for member in members:
            slot = member.slot_of(step)
            if slot is None:
                raise OSError(f"rank {member.rank} has no snapshot of step {step}")
            data = member.data_in(slot)
            for name, pieces in files_of_rank(member.rank, member.pieces):
                path = f"step-{step}/{name}"
                waiting.append(
                    (member, slot, name, pool.submit(write_and_check, storage, path, pieces, data))
                )
        for member, slot, name, written in waiting:
            files[name] = written.result()
            hashes[member.rank, slot] += [chunk.xxh3_128 for chunk in files[name].chunks]
            if member.memory.step_of(slot) != step:
                raise OSError(f"rank {member.rank} overwrote step {step} while it was stored")
    for member, slot, _, _ in waiting:
        member.note_hashes(slot, step, hashes[member.rank, slot])
    return files


def read_progress(member: Member, slot: int) -> Mapping[str, Any]:
    """Where the run was, from a snapshot of rank 0."""
    (piece,) = (piece for piece in member.pieces if piece.tensor == PROGRESS)
    progress: dict[str, Any] = json.loads(bytes(member.data(slot, piece)))
    return progress


@dataclass(frozen=True)
class Outcome:
    """What became of a step that was to be stored."""

    problem: str | None
    """``None``: it is durable."""
    at: float
    """When it was known, by the monotonic clock of this machine."""
    is_final: bool = False
    """Another try fails too: a newer attempt owns the folder."""


@dataclass(frozen=True)
class _Try:
    step: int
    asked: int
    """How often the step had been asked for."""
    began: float


@dataclass(frozen=True)
class Retention:
    """What is kept."""

    keep: int
    max_age_seconds: float | None


class _TakenOverError(OSError):
    """A newer attempt owns the folder."""


class Storing:
    """Stores one checkpoint at a time; lives in the keeper of rank 0's node."""

    def __init__(
        self,
        folder: CheckpointFolder,
        retention: Retention,
        constant: Mapping[str, Any],
        plain_files: Mapping[str, bytes],
        tell: Tell,
        alarm_after: int,
    ) -> None:
        """``constant``: layout, versions and tensors of the manifest; ``plain_files``: ``.metadata``,
        ``job.toml``."""
        self._folder, self._retention, self._constant = folder, retention, constant
        self._plain_files, self._tell, self._alarm_after = plain_files, tell, alarm_after
        self._failures, self._last_told = 0, (-1, "")
        self.stored_step = -1
        self.trusted_step = -1
        """Up to which replicas are known to have held the same; -1: nobody compares them."""
        self._changed = threading.Condition()
        self._under_way: _Try | None = None
        self._waiting: int | None = None
        self._outcomes: dict[int, Outcome] = {}
        self._asked: Counter[int] = Counter()

    def expect(self, step: int) -> None:
        """A step is to be stored: what became of an earlier try counts no more."""
        with self._changed:
            self._asked[step] += 1
            self._outcomes.pop(step, None)

    def begin(self, step: int) -> bool:
        """Waits until what is under way is stored. One step waits at a time, the newest: the one before gives
        up its place, and is not stored."""
        with self._changed:
            displaced, self._waiting = self._waiting, step
            self._changed.notify_all()
            slow, asked = self._under_way, self._asked[displaced or 0]
        if displaced is not None and displaced != step:
            reason = "a newer one came first"
            if slow is not None:
                seconds = time.monotonic() - slow.began
                reason = f"step {slow.step} is still being stored after {seconds:.0f} s"
            self._fail(displaced, asked, f"checkpoint not stored, in memory only: {reason}")
        with self._changed:
            self._changed.wait_for(lambda: self._waiting != step or self._under_way is None)
            if self._waiting != step:
                return False
            self._waiting, self._under_way = None, _Try(step, self._asked[step], time.monotonic())
            return True

    def store(
        self,
        step: int,
        attempt: int,
        write: Callable[[], Mapping[str, FileRecord]],
        progress: Mapping[str, Any],
    ) -> bool:
        """Between `begin` and its end; ``write``: makes all ranks' files, in an empty folder. Whether it is
        committed."""
        under_way = self._under_way
        assert under_way is not None, "begun"
        try:
            num_bytes = self.commit(step, attempt, write, progress)
        except Exception as error:  # whatever a storage does, training goes on
            problem = f"checkpoint not stored: {str(error) or type(error).__name__}"
            is_final = isinstance(error, _TakenOverError)
            if is_final:  # nothing has failed: the newer one stores
                self._tell("superseded", step=step, problem=problem)
            else:
                self._tell_failure(step, problem)
            self.clear(step, attempt)
            self._end(under_way, problem, is_final=is_final)
            return False
        seconds = time.monotonic() - under_way.began
        self._failures, self._last_told = 0, (-1, "")
        self.stored_step = max(step, self.stored_step)
        self._tell("checkpoint", step=step, path=f"step-{step}", seconds=seconds, bytes=num_bytes)
        self._end(under_way, None)
        self._prune(step)
        return True

    def elsewhere(self, folder: CheckpointFolder) -> "Storing":
        """Stores the same state in another folder; only `commit` is of use there."""
        plain, alarm_after = self._plain_files, self._alarm_after
        return Storing(folder, self._retention, self._constant, plain, self._tell, alarm_after)

    def commit(
        self,
        step: int,
        attempt: int,
        write: Callable[[], Mapping[str, FileRecord]],
        progress: Mapping[str, Any],
    ) -> int:
        """Writes a checkpoint and gives its bytes; it counts from the moment its manifest is there. Raises
        ``OSError``."""
        self._check_owner(attempt)
        stored = self._stored(step)
        if stored is not None and stored.attempt > attempt:
            raise _TakenOverError(f"attempt {stored.attempt} of the run has stored this step")
        if stored is not None and stored.attempt == attempt and not verify(self._folder.at_step(step)):
            return stored.num_bytes  # by a keeper that died before it could say so
        checkpoint = self._folder.begin(step)
        files = dict(write())
        for name, content in self._plain_files.items():
            files[name] = put_and_check(checkpoint.storage, checkpoint.at(name), content)
        if missing := files.keys() - set(checkpoint.storage.names(checkpoint.name)):
            some = f"{min(missing)} ({len(missing)} files)" if len(missing) > 1 else min(missing)
            raise OSError(f"another node wrote {some} to a place that this node does not see")
        data = progress.get("data", {})
        manifest = Manifest(step, attempt, 0.0, dict(progress), data=data, files=files, **self._constant)
        self._check_owner(attempt)
        checkpoint.commit(manifest)
        return manifest.num_bytes

    def _stored(self, step: int) -> Manifest | None:
        """What is committed of a step, if it can be read."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            return self._folder.at_step(step).manifest()
        return None

    def _check_owner(self, attempt: int) -> None:
        owner = self._folder.owner()
        if owner > attempt:
            raise _TakenOverError(f"attempt {owner} of the run has taken over; this is attempt {attempt}")
        if owner < attempt:  # storage was away when the attempt began
            self._folder.claim(attempt)

    def clear(self, step: int, attempt: int) -> None:
        """Remove what a failed try has left; a newer attempt's files are not touched."""
        with suppress(OSError):
            if self._folder.owner() == attempt and self._stored(step) is None:
                self._folder.begin(step)

    def _prune(self, newest: int) -> None:
        try:
            kept, age = self._retention.keep, self._retention.max_age_seconds
            self._folder.prune(kept, newest, age, self.trusted_step)
        except OSError as error:
            self._tell("fault", step=newest, problem=f"older checkpoints not removed: {error}")

    def give_up(self, step: int, problem: str) -> None:
        """A step that was to be stored cannot be."""
        with self._changed:
            asked = self._asked[step]
        self._fail(step, asked, problem)

    def _fail(self, step: int, asked: int, problem: str) -> None:
        """Of a try that never was under way."""
        self._tell_failure(step, problem)
        self._conclude(step, asked, problem)

    def _tell_failure(self, step: int, problem: str) -> None:
        """A step that is tried again and fails in the same way is reported once."""
        if (step, problem) == self._last_told:
            return
        self._failures, self._last_told = self._failures + 1, (step, problem)
        loud = {"alarm": True} if self._failures >= self._alarm_after else {}
        self._tell("fault", step=step, problem=problem, failures=self._failures, **loud)

    def _end(self, ended: "_Try", problem: str | None, *, is_final: bool = False) -> None:
        with self._changed:
            self._under_way = None
            self._conclude(ended.step, ended.asked, problem, is_final=is_final)

    def _conclude(self, step: int, asked: int, problem: str | None, *, is_final: bool = False) -> None:
        with self._changed:
            if asked == self._asked[step]:
                self._outcomes[step] = Outcome(problem, time.monotonic(), is_final)
            self._changed.notify_all()

    def wait(self, step: int, seconds: float) -> Outcome | None:
        """What became of a step; ``None``: it is still being stored."""
        with self._changed:
            self._changed.wait_for(lambda: step in self._outcomes, seconds)
            return self._outcomes.get(step)
