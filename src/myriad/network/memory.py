"""What a question would need of this machine's memory, said before it is asked: a line instead of a kill."""

import os
from pathlib import Path

from myriad.errors import BadInputError
from myriad.units import format_bytes

__all__ = ["available_bytes", "check_memory"]


def check_memory(what: str, num_bytes: float) -> None:
    """Raises `BadInputError` where ``what`` would need more than there is."""
    there = available_bytes()
    if num_bytes > there:
        allowed = f"at most {format_bytes(there)}, all that is free here: ask for less"
        raise BadInputError(f"memory for {what}", format_bytes(num_bytes), allowed)


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> float:
    """Memory that programs can have without others being moved out; where nothing says so, half of all."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines())
        return 1024.0 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return 0.5 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
