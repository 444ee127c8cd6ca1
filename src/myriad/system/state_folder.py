"""The folders in which Myriad keeps small files of one user: tokens, certificates, secrets, locks; and files
that it can derive again."""

import os
import stat
from pathlib import Path

__all__ = ["cache_folder", "make_private", "state_folder"]


def state_folder() -> Path:
    """Return ``$XDG_STATE_HOME/myriad``, by default ~/.local/state/myriad. Raises ``OSError`` if the user has
    no home folder."""
    try:
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    except RuntimeError as error:
        raise OSError(str(error)) from None
    return state / "myriad"


def cache_folder() -> Path:
    """Return the folder of derived files: ``$XDG_CACHE_HOME/myriad``, else ``~/.cache/myriad``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "myriad"


def make_private(folder: Path) -> None:
    """Create a folder if it is missing. Raises ``OSError``, also if another user can write into it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{folder}: another user can write into this folder")
