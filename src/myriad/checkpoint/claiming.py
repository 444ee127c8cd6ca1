"""A new start of the ranks takes its folder of checkpoints over. No torch here.

A folder that a job names (checkpoint.url) is of one run, whose path stands in the folder's ``run.json``.
Another run is refused as long as that path is a run; of one that is gone, moved or on a machine that cannot
be seen from here it takes the folder over, and says so.

The keeper does it: whoever touches a storage that hangs waits in the kernel and cannot even be killed, which
must not happen to a rank.
"""

import json
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from myriad.checkpoint.folder import CheckpointFolder
from myriad.checkpoint.storage import LocalStorage
from myriad.errors import BadInputError
from myriad.whole_file import parse_json

__all__ = ["Claimed", "check_run", "claim_folder", "give_back", "take_folder"]

_RUN = "run.json"


@dataclass(frozen=True)
class Claimed:
    """What came of it."""

    attempt: int
    """Number of the new start."""
    steps: tuple[int, ...] = ()
    """Of the durable checkpoints of training, ascending."""
    damaged: tuple[int, ...] = ()
    """Steps whose checkpoints were set aside as damaged."""
    problem: str | None = None
    """Why the folder could not be taken over."""
    taken_from: str | None = None
    """Another run that stored there."""


def claim_folder(url: str, attempts_before: int, seconds: float, run: str | None = None) -> Claimed:
    """Raises nothing; ``seconds``: how long the storage may take to answer; ``run``: the path of the run."""
    found: list[Claimed] = []
    worker = threading.Thread(target=lambda: found.append(_claim(url, attempts_before, run)), daemon=True)
    worker.start()
    worker.join(seconds)
    silent = Claimed(attempts_before + 1, problem=f"does not answer within {seconds:g} s")
    return found[0] if found else silent


def check_run(folder: CheckpointFolder, run: str | Path) -> str | None:
    """Refuse a folder in which another run stores its checkpoints. Return the other run's path, where that is
    not to be seen from here; ``None``: no other run has it. Raises `BadInputError`, ``OSError``."""
    run = Path(run).resolve()
    noted = _noted(folder)
    if isinstance(folder.storage, LocalStorage):
        parent = folder.storage.root.resolve().parent
        if parent == run:
            return None
        if (parent / "job.toml").exists():
            noted = {"run": str(parent)}
    other = noted.get("run")
    if not isinstance(other, str) or Path(other) == run:
        return None
    if (Path(other) / "job.toml").exists():
        allowed = f"is where the run {other} stores; another place, and --init-from {other} for its weights"
        raise BadInputError("checkpoint.url", folder.storage.url, allowed)
    return f"{other} (of host {noted.get('host', 'unknown')})"


def take_folder(folder: CheckpointFolder, run: str | Path) -> str | None:
    """`check_run`, then the folder is of this run."""
    path, other = Path(run).resolve(), check_run(folder, run)
    if other is not None or _noted(folder).get("run") != str(path):
        noted = {"run": str(path), "host": socket.gethostname()}
        folder.storage.put(_RUN, json.dumps(noted).encode())
    return other


def give_back(folder: CheckpointFolder) -> None:
    """Remove the mark that `take_folder` left, so that another run may take the folder."""
    folder.storage.remove(_RUN)


def _noted(folder: CheckpointFolder) -> dict[str, Any]:
    try:
        found = parse_json(folder.storage.read(_RUN))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _claim(url: str, attempts_before: int, run: str | None) -> Claimed:
    try:
        folder = CheckpointFolder(url)
        other = None if run is None else take_folder(folder, run)
        attempt = max(attempts_before, folder.owner()) + 1
        folder.claim(attempt)
        steps, damaged = tuple(folder.trained_steps()), tuple(folder.damaged())
        return Claimed(attempt, steps, damaged, taken_from=other)
    except OSError as error:
        return Claimed(attempts_before + 1, problem=f"cannot be read: {error}")
    except BadInputError as error:
        return Claimed(attempts_before + 1, problem=error.allowed)
