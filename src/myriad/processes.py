"""What the kernel says of a process."""

from contextlib import suppress
from pathlib import Path

__all__ = ["process_start_ticks", "process_state"]


def process_state(pid: int) -> str:
    """Its letter: R, S, D, T (stopped), Z, ...; ``?``: there is none."""
    fields = _stat_fields(pid)
    return fields[0] if fields else "?"


def process_start_ticks(pid: int) -> int | None:
    """When it started, in ticks since boot: with the pid, a name for good. None: it is gone."""
    fields = _stat_fields(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else None


def _stat_fields(pid: int) -> list[str]:
    """Of /proc/PID/stat, from the state on: the name before it may hold anything."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []
