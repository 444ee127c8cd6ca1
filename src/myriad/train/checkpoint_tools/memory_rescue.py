"""Save the state of a run that has ended from the memory of its snapshot servers to a chosen location.

    the last checkpoint cannot be stored ──► the run ends; its snapshot servers hold the state
    myriad checkpoint save RUN --to PLACE    the server of rank 0's node has all nodes write their parts to
                                             PLACE, reads them back, commits; then the servers end
    myriad checkpoint release RUN            they end without storing

This module does not import torch.
"""

import contextlib
from pathlib import Path
from typing import Any

from myriad.checkpoint.snapshots.server_start import server_names
from myriad.checkpoint.snapshots.snapshot_client import ask_server, list_in_memory
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder, verify
from myriad.checkpoint.storage.folder_owner import release_ownership, take_ownership
from myriad.checkpoint.storage.storage_backends import LocalStorage
from myriad.errors import BadInputError, RunFailedError
from myriad.run import Run

__all__ = ["release_memory", "save_from_memory"]


def save_from_memory(path: Path, to: str | None) -> dict[str, Any]:
    """Store the newest step in memory in ``to``, or in the run's own location; return step, bytes, where and
    url.

    Raises `BadInputError` with nothing written, and `RunFailedError` when the state could not be stored and
    is still in memory.
    """
    run = Run(path)
    with run.lock():
        if not list_in_memory(path):
            raise BadInputError("RUN", str(path), "has no state in the memory of this machine")
        folder = _target(run, to)
        _take(folder, path, to)
        try:
            saved = _ask(path, {"op": "save", "url": folder.storage.url})
        except BaseException:
            if to is not None:
                with contextlib.suppress(OSError):
                    release_ownership(folder)
            raise
        if problems := verify(folder.at_step(saved["step"])):
            raise RunFailedError(f"stored, but reading it back gives other bytes: {problems[0]}")
        _release(path)
    return {**saved, "url": folder.storage.url}


def release_memory(path: Path) -> list[int]:
    """Release what this machine's snapshot servers hold of a run that has ended, and return the steps."""
    with Run(path).lock():
        steps = sorted({step for step, _ in list_in_memory(path)})
        _release(path)
    return steps


def _release(path: Path) -> None:
    for name in server_names(path):
        if "problem" in (answer := ask_server(name, {"op": "release held"})):
            raise BadInputError("RUN", str(path), answer["problem"])


def _target(run: Run, to: str | None) -> CheckpointFolder:
    """Return the target folder. A place that already has checkpoints is refused, because a run would
    resume from those if they are of later steps."""
    if to is None:
        return CheckpointFolder(run.checkpoints())
    folder = CheckpointFolder(to)
    if isinstance(folder.storage, LocalStorage):
        folder = CheckpointFolder(folder.storage.root.expanduser().absolute())
    try:
        taken = folder.steps()
    except OSError as error:
        raise BadInputError("--to", to, f"cannot be read: {error}") from None
    if taken:
        raise BadInputError("--to", to, f"must hold no checkpoints: it has step {taken[-1]}")
    try:
        folder.check()
    except BadInputError as error:
        raise BadInputError("--to", to, error.allowed) from None
    return folder


def _take(folder: CheckpointFolder, path: Path, to: str | None) -> None:
    """Take ownership of the target, so that a second run that is saved to it at the same time is refused."""
    if to is None:
        return
    try:
        take_ownership(folder, path)
    except BadInputError as error:
        raise BadInputError("--to", to, error.allowed) from None
    except OSError as error:
        raise BadInputError("--to", to, f"cannot be written: {error}") from None


def _ask(path: Path, message: dict[str, Any]) -> dict[str, Any]:
    """Send a message to every server of this machine; one of them belongs to rank 0's node."""
    problems = []
    for name in server_names(path):
        answer = ask_server(name, message)
        if "step" in answer:
            return answer
        problems.append(answer.get("problem", "the snapshot server is gone"))
    raise RunFailedError(f"still in memory only: {'; '.join(dict.fromkeys(problems))}")
