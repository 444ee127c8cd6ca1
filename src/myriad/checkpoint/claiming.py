"""A new start of the ranks takes its folder of checkpoints over. No torch here.

The keeper does it: whoever touches a storage that hangs waits in the kernel and cannot even be killed, which
must not happen to a rank.
"""

import threading
from dataclasses import dataclass

from myriad.checkpoint.folder import CheckpointFolder
from myriad.errors import BadInputError

__all__ = ["Claimed", "claim_folder"]


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


def claim_folder(url: str, attempts_before: int, seconds: float) -> Claimed:
    """Raises nothing; ``seconds``: how long the storage may take to answer."""
    found: list[Claimed] = []
    worker = threading.Thread(target=lambda: found.append(_claim(url, attempts_before)), daemon=True)
    worker.start()
    worker.join(seconds)
    silent = Claimed(attempts_before + 1, problem=f"does not answer within {seconds:g} s")
    return found[0] if found else silent


def _claim(url: str, attempts_before: int) -> Claimed:
    try:
        folder = CheckpointFolder(url)
        attempt = max(attempts_before, folder.owner()) + 1
        folder.claim(attempt)
        return Claimed(attempt, tuple(folder.trained_steps()), tuple(folder.damaged()))
    except OSError as error:
        return Claimed(attempts_before + 1, problem=f"cannot be read: {error}")
    except BadInputError as error:
        return Claimed(attempts_before + 1, problem=error.allowed)
