"""Finds the processes of a run that this process has started, by what they are; waits for what they do."""

import os
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["descendants", "is_alive", "process_of", "wait_until"]


def descendants(pid: int | None = None) -> list[int]:
    """All processes below one, this one when left out."""
    found, todo = [], [pid or os.getpid()]
    while todo:
        for listed in Path(f"/proc/{todo.pop()}/task").glob("*/children"):
            try:
                children = [int(child) for child in listed.read_text().split()]
            except OSError:
                continue
            found += children
            todo += children
    return found


def process_of(what: str, pid: int | None = None) -> int:
    """``rank-R``, or a module of `myriad.supervise`."""
    for one in descendants(pid):
        try:
            name = Path(f"/proc/{one}/comm").read_text().strip()
            words = Path(f"/proc/{one}/cmdline").read_text().split("\0")
        except OSError:
            continue
        of_module = any(word.startswith("myriad.supervise.") and word.endswith(f".{what}") for word in words)
        if name == f"myriad-{what}" or (of_module and not name.startswith("myriad-rank")):
            return one
    raise AssertionError(f"no process {what}")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)
