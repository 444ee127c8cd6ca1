"""The processes of a run that this process started, by role; and what its ranks are doing."""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

from myriad.checkpoint.snapshots.server_start import server_name
from myriad.faults.recovery_targets import Target
from myriad.faults.services import REDIS_SERVER
from myriad.run import Run
from myriad.system.processes import process_state
from myriad.telemetry.progress.progress_page import ROW_BYTES, ProgressPage, RowStatus

__all__ = ["RunProcesses"]

_MODULES: dict[Target, str] = {
    "driver": "myriad.supervise.driver.driver",
    "executor": "myriad.supervise.agent.agent_process",
    "fork-server": "myriad.supervise.agent.fork_server",
    "loader": "myriad.data.loader_process",
    "keeper": "myriad.checkpoint.snapshots.snapshot_server_process",
}
_WORDS: dict[Target, str] = {"watch": "watch", "redis": REDIS_SERVER}
"""Word in the command line of each service that a scenario starts."""
_STALE_SECONDS = 0.1
_NODE_WORD = 4
"""Index of the node in a node agent's command: ``python -Pm MODULE RUN NODE ...``."""
_NO_RANK = RowStatus(0, 0, -1, 0, 0, 0, 0, 0, "", "")


class RunProcesses:
    """Finds the processes of a run; it searches again at each call, because processes come and go."""

    def __init__(self, run: Run, num_nodes: int = 1) -> None:
        """``num_nodes``: number of nodes of the run, spares included."""
        self._run, self._num_nodes = run, num_nodes
        self._pages: dict[int, ProgressPage] = {}
        """Progress pages by node agent."""
        self._rank_of: dict[int, int] = {}
        """Rank of each known process id."""
        self._polled_at = 0.0

    def pid(self, where: Target, rank: int | None = None, node: int | None = None) -> int | None:
        """Return the PID of a live process, if there is one. ``node`` selects among several."""
        if where == "rank":
            assert rank is not None, "planned"
            rows = self.rows(rank + 1)
            pid = rows[rank].pid if rows else 0
            return pid if pid and _is_rank(pid, rank) else None
        if where == "keeper":
            return next(iter(self._keepers(node or 0)), None)
        own = list(descendants(os.getpid()))
        if where in _WORDS:
            return next((pid for pid in own if _has_word(pid, _WORDS[where]) and is_alive(pid)), None)
        standing = {pid for one in own if "--standby" in _words(one) for pid in descendants(one)}
        if where == "standby":
            return next((pid for pid in standing if _is_module(pid, _MODULES["driver"])), None)
        if node is not None and where in ("fork-server", "loader"):
            executor = self.pid("executor", node=node)
            own = [] if executor is None else list(descendants(executor))
        found = (pid for pid in own if pid not in standing and _is_module(pid, _MODULES[where]))
        of_node = None if where in ("fork-server", "loader") else node
        return next((pid for pid in found if of_node is None or _words(pid)[_NODE_WORD] == str(node)), None)

    def all(self) -> list[int]:
        """Return all processes of the run, including this one, which is its launcher."""
        keepers = [pid for node in range(self._num_nodes) for pid in self._keepers(node)]
        return [os.getpid(), *filter(is_alive, descendants(os.getpid())), *keepers]

    def left_over(self) -> list[int]:
        """Return the remaining processes of the run, wherever they are in the process tree. Snapshot servers
        are left out, because they may outlive the run briefly."""
        path, name = str(self._run.path), f"MYRIAD_ATTEMPT_ID={self._run.path.name}."
        return [
            pid
            for pid in all_pids()
            if pid != os.getpid()
            and is_alive(pid)
            and _MODULES["keeper"] not in (words := _words(pid))
            and (path in words or any(one.startswith(name) for one in _words(pid, "environ")))
        ]

    def _keepers(self, node: int) -> list[int]:
        name = server_name(self._run.path, node if self._num_nodes > 1 else None)
        return [pid for pid in all_pids() if _is_keeper(pid, name)]

    def rows(self, world: int) -> list[RowStatus]:
        """Return the row of each rank, from the progress pages of the node agents; empty if there is no
        row."""
        now = time.monotonic()
        if now - self._polled_at > _STALE_SECONDS:
            self._polled_at = now
            self._find_pages()
        if self._num_nodes == 1:
            return [page.read(row) for page in self._pages.values() for row in range(world)]
        rows = [page.read(row) for page in self._pages.values() for row in range(world)]
        by_rank = {self._rank_of_process(row.pid): row for row in rows if row.pid}
        return [by_rank.get(rank, _NO_RANK) for rank in range(world)] if by_rank else []

    def place(self, rank: int) -> tuple[int, int] | None:
        """Return the node of a rank, and its index there."""
        for executor, page in self._pages.items():
            for row in range(rank + 1):
                pid = page.read(row).pid
                if pid and self._rank_of_process(pid) == rank and is_alive(pid):
                    return int(_words(executor)[_NODE_WORD]), row
        return None

    def ranks_on(self, node: int, world: int) -> list[int]:
        """Return the PIDs of living ranks on a node."""
        found = [
            page
            for pid, page in self._pages.items()
            if _words(pid)[_NODE_WORD : _NODE_WORD + 1] == [str(node)]
        ]
        pids = {page.read(row).pid for page in found for row in range(world)}
        return [pid for pid in pids if pid and is_alive(pid)]

    def _find_pages(self) -> None:
        executors = [pid for pid in descendants(os.getpid()) if _is_module(pid, _MODULES["executor"])]
        self._pages = {pid: page for pid, page in self._pages.items() if pid in executors}
        for pid in executors[: self._num_nodes]:
            if pid not in self._pages and (page := _page_of(pid)) is not None:
                self._pages[pid] = page

    def _rank_of_process(self, pid: int) -> int:
        if pid not in self._rank_of:
            with suppress(OSError, ValueError):
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                self._rank_of[pid] = int(name.removeprefix("myriad-rank-"))
        return self._rank_of.get(pid, -1)


def _page_of(executor: int) -> ProgressPage | None:
    with suppress(OSError):
        for path in Path(f"/proc/{executor}/fd").iterdir():
            if path.readlink().name.startswith(ProgressPage.NAME):
                descriptor = os.open(path, os.O_RDWR)
                return ProgressPage(os.fstat(descriptor).st_size // ROW_BYTES, descriptor)
    return None


def all_pids() -> list[int]:
    """Return all PIDs of this machine."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def descendants(pid: int) -> Iterator[int]:
    """Yield all descendants of a process."""
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, listed.read_text().split()):
                yield child
                yield from descendants(child)


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    return process_state(pid) not in "?Z"


def _is_rank(pid: int, rank: int) -> bool:
    """Return whether the process is this rank: the page may still have the PID of a dead rank, which another
    process has now."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip() == f"myriad-rank-{rank}" and is_alive(pid)
    return False


def _is_keeper(pid: int, name: str) -> bool:
    return name in _words(pid) and _is_module(pid, _MODULES["keeper"])


def _is_module(pid: int, module: str) -> bool:
    """Return whether the process runs a module. A rank has its fork server's command line but a name of its
    own."""
    return module in _words(pid) and is_alive(pid)


def _has_word(pid: int, word: str) -> bool:
    """Return whether the command line has a word: some processes, such as Redis, rewrite it as one text."""
    return any(word in text.split(" ") for text in _words(pid))


def _words(pid: int, file: Literal["cmdline", "environ"] = "cmdline") -> list[str]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/{file}").read_text(errors="replace").split("\0")
    return []
