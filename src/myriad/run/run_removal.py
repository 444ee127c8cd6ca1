"""Deletes the folder of a run that no process trains.

    lock ──► rename to .NAME.removed-PID ──► delete

The rename comes first, so an interrupted deletion leaves no half of a run under the run's name.
"""

import os
import shutil
from pathlib import Path

from myriad.errors import BadInputError
from myriad.run.run_folder import Run

__all__ = ["remove_run"]


def remove_run(path: Path) -> None:
    """Delete a run. Raises `BadInputError` for a run that is being trained, a symbolic link or a folder
    without a run, and ``OSError`` if files cannot be deleted."""
    run = Run(path)
    if path.is_symlink() or not run.exists:
        raise BadInputError("run", str(path), "must be a run folder, not a link to one")
    with run.lock():
        whole = path.resolve()
        hidden = whole.with_name(f".{whole.name}.removed-{os.getpid()}")
        whole.rename(hidden)
        shutil.rmtree(hidden)
