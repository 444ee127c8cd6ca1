"""A folder of checkpoints. ``step-N`` is a checkpoint only if it has a manifest. Without torch.

    step-20/__0_0.distcp, ...     written, on disk, read back     (`myriad.checkpoint.storage.verified_files`)
    step-20/.metadata, job.toml
    step-20/manifest.json         put in place by one rename, which commits the checkpoint
    step-20.damaged/              a load found bytes that differ from the manifest: never tried again
    attempt                       number of the newest attempt: an older one, which was believed dead,
                                  can no longer commit

A kill at any moment leaves the older checkpoints intact, and at most one folder without a manifest, which the
next save replaces.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from myriad.checkpoint.format.checkpoint_manifest import (
    MANIFEST,
    CheckpointManifest,
    encode_manifest,
    parse_manifest,
)
from myriad.checkpoint.storage.storage_backends import LocalStorage, Storage, open_storage
from myriad.checkpoint.storage.verified_files import check_file
from myriad.errors import BadInputError, RunFailedError

__all__ = ["REPLACED", "Checkpoint", "CheckpointFolder", "Show", "is_removed", "open_checkpoint", "verify"]

_ATTEMPT = "attempt"
_PROBE = "probe"
_ASIDE = ".damaged"

REPLACED = "removed or replaced while it was read"
_SEARCHES = 5
"""How often a folder is searched again because a running job removed the checkpoint being read."""

Show = Callable[[int, int], None]
"""Callback ``show(bytes_read, bytes_total)`` that reports progress."""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint, complete or not: a folder in a storage."""

    storage: Storage
    name: str

    def at(self, file: str) -> str:
        """Return the path of one of its files within the storage."""
        return f"{self.name}/{file}" if self.name else file

    @property
    def where(self) -> str:
        """Path or URL of the checkpoint, for messages."""
        return f"{self.storage.url}/{self.name}".rstrip("/")

    def manifest(self) -> CheckpointManifest:
        """Read the manifest. Raises ``OSError``, or ``ValueError`` if it is corrupt or of another step."""
        manifest = parse_manifest(self.storage.read(self.at(MANIFEST)))
        number = self.name.removeprefix("step-")
        if number != self.name and number.isdecimal() and int(number) != manifest.step:
            raise ValueError(f"of step {manifest.step}")
        return manifest

    def commit(self, manifest: CheckpointManifest) -> None:
        """Commit the checkpoint by writing its manifest. All its files must exist already."""
        self.storage.put(self.at(MANIFEST), encode_manifest(manifest.stamped(time.time())))


def open_checkpoint(where: str | Path) -> Checkpoint:
    """Return the checkpoint at a path or URL."""
    text = str(where).rstrip("/")
    parent, _, name = text.rpartition("/")
    if "://" in text:
        return Checkpoint(open_storage(parent), name)
    path = Path(text)
    return Checkpoint(LocalStorage(path.parent), path.name)


