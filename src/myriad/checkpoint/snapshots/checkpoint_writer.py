"""Store snapshots as a durable checkpoint, using the snapshot servers of all nodes. Without torch.

    server of rank 0's node                 servers of the other nodes
    empties step-N/
    asks all to write   ───────────────►    write, fsync, read back their ranks' files
    writes its own                          answer with hashes      (`store_local`)
    .metadata, job.toml, manifest: committed; older ones pruned

Training does not wait for any of this. A failure is reported as an event, and as an alarm after several
failures in a row.
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

from myriad.checkpoint.format.checkpoint_manifest import CheckpointManifest, StoredFile
from myriad.checkpoint.format.stored_shard import PROGRESS, files_of_rank, without_mirrors
from myriad.checkpoint.snapshots.rank_entry import RankEntry
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder, verify
from myriad.checkpoint.storage.storage_backends import Storage
from myriad.checkpoint.storage.verified_files import put_and_check, write_and_check

__all__ = ["CheckpointWriter", "SavedStep", "StoreOutcome", "read_progress", "store_local"]

_WRITERS = 3
"""Number of files written or read back at the same time."""

ReportEvent = Callable[..., None]
"""``report(event, **fields)`` appends an event to the run's event log."""


def store_local(storage: Storage, step: int, entries: Sequence[RankEntry]) -> dict[str, StoredFile]:
    """Write and read back the files of this node's ranks, `_WRITERS` at a time. Raises ``OSError``."""
    files: dict[str, StoredFile] = {}
    hashes: dict[tuple[int, int], list[str]] = defaultdict(list)
    with ThreadPoolExecutor(_WRITERS) as pool:
        waiting = []
        for entry in entries:
            slot = entry.slot_of(step)
            if slot is None:
                raise OSError(f"rank {entry.rank} has no snapshot of step {step}")
            data = entry.data_in(slot)
            for name, stored_shards in files_of_rank(entry.rank, without_mirrors(entry.stored_shards)):
                path = f"step-{step}/{name}"
                waiting.append(
                    (entry, slot, name, pool.submit(write_and_check, storage, path, stored_shards, data))
                )
        for entry, slot, name, written in waiting:
            files[name] = written.result()
            hashes[entry.rank, slot] += [chunk.xxh3_128 for chunk in files[name].chunks]
            if entry.memory.step_of(slot) != step:
                raise OSError(f"rank {entry.rank} overwrote step {step} while it was stored")
    for entry, slot, _, _ in waiting:
        entry.record_hashes(slot, step, hashes[entry.rank, slot])
    return files


def read_progress(entry: RankEntry | None, step: int) -> Mapping[str, Any]:
    """Return the training progress in rank 0's snapshot of a step; empty if there is no such snapshot."""
    slot = None if entry is None else entry.slot_of(step)
    if entry is None or slot is None:
        return {}
    (shard,) = (shard for shard in entry.stored_shards if shard.tensor == PROGRESS)
    progress: dict[str, Any] = json.loads(bytes(entry.data(slot, shard)))
    return progress


@dataclass(frozen=True)
class StoreOutcome:
    """Result of storing a step."""

    problem: str | None
    """Reason for failure; ``None``: the step is durable."""
    at: float
    """Time at which the result was known, on this machine's monotonic clock."""
    is_final: bool = False
    """Whether a retry would fail too, because a newer attempt owns the folder."""


@dataclass(frozen=True)
class SavedStep:
    """A step that was saved to a location that the operator chose."""

    step: int
    bytes: int
    where: str


@dataclass(frozen=True)
class _StoreTry:
    step: int
    asked: int
    """Number of requests to store the step so far."""
    began: float


@dataclass(frozen=True)
class Retention:
    """Which durable checkpoints to keep: how many, and how old they may become."""

    keep: int
    max_age_seconds: float | None


class _TakenOverError(OSError):
    """A newer attempt owns the folder."""


