"""What machine this is, for whoever remembers it beyond a run."""

import os
import socket
from pathlib import Path

__all__ = ["MACHINE", "machine_name"]

MACHINE = "MYRIAD_MACHINE"
"""Names it, in the environment, where the host's name does not (a pod's); empty: nobody may remember it, as
its nodes are no machines of their own."""
_ID_CHARACTERS = 8


def machine_name(root: Path = Path("/")) -> str:
    """``HOST/ID``: a host that was installed anew is another one. Empty: it has no name of its own."""
    given = os.environ.get(MACHINE)
    if given is not None:
        return given
    try:
        number = (root / "etc/machine-id").read_text().strip()[:_ID_CHARACTERS]
    except OSError:
        number = ""
    return socket.gethostname() + (f"/{number}" if number else "")
