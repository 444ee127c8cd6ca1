"""What the kernel says of a process."""

from contextlib import suppress

__all__ = ["process_cpu_ticks", "process_start_ticks", "process_state"]

_STAT_BYTES = 4096
"""More than its 52 numbers take."""


def process_state(pid: int) -> str:
    """Its letter: R, S, D, T (stopped), Z, ...; ``?``: there is none."""
    fields = _stat_fields(pid)
    return fields[0] if fields else "?"


def process_start_ticks(pid: int) -> int | None:
    """When it started, in ticks since boot: with the pid, a name for good. None: it is gone."""
    fields = _stat_fields(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else None


def process_cpu_ticks(pid: int) -> int:
    """Processor time that all its threads have used, in ticks; -1: there is no such process."""
    fields = _stat_fields(pid)
    return int(fields[11]) + int(fields[12]) if fields else -1


def _stat_fields(pid: int) -> list[str]:
    """Of /proc/PID/stat, from the state on: the name before it may hold anything."""
    with suppress(OSError), open(f"/proc/{pid}/stat", "rb", 0) as file:  # asked again and again: no pathlib
        return file.read(_STAT_BYTES).rpartition(b")")[2].decode("ascii").split()
    return []
