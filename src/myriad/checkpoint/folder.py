"""A folder of checkpoints: ``step-N`` counts only when its manifest is there. No torch here.

    step-20/__0_0.distcp, ...     written, on disk, read back     (`myriad.checkpoint.writing`)
    step-20/.metadata, job.toml
    step-20/manifest.json         by one rename: from here on it is a checkpoint
    step-20.damaged/              a load found other bytes than the manifest says: never tried again
    attempt                       the newest start of the ranks: an older one, which somebody thought dead,
                                  commits no more

A kill at any instant leaves the older checkpoints and at most a folder without a manifest, which the next
save replaces.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from myriad.checkpoint.manifest import MANIFEST, Manifest, encode_manifest, parse_manifest
from myriad.checkpoint.storage import LocalStorage, Storage, open_storage
from myriad.checkpoint.writing import check_file
from myriad.errors import BadInputError, RunFailedError

__all__ = ["REPLACED", "Checkpoint", "CheckpointFolder", "Show", "is_removed", "open_checkpoint", "verify"]

_ATTEMPT = "attempt"
_PROBE = "probe"
_ASIDE = ".damaged"

REPLACED = "removed or replaced while it was read"
_SEARCHES = 5
"""Times that a folder is searched anew because a run at work removed what was being read."""

Show = Callable[[int, int], None]
"""Told the bytes read and the bytes to read."""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint, or what should be one: a folder of a storage."""

    storage: Storage
    name: str

    def at(self, file: str) -> str:
        """A file of it, as the storage names it."""
        return f"{self.name}/{file}" if self.name else file

    @property
    def where(self) -> str:
        """As a person would name it."""
        return f"{self.storage.url}/{self.name}".rstrip("/")

    def manifest(self) -> Manifest:
        """Raises ``ValueError`` or ``OSError`` when it is not as it was written, or is another step's."""
        manifest = parse_manifest(self.storage.read(self.at(MANIFEST)))
        told = self.name.removeprefix("step-")
        if told != self.name and told.isdigit() and int(told) != manifest.step:
            raise ValueError(f"of step {manifest.step}")
        return manifest

    def commit(self, manifest: Manifest) -> None:
        """Makes a checkpoint of a folder whose files are all there."""
        self.storage.put(self.at(MANIFEST), encode_manifest(manifest.stamped(time.time())))


def open_checkpoint(where: str | Path) -> Checkpoint:
    """The folder of one checkpoint by its path or URL."""
    text = str(where).rstrip("/")
    parent, _, name = text.rpartition("/")
    if "://" in text:
        return Checkpoint(open_storage(parent), name)
    path = Path(text)
    return Checkpoint(LocalStorage(path.parent), path.name)


