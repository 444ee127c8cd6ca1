"""What the driver decided, on disk before it is done: a line each, with the state that follows.

    {"time": ..., "plan": {...}}                              the engine has started the run
    {"time": ..., "actions": [{...}], "state": {...}}         a decision

A new driver begins with the plan and the state that were written last; each line holds the whole state, so
none before it is needed. A torn last line was not acted upon.

A disk that takes no line never holds up the repair of a run: the driver acts, reports that, and keeps its
lines in memory; they are written, in order, once there is room (`retry`). Should it be lost before that, the
next driver goes on from the older state, and learns what was decided since from the nodes (`catch_up`). Lines
of a start have consecutive numbers, ``sequence``, so that a reader counts those that are missing.
Where drivers hold a lease (`tenure.py`), each line has its term and its number in that; one of a term that
was over when it came counts for nothing.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from myriad.jsonl import JsonlTail, LineFile, Record, append_line
from myriad.resilience.codec import encode, plain, read
from myriad.resilience.decide.actions import Action
from myriad.resilience.decide.state import Plan, State

__all__ = ["Journal", "LeftOver", "Newest", "count_missing"]

_MOST_WAITING = 1000
"""Decisions; the newest alone is needed to go on."""
_MOST_TOLD = 6


class Journal:
    """The journal of a run."""

    def __init__(self, path: Path, tell: Callable[[str, int, int], None] | None = None) -> None:
        """``tell``: called by `LineFile` when writing begins to fail, and when it works again."""
        self.path = path
        self._file = LineFile(path, tell, sync=True, most_waiting=_MOST_WAITING)
        self._sequence: int | None = None
        """Sequence number of the next line."""

    def begin(self, plan: Plan, term: int = 0) -> Record:
        """A new start of the run, by whoever has the lease of that term: earlier decisions are over. Raises
        ``OSError``: it has not begun."""
        line = {"time": time.time(), "plan": plain(plan)} | ({"term": term} if term else {})
        append_line(self.path, line | {"sequence": 0}, sync=True)
        self._sequence = 1
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
        """Write a line, on disk when this returns. Raises ``OSError``: it waits in memory (`retry`)."""
        if self._sequence is None:
            self._sequence = 1 + max(
                (_sequence(record) for record in _newest_start(self.records())), default=0
            )
        number, self._sequence = self._sequence, self._sequence + 1
        if not self._file.append(entry | {"sequence": number}):
            raise OSError(f"{self._file.problem}; it is kept in memory until there is room")

    @property
    def num_waiting(self) -> int:
        """Lines that are in memory only."""
        return self._file.num_waiting

    def retry(self) -> None:
        """Write the lines that wait, if there is room now."""
        self._file.flush()

    def left_over(self, events: Sequence[Record] = (), *, was_driven: bool = False) -> "LeftOver":
        """What the last start of the run has found and the next must know. ``events``: of the run;
        ``was_driven``: there was a journal once. What is damaged or missing is made up for from the events as
        far as they go."""
        tail = JsonlTail(self.path)
        records = tail.poll()
        problem = tail.problem
        try:
            plan, state = Newest.of(records).parse(self.path)
            last = plan if state is None else state
            found = LeftOver(last.newest_step, last.skipped_steps)
        except (OSError, ValueError) as error:  # there was none, or one of another version
            found = LeftOver()
            if was_driven:
                problem = problem or (str(error) if records or tail.num_wrong else "it is missing or empty")
        damaged = tail.num_wrong + count_missing(records)
        if not problem and damaged:
            problem = f"{damaged} of its lines are damaged or missing"
        if not problem:
            return found
        newest, known = _told_by_events(events)
        skipped = tuple(sorted({*found.skipped_steps, *known}))
        steps = [step for step in (newest, found.newest_step) if step is not None]
        return LeftOver(min(steps, default=None), skipped, problem)

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


@dataclass(frozen=True)
class LeftOver:
    """What one start leaves for the next."""

    newest_step: int | None = None
    """The newest step that can be trusted, where the ranks had not gone back to it; ``None``: any can."""
    skipped_steps: tuple[int, ...] = ()
    problem: str = ""
    """What is wrong with the journal; then decisions that no event reports are forgotten."""

    def text(self) -> str:
        """Return the problem and what is known in spite of it, for the event."""
        known = ", ".join(map(str, self.skipped_steps[:_MOST_TOLD])) or "none"
        more = len(self.skipped_steps) - _MOST_TOLD
        known += f" and {more} more" if more > 0 else ""
        newest = "" if self.newest_step is None else f", goes back to step {self.newest_step}"
        skips = f"skips the batches of steps {known}{newest}"
        return f"journal.jsonl: {self.problem}; from the run's events: {skips}"


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


def _told_by_events(events: Sequence[Record]) -> tuple[int | None, set[int]]:
    """The newest step that can be trusted, where no start went back to it, and the steps that are skipped."""
    newest, skipped = None, set[int]()
    for event in events:
        name, steps = event.get("event"), event.get("skipped_steps")
        if name not in ("restart", "start"):
            continue
        if isinstance(steps, list):
            skipped |= {step for step in steps if isinstance(step, int)}
        step = event.get("newest_step") if name == "restart" else None
        newest = step if isinstance(step, int) else None
    return newest, skipped


def count_missing(records: Sequence[Record]) -> int:
    """Lines that were written, by their numbers, since the newest start, and are not there."""
    numbers = [_sequence(record) for record in _newest_start(records) if "sequence" in record]
    return sum(max(0, later - earlier - 1) for earlier, later in pairwise(numbers))


def _newest_start(records: Sequence[Record]) -> Sequence[Record]:
    first = max((index for index, record in enumerate(records) if "plan" in record), default=0)
    return records[first:]


def _sequence(record: Record) -> int:
    number = record.get("sequence")
    return number if isinstance(number, int) and 0 <= number < 2**53 else 0


def _mark(record: Record) -> tuple[int, int]:
    term, number = record.get("term", 0), record.get("number", 0)
    return (term, number) if isinstance(term, int) and isinstance(number, int) else (0, 0)
