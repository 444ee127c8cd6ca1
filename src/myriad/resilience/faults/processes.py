"""The processes of a run that this process has started, by what they are; and what its ranks are doing."""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from myriad.checkpoint.keeper_start import keeper_name
from myriad.processes import process_state
from myriad.resilience.faults.kinds import Target
from myriad.run import Run
from myriad.telemetry.progress_page import ROW_BYTES, ProgressPage, Seen

__all__ = ["Processes"]

_MODULES: dict[Target, str] = {
    "driver": "myriad.resilience.driver",
    "executor": "myriad.resilience.executor_process",
    "loader": "myriad.data.loader_process",
    "keeper": "myriad.checkpoint.keeper_process",
}
_STALE_SECONDS = 0.1


class Processes:
    """Found anew at each question: they come and go."""

    def __init__(self, run: Run) -> None:
        self._keeper = keeper_name(run.path)
        self._page: ProgressPage | None = None
        self._executor: int | None = None
        self._looked_at = 0.0

    def pid(self, where: Target, rank: int | None = None) -> int | None:
        """Of a process that lives, if there is one."""
        if where == "rank":
            assert rank is not None, "planned"
            rows = self.rows(rank + 1)
            pid = rows[rank].pid if rows else 0
            return pid if pid and _is_rank(pid, rank) else None
        if where == "keeper":
            return next((pid for pid in all_pids() if self._is_keeper(pid)), None)
        return next((pid for pid in descendants(os.getpid()) if _is_module(pid, _MODULES[where])), None)

    def _is_keeper(self, pid: int) -> bool:
        return self._keeper in _words(pid) and _is_module(pid, _MODULES["keeper"])

    def rows(self, world: int) -> list[Seen]:
        """Of the progress page of the node, which is its executor's; none while there is none."""
        now = time.monotonic()
        if now - self._looked_at > _STALE_SECONDS:
            self._looked_at = now
            executor = self.pid("executor")
            if executor != self._executor:
                self._executor, self._page = executor, None
            if self._page is None and executor is not None:
                self._page = _page_of(executor)
        return [] if self._page is None else [self._page.read(row) for row in range(world)]


def _page_of(executor: int) -> ProgressPage | None:
    with suppress(OSError):
        for path in Path(f"/proc/{executor}/fd").iterdir():
            if path.readlink().name.startswith(ProgressPage.NAME):
                descriptor = os.open(path, os.O_RDWR)
                return ProgressPage(os.fstat(descriptor).st_size // ROW_BYTES, descriptor)
    return None


def all_pids() -> list[int]:
    """Of this machine."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def descendants(pid: int) -> Iterator[int]:
    """All processes below one."""
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, listed.read_text().split()):
                yield child
                yield from descendants(child)


def is_alive(pid: int) -> bool:
    """Not a zombie."""
    return process_state(pid) not in "?Z"


def _is_rank(pid: int, rank: int) -> bool:
    """The page may still have the number of one that is gone, which is another's by now."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip() == f"myriad-rank-{rank}" and is_alive(pid)
    return False


def _is_module(pid: int, module: str) -> bool:
    """A rank has the words of what it was forked from, and a name of its own; none of these."""
    return module in _words(pid) and is_alive(pid)


def _words(pid: int) -> list[str]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return []