class CheckpointWriter:
    """Stores one checkpoint at a time, in the snapshot server of rank 0's node."""

    def __init__(
        self,
        folder: CheckpointFolder,
        retention: Retention,
        constant: Mapping[str, Any],
        plain_files: Mapping[str, bytes],
        report: ReportEvent,
        alarm_after: int,
    ) -> None:
        """``constant``: layout, versions and tensors for the manifest. ``plain_files``: ``.metadata`` and
        ``job.toml``."""
        self._folder, self._retention, self._constant = folder, retention, constant
        self._plain_files, self._report, self._alarm_after = plain_files, report, alarm_after
        self._failures, self._last_reported = 0, (-1, "")
        self.stored_step = -1
        self.trusted_step = -1
        """Newest step at which replicas were known to be equal; -1: replicas are not compared."""
        self._changed = threading.Condition()
        self._under_way: _StoreTry | None = None
        self._waiting: int | None = None
        self._outcomes: dict[int, StoreOutcome] = {}
        self._asked: Counter[int] = Counter()

    def expect(self, step: int) -> None:
        """Register a request to store a step; it invalidates the outcome of an earlier try."""
        with self._changed:
            self._asked[step] += 1
            self._outcomes.pop(step, None)

    def begin(self, step: int) -> bool:
        """Wait for the store in progress; return whether ``step`` may start.

        Only the newest step waits: it displaces an older waiting step, which is not stored."""
        with self._changed:
            displaced, self._waiting = self._waiting, step
            self._changed.notify_all()
            slow, asked = self._under_way, self._asked[displaced or 0]
        if displaced is not None and displaced != step:
            reason = "a newer step was requested first"
            if slow is not None:
                seconds = time.monotonic() - slow.began
                reason = f"step {slow.step} is still being stored after {seconds:.0f} s"
            self._fail(displaced, asked, f"checkpoint not stored, in memory only: {reason}")
        with self._changed:
            self._changed.wait_for(lambda: self._waiting != step or self._under_way is None)
            if self._waiting != step:
                return False
            self._waiting, self._under_way = None, _StoreTry(step, self._asked[step], time.monotonic())
            return True

    def store(
        self,
        step: int,
        attempt: int,
        write: Callable[[], Mapping[str, StoredFile]],
        progress: Mapping[str, Any],
    ) -> bool:
        """Store a step after `begin` returned True; return whether it is committed.

        ``write`` writes the files of all ranks into an empty folder."""
        under_way = self._under_way
        assert under_way is not None, "begun"
        try:
            num_bytes = self.commit(step, attempt, write, progress)
        except Exception as error:  # storage back ends may raise anything; training continues
            problem = f"checkpoint not stored: {str(error) or type(error).__name__}"
            is_final = isinstance(error, _TakenOverError)
            if is_final:  # not a fault: the newer attempt stores
                self._report("superseded", step=step, problem=problem)
            else:
                self._report_failure(step, problem)
            self.clear(step, attempt)
            self._end(under_way, problem, is_final=is_final)
            return False
        seconds = time.monotonic() - under_way.began
        self._failures, self._last_reported = 0, (-1, "")
        self.stored_step = max(step, self.stored_step)
        self._report("checkpoint", step=step, path=f"step-{step}", seconds=seconds, bytes=num_bytes)
        self._end(under_way, None)
        self._prune(step)
        return True

    def elsewhere(self, folder: CheckpointFolder) -> "CheckpointWriter":
        """Return an instance that stores the same state in another folder; use only its `commit`."""
        plain, alarm_after = self._plain_files, self._alarm_after
        return CheckpointWriter(folder, self._retention, self._constant, plain, self._report, alarm_after)

    def commit(
        self,
        step: int,
        attempt: int,
        write: Callable[[], Mapping[str, StoredFile]],
        progress: Mapping[str, Any],
    ) -> int:
        """Write a checkpoint and return its size in bytes. Writing the manifest commits it.

        Raises ``OSError``."""
        self._check_owner(attempt)
        stored = self._stored(step)
        if stored is not None and stored.attempt > attempt:
            raise _TakenOverError(f"attempt {stored.attempt} of the run has stored this step")
        if stored is not None and stored.attempt == attempt and not verify(self._folder.at_step(step)):
            return stored.num_bytes  # stored by a server that died before it reported
        checkpoint = self._folder.begin(step)
        files = dict(write())
        for name, content in self._plain_files.items():
            files[name] = put_and_check(checkpoint.storage, checkpoint.at(name), content)
        if missing := files.keys() - set(checkpoint.storage.names(checkpoint.name)):
            some = f"{min(missing)} ({len(missing)} files)" if len(missing) > 1 else min(missing)
            raise OSError(f"another node wrote {some} to a folder that this node does not see")
        data = progress.get("data", {})
        manifest = CheckpointManifest(
            step, attempt, 0.0, dict(progress), data=data, files=files, **self._constant
        )
        self._check_owner(attempt)
        checkpoint.commit(manifest)
        return manifest.num_bytes

    def _stored(self, step: int) -> CheckpointManifest | None:
        """Return the committed manifest of a step, or ``None`` if there is none or it cannot be read."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            return self._folder.at_step(step).manifest()
        return None

    def _check_owner(self, attempt: int) -> None:
        owner = self._folder.owner()
        if owner > attempt:
            raise _TakenOverError(f"attempt {owner} of the run has taken over; this is attempt {attempt}")
        if owner < attempt:  # storage was unavailable when the attempt started
            self._folder.acquire(attempt)

    def clear(self, step: int, attempt: int) -> None:
        """Remove the files of a failed try. Files of a newer attempt are not touched."""
        with suppress(OSError):
            if self._folder.owner() == attempt and self._stored(step) is None:
                self._folder.begin(step)

    def _prune(self, newest: int) -> None:
        try:
            kept, age = self._retention.keep, self._retention.max_age_seconds
            self._folder.prune(kept, newest, age, self.trusted_step)
        except OSError as error:
            self._report("fault", step=newest, problem=f"older checkpoints not removed: {error}")

    def give_up(self, step: int, problem: str) -> None:
        """Report that a requested step will not be stored."""
        with self._changed:
            asked = self._asked[step]
        self._fail(step, asked, problem)

    def _fail(self, step: int, asked: int, problem: str) -> None:
        """Report the failure of a try that never started."""
        self._report_failure(step, problem)
        self._conclude(step, asked, problem)

    def _report_failure(self, step: int, problem: str) -> None:
        """Report a failure. A retry of the same step that fails for the same reason is not reported again."""
        if (step, problem) == self._last_reported:
            return
        self._failures, self._last_reported = self._failures + 1, (step, problem)
        loud = {"alarm": True} if self._failures >= self._alarm_after else {}
        self._report("fault", step=step, problem=problem, failures=self._failures, **loud)

    def _end(self, ended: "_StoreTry", problem: str | None, *, is_final: bool = False) -> None:
        with self._changed:
            self._under_way = None
            self._conclude(ended.step, ended.asked, problem, is_final=is_final)

    def _conclude(self, step: int, asked: int, problem: str | None, *, is_final: bool = False) -> None:
        with self._changed:
            if asked == self._asked[step]:
                self._outcomes[step] = StoreOutcome(problem, time.monotonic(), is_final)
            self._changed.notify_all()

    def wait(self, step: int, seconds: float) -> StoreOutcome | None:
        """Return the outcome of a step, waiting for it up to ``seconds``; ``None``: still being stored."""
        with self._changed:
            self._changed.wait_for(lambda: step in self._outcomes, seconds)
            return self._outcomes.get(step)
