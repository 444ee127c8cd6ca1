"""What the kernel says of a process."""

from contextlib import suppress
from pathlib import Path

__all__ = ["process_state"]


def process_state(pid: int) -> str:
    """Its letter: R, S, D, T (stopped), Z, ...; ``?``: there is none."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "?"
