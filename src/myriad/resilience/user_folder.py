"""Where what outlives runs is kept, for one user on one machine or, with a shared home, on all of them."""

import os
from pathlib import Path

__all__ = ["user_folder"]


def user_folder() -> Path:
    """``$XDG_DATA_HOME/myriad``, or in ~/.local/share."""
    data = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(data) / "myriad"
