"""What the driver decided, on disk before it is done: a line each, with the state that follows.

    {"time": ..., "plan": {...}}                              the engine has started the run
    {"time": ..., "actions": [{...}], "state": {...}}         a decision

A new driver begins with the plan and the state that were written last. A torn last line was not acted upon.
Where drivers hold a lease (`tenure.py`), each line has its term and its number in that; one of a term that
was over when it came counts for nothing.
"""

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from myriad.jsonl import JsonlTail, Record, append_line
from myriad.resilience.codec import encode, plain, read
from myriad.resilience.decide.actions import Action
from myriad.resilience.decide.state import Plan, State

__all__ = ["Journal", "Newest"]


class Journal:
    """Of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, plan: Plan, term: int = 0) -> Record:
        """A new start of the run, by whoever has the lease of that term: earlier decisions are over."""
        line = {"time": time.time(), "plan": plain(plan)} | ({"term": term} if term else {})
        self.append(line)
        return line

    def write(self, actions: Sequence[Action], state: State) -> None:
        """To be called before the first action."""
        self.append(self.entry(actions, state))

    @staticmethod
    def entry(actions: Sequence[Action], state: State) -> dict[str, Any]:
        """What is to be written, as it is now: whoever writes may be a thread that comes to it later."""
        decided = {"actions": [encode(action) for action in actions], "state": plain(state)}
        return {"time": time.time(), **decided}

    def append(self, entry: dict[str, Any]) -> None:
        """On disk when this returns. Raises ``OSError``."""
        append_line(self.path, entry)
        handle = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def left_over(self) -> tuple[int | None, tuple[int, ...]]:
        """What the last start of the run has found and the next must know: the newest step that can be
        trusted, where the ranks had not gone back to it (``None``: any can), and the steps that are
        skipped."""
        try:
            plan, state = self.replay()
        except (OSError, ValueError):  # there was none, or one of another version
            return None, ()
        last = plan if state is None else state
        return last.newest_step, last.skipped_steps

    def replay(self) -> tuple[Plan, State | None]:
        """The newest plan and what has become of it; ``None``: nothing was decided. Raises ``ValueError``
        when there is no plan."""
        return self.newest().parse(self.path)

    def newest(self, *others: Iterable[Record]) -> "Newest":
        """Of this file, or of the lines of another store that is newer."""
        return max(map(Newest.of, (self.records(), *others)), key=lambda one: one.mark)

    def records(self) -> list[Record]:
        """All lines."""
        return JsonlTail(self.path).poll()

    def last_term(self) -> int:
        """The highest of a lease under which anything was written here; 0: there was none."""
        return max((_mark(record)[0] for record in self.records()), default=0)


@dataclass
class Newest:
    """The lines that count."""

    mark: tuple[int, int] = (-1, 0)
    """Term and number of the last of them."""
    plan: Record | None = None
    state: Record | None = None

    @classmethod
    def of(cls, records: Iterable[Record]) -> "Newest":
        """Of all lines, in the order in which they were written."""
        found = cls()
        for record in records:
            mark, is_plan = _mark(record), "plan" in record
            if mark < found.mark and not (is_plan and mark == (0, 0)):  # a start without leases is a person's
                continue
            found.mark = mark
            if is_plan:
                found.plan, found.state = record, None
            else:
                found.state = record if "state" in record else found.state
        return found

    def parse(self, source: object) -> tuple[Plan, State | None]:
        """What they say. Raises ``ValueError``."""
        if self.plan is None:
            raise ValueError(f"{source} has no plan")
        state = None if self.state is None else read(State, self.state["state"])
        return read(Plan, self.plan["plan"]), state


def _mark(record: Record) -> tuple[int, int]:
    term, number = record.get("term", 0), record.get("number", 0)
    return (term, number) if isinstance(term, int) and isinstance(number, int) else (0, 0)
