"""Finds the processes of a run that this process has started, by what they are."""

import os
from pathlib import Path

__all__ = ["alive", "descendants", "process_of"]


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
    """``rank-R``, or a module of `myriad.resilience`."""
    for one in descendants(pid):
        try:
            name = Path(f"/proc/{one}/comm").read_text().strip()
            words = Path(f"/proc/{one}/cmdline").read_text().split("\0")
        except OSError:
            continue
        if name == f"myriad-{what}" or (
            f"myriad.resilience.{what}" in words and not name.startswith("myriad-rank")
        ):
            return one
    raise AssertionError(f"no process {what}")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
