"""Resolve the name of a run or of checkpoints on the command line. This module does not import torch.

    runs/NAME, NAME                  a run (job.toml): the folder or URL where it stores
    runs/NAME/checkpoints, OUT       a folder of checkpoints: step-N/ in it
    .../step-N                       one checkpoint (manifest.json)
    file:///PATH, s3://BUCKET/PATH   a folder of checkpoints, or one checkpoint, wherever fsspec reaches

A path is taken literally: a space, ``#``, ``%`` or a character beyond ASCII stands for itself, in URLs too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from myriad.checkpoint.format.checkpoint_manifest import MANIFEST
from myriad.checkpoint.storage.checkpoint_folder import (
    REPLACED,
    Checkpoint,
    CheckpointFolder,
    open_checkpoint,
    verify,
)
from myriad.checkpoint.storage.storage_backends import open_storage
from myriad.errors import BadInputError
from myriad.run import Run, nearest_run

__all__ = ["ALLOWED", "Location", "local_path", "locate", "newest_whole"]

ALLOWED = (
    "must be a run (its folder, or its name under runs/), a folder of checkpoints, one checkpoint (step-N), "
    "or a URL of such a folder"
)
_SEARCHES = 5
_MARKS = (MANIFEST, ".metadata")


@dataclass(frozen=True)
class Location:
    """Checkpoints that a user named, with the run that they belong to."""

    name: str
    key: str
    """The option or key that the user set, for messages."""
    run: Path | None
    """The named run, or the run whose folder holds the checkpoints."""
    folder: CheckpointFolder | None
    """The folder of checkpoints; ``None`` if one checkpoint was named."""
    one: Checkpoint | None = None
    is_run: bool = False
    """Whether the run itself was named."""

    def checkpoints(self) -> list[Checkpoint]:
        """Return the committed checkpoints, oldest first."""
        if self.one is not None:
            return [self.one]
        assert self.folder is not None, "a folder, or one"
        return [self.folder.at_step(step) for step in self.folder.steps()]

    def whole_folder(self) -> CheckpointFolder:
        """Return the folder of checkpoints. Raises `BadInputError` if one checkpoint was named."""
        if self.folder is None:
            raise BadInputError(
                self.key, self.name, "must be a run or a folder of checkpoints, not one of them"
            )
        return self.folder


def locate(name: str, key: str = "PATH") -> Location:
    """Find checkpoints by name. Raises `BadInputError` when the name matches nothing, or when the place
    cannot be read."""
    try:
        found = _find(name, key)
    except (OSError, ValueError) as error:  # ValueError: not a file name, for example with a zero byte
        raise BadInputError(key, name, f"cannot be read: {error}") from None
    if found is None:
        raise BadInputError(key, name, ALLOWED + nearest_run(name))
    return found


def newest_whole(found: Location, *, every_byte: bool) -> Checkpoint:
    """Return the newest whole checkpoint, verified by every byte or by the sizes of its files.

    A checkpoint may be removed or replaced meanwhile by a run in progress; the search then restarts. Raises
    `BadInputError`.
    """
    for _ in range(_SEARCHES):
        checkpoints = found.checkpoints()[::-1]
        if not checkpoints:
            raise BadInputError(found.key, found.name, "no checkpoint yet; train first")
        problems: list[str] = []
        for checkpoint in checkpoints:
            if not (wrong := verify(checkpoint, sizes_only=not every_byte)):
                return checkpoint
            problems += wrong
            if wrong[0].endswith(REPLACED):
                break
        else:
            break
    raise BadInputError(found.key, checkpoints[0].where, f"no complete checkpoint ({problems[0]})")


def _find(name: str, key: str) -> Location | None:
    for where in _candidates(name):
        one = open_checkpoint(where)
        if one.name and any(one.storage.size(one.at(mark)) is not None for mark in _MARKS):
            return Location(name, key, _run_above(where), None, one)
        if (path := local_path(where)) is not None and Run(path).exists:
            run = Run(path)
            return Location(name, key, path, CheckpointFolder(run.checkpoints()), None, True)
        storage = open_storage(where)
        if any(_is_step(entry) for entry in storage.names()):
            return Location(name, key, _run_above(f"{where}/step-0"), CheckpointFolder(where))
    return None


def local_path(where: str) -> Path | None:
    """Return the local path of a path or a ``file://`` URL; ``None`` for any other URL."""
    scheme, mark, rest = where.partition("://")
    if mark and scheme != "file":
        return None
    return Path(rest if mark else where)


def _candidates(name: str) -> Sequence[str]:
    if not name:
        return []
    if "://" in name:
        return [name.rstrip("/")]
    return [str(Path(name).expanduser()), str(Path("runs") / name)]


def _is_step(entry: str) -> bool:
    number = entry.removeprefix("step-")
    return number != entry and number.isdecimal()


def _run_above(step_folder: str) -> Path | None:
    """Return the run whose ``checkpoints/`` folder holds a ``step-N`` folder."""
    path = local_path(step_folder)
    if path is None:
        return None
    run = path.resolve().parent.parent
    return run if Run(run).exists else None
