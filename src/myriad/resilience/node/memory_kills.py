"""Whether the kernel has killed somebody here for want of memory: by its own counters."""

import re
from contextlib import suppress
from pathlib import Path

__all__ = ["count_memory_kills"]

_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def count_memory_kills(root: Path = Path("/")) -> int:
    """So far: of this process's control group where it has a counter, else of the whole machine."""
    for path in (*_of_group(root), root / "proc/vmstat"):
        with suppress(OSError):
            if found := _COUNT.search(path.read_text()):
                return int(found[1])
    return 0


def _of_group(root: Path) -> list[Path]:
    """Control groups of version 2, then of version 1."""
    files = []
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            where = path.lstrip("/")
            if number == "0":
                files.append(root / "sys/fs/cgroup" / where / "memory.events")
            elif "memory" in controllers.split(","):
                files.append(root / "sys/fs/cgroup/memory" / where / "memory.oom_control")
    return files
