"""A new attempt takes ownership of its checkpoint folder. Without torch.

A folder named by a job (checkpoint.url) belongs to one run. The folder's ``run.json`` has the run's path.
Another run is refused while that path is a run. If that run is gone, moved or on a machine that is not
visible here, the new run takes the folder over and reports it.

The snapshot server does this work, not a rank: a process that accesses hung storage waits in the kernel and
cannot even be killed.
"""

import json
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.checkpoint.storage.storage_backends import LocalStorage
from myriad.errors import BadInputError
from myriad.system.whole_file import parse_json

__all__ = ["AcquiredFolder", "acquire_folder", "check_owner", "release_ownership", "take_ownership"]

_RUN = "run.json"


@dataclass(frozen=True)
class AcquiredFolder:
    """Result of acquiring a folder for a new attempt."""

    attempt: int
    """Number of the new attempt."""
    steps: tuple[int, ...] = ()
    """Steps of the durable training checkpoints, ascending."""
    damaged: tuple[int, ...] = ()
    """Steps whose checkpoints were set aside as damaged."""
    problem: str | None = None
    """Why the folder could not be acquired; ``None``: it was."""
    taken_from: str | None = None
    """Another run that stored in the folder before."""


def acquire_folder(url: str, attempts_before: int, seconds: float, run: str | None = None) -> AcquiredFolder:
    """Claim a folder for a new attempt. Raises nothing; `AcquiredFolder.problem` reports a failure.

    ``seconds``: how long the storage may take to answer. ``run``: the path of the run."""
    found: list[AcquiredFolder] = []
    worker = threading.Thread(target=lambda: found.append(_acquire(url, attempts_before, run)), daemon=True)
    worker.start()
    worker.join(seconds)
    silent = AcquiredFolder(attempts_before + 1, problem=f"does not answer within {seconds:g} s")
    return found[0] if found else silent


def check_owner(folder: CheckpointFolder, run: str | Path) -> str | None:
    """Refuse a folder in which another run stores its checkpoints.

    Return the path of a previous owner that is not visible from here; ``None``: there is none. Raises
    `BadInputError` or ``OSError``."""
    run = Path(run).resolve()
    recorded = _read_owner(folder)
    if isinstance(folder.storage, LocalStorage):
        parent = folder.storage.root.resolve().parent
        if parent == run:
            return None
        if (parent / "job.toml").exists():
            recorded = {"run": str(parent)}
    other = recorded.get("run")
    if not isinstance(other, str) or Path(other) == run:
        return None
    if (Path(other) / "job.toml").exists():
        allowed = f"is where the run {other} stores; another place, and --init-from {other} for its weights"
        raise BadInputError("checkpoint.url", folder.storage.url, allowed)
    return f"{other} (of host {recorded.get('host', 'unknown')})"


def take_ownership(folder: CheckpointFolder, run: str | Path) -> str | None:
    """Check the folder with `check_owner`, then record this run as its owner."""
    path, other = Path(run).resolve(), check_owner(folder, run)
    if other is not None or _read_owner(folder).get("run") != str(path):
        recorded = {"run": str(path), "host": socket.gethostname()}
        folder.storage.put(_RUN, json.dumps(recorded).encode())
    return other


def release_ownership(folder: CheckpointFolder) -> None:
    """Remove the mark that `take_ownership` left, so that another run may take the folder."""
    folder.storage.remove(_RUN)


def _read_owner(folder: CheckpointFolder) -> dict[str, Any]:
    try:
        found = parse_json(folder.storage.read(_RUN))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _acquire(url: str, attempts_before: int, run: str | None) -> AcquiredFolder:
    try:
        folder = CheckpointFolder(url)
        other = None if run is None else take_ownership(folder, run)
        attempt = max(attempts_before, folder.owner()) + 1
        folder.acquire(attempt)
        steps, damaged = tuple(folder.trained_steps()), tuple(folder.damaged())
        return AcquiredFolder(attempt, steps, damaged, taken_from=other)
    except OSError as error:
        return AcquiredFolder(attempts_before + 1, problem=f"cannot be read: {error}")
    except BadInputError as error:
        return AcquiredFolder(attempts_before + 1, problem=error.allowed)