class CheckpointFolder:
    """Where a run keeps its durable checkpoints: a folder, or a URL that fsspec knows."""

    def __init__(self, where: str | Path) -> None:
        self.storage = open_storage(where)
        self.path = Path(self.storage.url)
        """Of a local one."""

    def of_step(self, step: int) -> Path:
        """The folder of the checkpoint after ``step`` steps; of a local one."""
        return self.path / f"step-{step}"

    def at_step(self, step: int) -> Checkpoint:
        """The checkpoint after ``step`` steps, whether or not it is there."""
        return Checkpoint(self.storage, f"step-{step}")

    def steps(self) -> list[int]:
        """Steps with a committed checkpoint, ascending."""
        return [step for step in self._begun() if self._committed(step)]

    def trained_steps(self) -> list[int]:
        """The same without step 0, which holds imported weights and no optimizer state."""
        return [step for step in self.steps() if step > 0]

    def at_damaged(self, step: int) -> Checkpoint:
        """The one of that step that was set aside."""
        return Checkpoint(self.storage, f"step-{step}{_ASIDE}")

    def damaged(self) -> list[int]:
        """Steps whose checkpoint was set aside."""
        names = (name for name in self.storage.names() if name.endswith(_ASIDE))
        found = (name.removeprefix("step-").removesuffix(_ASIDE) for name in names)
        return sorted(int(name) for name in found if name.isdigit())

    def remove_damaged(self) -> list[int]:
        """Those; gives their steps."""
        steps = self.damaged()
        for step in steps:
            self.storage.remove(self.at_damaged(step).name)
        return steps

    def _begun(self) -> list[int]:
        found = (name.removeprefix("step-") for name in self.storage.names() if name.startswith("step-"))
        return sorted(int(name) for name in found if name.isdigit())

    def _committed(self, step: int) -> bool:
        return MANIFEST in self.storage.names(f"step-{step}")

    def unfinished(self) -> list[int]:
        """Steps whose folder has no manifest: killed while it was written, or not written yet."""
        return [step for step in self._begun() if not self._committed(step)]

    def newest(self) -> tuple[int, list[str]] | None:
        """Step of the newest checkpoint that verifies, and what is wrong with newer ones; ``None`` when there
        is none at all. Changes nothing. Raises `RunFailedError` when there are some and none verifies."""
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
        """Renames a checkpoint that did not verify, so that nothing tries it again. Gives the new name."""
        aside = self.at_damaged(step).name
        self.storage.remove(aside)  # of an earlier time
        self.storage.rename(f"step-{step}", aside)
        return aside

    def begin(self, step: int) -> Checkpoint:
        """An empty folder for a new checkpoint; one of the same step counts no more."""
        checkpoint = self.at_step(step)
        if self._committed(step):
            self.storage.remove(checkpoint.at(MANIFEST))
        self.storage.remove(checkpoint.name)
        return checkpoint

    def prune(
        self, keep: int, newest: int, max_age_seconds: float | None = None, trusted: int = -1
    ) -> list[int]:
        """Removes all but ``keep`` checkpoints up to step ``newest``, which is known to be good and always
        stays as does the newest up to step ``trusted``, and those of them older than ``max_age_seconds``;
        gives their steps. Later ones count for
        nothing: they did not verify. What was never finished before ``newest`` goes too."""
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
        """Writes a file and removes it, before anything is begun. Raises `BadInputError` when a checkpoint
        could not be written: no such bucket, no credentials, no room, no right."""
        try:
            self.storage.put(_PROBE, b"\n")
            self.storage.remove(_PROBE)
        except OSError as error:
            raise self._cannot_be_written(error) from None

    def _cannot_be_written(self, error: OSError) -> BadInputError:
        return BadInputError("checkpoint.url", self.storage.url, f"cannot be written: {error}")

    def claim(self, attempt: int) -> None:
        """Says that a new start of the ranks owns the folder. Raises `BadInputError` when it cannot be
        written."""
        try:
            self.storage.put(_ATTEMPT, str(attempt).encode())
        except OSError as error:
            raise self._cannot_be_written(error) from None

    def owner(self) -> int:
        """The newest start of the ranks that has claimed the folder; 0: none. Raises ``OSError`` when that
        cannot be read: whoever does not know may not commit."""
        try:
            return int(self.storage.read(_ATTEMPT))
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return 0


def verify(
    checkpoint: Checkpoint | Path | str, *, sizes_only: bool = False, show: Show | None = None
) -> list[str]:
    """What is wrong with a checkpoint, a line for each chunk; empty when every byte is as it was written.

    ``sizes_only``: a quick look that finds what is missing or cut short."""
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
    """Whether it is a checkpoint no longer, as when a run at work has pruned it."""
    try:
        return checkpoint.storage.size(checkpoint.at(MANIFEST)) is None
    except OSError:
        return False


def _is_replaced(checkpoint: Checkpoint, manifest: Manifest) -> bool:
    """Whether what was found is not of the checkpoint any more: its manifest goes first."""
    try:
        return checkpoint.manifest() != manifest
    except FileNotFoundError:
        return True
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _problems(
    checkpoint: Checkpoint, manifest: Manifest, sizes_only: bool, show: Show | None
) -> Iterator[str]:
    read = 0

    def told(count: int) -> None:
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
                found = check_file(checkpoint.storage, path, record, told)
        except OSError as error:
            found = [f"not readable ({error})"]
        yield from (f"{checkpoint.name}/{name}: {problem}" for problem in found)
