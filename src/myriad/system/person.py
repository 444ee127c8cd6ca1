"""The person who runs this process, for events that say who changed something."""

import getpass
import os
import socket

__all__ = ["person"]


def person() -> str:
    """Return USER@HOST of the person who runs this process."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        name = f"user {os.getuid()}"
    return f"{name}@{socket.gethostname()}"