class CheckpointFolder:
    """The durable checkpoints of a run, in a folder or at a URL that fsspec opens."""

    def __init__(self, where: str | Path) -> None:
        self.storage = open_storage(where)
        self.path = Path(self.storage.url)
        """Path of the folder; meaningful for local storage only."""

    def of_step(self, step: int) -> Path:
        """Return the path of the checkpoint of a step; for local storage only."""
        return self.path / f"step-{step}"

    def at_step(self, step: int) -> Checkpoint:
        """Return the checkpoint of a step, whether or not it exists."""
        return Checkpoint(self.storage, f"step-{step}")

    def steps(self) -> list[int]:
        """Return the steps with a committed checkpoint, ascending."""
        return [step for step in self._begun() if self._committed(step)]

    def trained_steps(self) -> list[int]:
        """Return `steps` without step 0, which holds imported weights and no optimizer state."""
        return [step for step in self.steps() if step > 0]

    def at_damaged(self, step: int) -> Checkpoint:
        """Return the checkpoint of a step that was set aside."""
        return Checkpoint(self.storage, f"step-{step}{_ASIDE}")

    def damaged(self) -> list[int]:
        """Return the steps whose checkpoint was set aside, ascending."""
        names = (name for name in self.storage.names() if name.endswith(_ASIDE))
        found = (name.removeprefix("step-").removesuffix(_ASIDE) for name in names)
        return sorted(int(name) for name in found if name.isdecimal())

    def remove_damaged(self) -> list[int]:
        """Delete the checkpoints that were set aside. Return their steps."""
        steps = self.damaged()
        for step in steps:
            self.storage.remove(self.at_damaged(step).name)
        return steps

    def _begun(self) -> list[int]:
        found = (name.removeprefix("step-") for name in self.storage.names() if name.startswith("step-"))
        return sorted(int(name) for name in found if name.isdecimal())

    def _committed(self, step: int) -> bool:
        return MANIFEST in self.storage.names(f"step-{step}")

    def unfinished(self) -> list[int]:
        """Return the steps whose folder has no manifest: being written, or killed while it was written."""
        return [step for step in self._begun() if not self._committed(step)]

    def newest(self) -> tuple[int, list[str]] | None:
        """Return the step of the newest checkpoint that verifies, and the problems of newer ones.

        Return ``None`` if there is no checkpoint. Raises `RunFailedError` if none of them verifies. Changes
        nothing."""
        for _ in range(_SEARCHES):
            problems: list[str] = []
            for step in reversed(self.steps()):
                if not (found := verify(self.at_step(step))):
                    return step, problems
                problems += found
                if found[0].endswith(REPLACED):
                    break
            else:
                break
        if problems:
            raise RunFailedError(f"no checkpoint verifies: {'; '.join(problems)}")
        return None

    def set_aside(self, step: int) -> str:
        """Rename a checkpoint that failed verification, so that no load uses it. Return its new name."""
        new_name = self.at_damaged(step).name
        self.storage.remove(new_name)  # left from an earlier time
        self.storage.rename(f"step-{step}", new_name)
        return new_name

    def begin(self, step: int) -> Checkpoint:
        """Return an empty folder for a new checkpoint. An existing one of the same step is removed."""
        checkpoint = self.at_step(step)
        if self._committed(step):
            self.storage.remove(checkpoint.at(MANIFEST))
        self.storage.remove(checkpoint.name)
        return checkpoint

    def prune(
        self, keep: int, newest: int, max_age_seconds: float | None = None, trusted: int = -1
    ) -> list[int]:
        """Remove old checkpoints up to step ``newest``, and return their steps.

        ``keep`` checkpoints up to ``newest`` stay, except those older than ``max_age_seconds``. ``newest``
        itself, which is known to be good, always stays, and so does the newest one up to step ``trusted``.
        Later checkpoints failed verification and do not count. Unfinished folders before ``newest`` are
        removed too."""
        older = [step for step in self.steps() if step < newest]
        removed = older[: max(0, len(older) - keep + 1)]
        removed += [step for step in older if step not in removed and self._older_than(step, max_age_seconds)]
        back = max((step for step in older if step <= trusted), default=-1)
        removed = [step for step in removed if step != back or newest <= trusted]
        for step in [*removed, *(step for step in self.unfinished() if step < newest)]:
            checkpoint = self.at_step(step)
            self.storage.remove(checkpoint.at(MANIFEST))
            self.storage.remove(checkpoint.name)
        return sorted(removed)

    def _older_than(self, step: int, seconds: float | None) -> bool:
        if seconds is None:
            return False
        with contextlib.suppress(OSError, ValueError):
            return time.time() - self.at_step(step).manifest().time > seconds
        return False

    def check(self) -> None:
        """Write and remove a probe file, before training starts.

        Raises `BadInputError` if the storage cannot be written: missing bucket, credentials or permission, or
        no space."""
        try:
            self.storage.put(_PROBE, b"\n")
            self.storage.remove(_PROBE)
        except OSError as error:
            raise self._cannot_be_written(error) from None

    def _cannot_be_written(self, error: OSError) -> BadInputError:
        return BadInputError("checkpoint.url", self.storage.url, f"cannot be written: {error}")

    def acquire(self, attempt: int) -> None:
        """Record that a new attempt owns the folder. Raises `BadInputError` if it cannot be written."""
        try:
            self.storage.put(_ATTEMPT, str(attempt).encode())
        except OSError as error:
            raise self._cannot_be_written(error) from None

    def owner(self) -> int:
        """Return the newest attempt that has acquired the folder; 0: none.

        Raises ``OSError`` if that cannot be read: an attempt that cannot read the owner must not commit."""
        try:
            return int(self.storage.read(_ATTEMPT))
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return 0


def verify(
    checkpoint: Checkpoint | Path | str, *, sizes_only: bool = False, show: Show | None = None
) -> list[str]:
    """Return the problems of a checkpoint, one line per bad chunk; empty: every byte is as written.

    ``sizes_only``: check only for files that are missing or have the wrong size."""
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = open_checkpoint(checkpoint)
    try:
        manifest = checkpoint.manifest()
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{checkpoint.name}/{MANIFEST}: not readable ({error})"]
    found = list(_problems(checkpoint, manifest, sizes_only, show))
    if found and _is_replaced(checkpoint, manifest):
        return [f"{checkpoint.name}: {REPLACED}"]
    return found


def is_removed(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint no longer exists, for example because a running job pruned it."""
    try:
        return checkpoint.storage.size(checkpoint.at(MANIFEST)) is None
    except OSError:
        return False


def _is_replaced(checkpoint: Checkpoint, manifest: CheckpointManifest) -> bool:
    """Whether the checkpoint was removed or replaced after ``manifest`` was read."""
    try:
        return checkpoint.manifest() != manifest
    except FileNotFoundError:
        return True
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _problems(
    checkpoint: Checkpoint, manifest: CheckpointManifest, sizes_only: bool, show: Show | None
) -> Iterator[str]:
    read = 0

    def on_read(count: int) -> None:
        nonlocal read
        read += count
        if show is not None:
            show(read, manifest.num_bytes)

    for name, record in manifest.files.items():
        path = checkpoint.at(name)
        try:
            if sizes_only:
                size = checkpoint.storage.size(path)
                short = "missing" if size is None else f"{size} bytes instead of {record.bytes}"
                found = [] if size == record.bytes else [short]
            else:
                found = check_file(checkpoint.storage, path, record, on_read)
        except OSError as error:
            found = [f"not readable ({error})"]
        yield from (f"{checkpoint.name}/{name}: {problem}" for problem in found)
