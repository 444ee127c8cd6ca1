"""The driver's decisions, one per line with the resulting state, on disk before they are carried out.

    {"time": ..., "plan": {...}}                              the launcher has started the run
    {"time": ..., "actions": [{...}], "state": {...}}         a decision

A new driver begins with the newest plan and state. Each line holds the whole state, so earlier lines are not
needed. A torn last line was not acted upon.

A full or hung disk never delays the repair of a run: the driver acts, reports the problem, and keeps its
lines in memory. They are written, in order, once there is room (`retry`). If the driver is lost before that,
the next one continues from the older state, and learns from the nodes what was decided since (`attempts`).
The lines of a start have consecutive numbers, ``sequence``, so that a reader can count the missing ones.
Where drivers hold a lease (`leadership`), each line has the lease's term and its number within the term. A
line with a lower term than an earlier line is ignored.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from myriad.supervise.policy.policy_actions import PolicyAction
from myriad.supervise.policy.run_state import RunPlan, RunState
from myriad.system.jsonl import JsonlTail, LineFile, Record, append_line
from myriad.wire.message_codec import encode, plain, read

__all__ = ["Journal", "Leftovers", "NewestEntries", "count_missing"]

_MOST_WAITING = 1000
"""Most decisions that are kept in memory; only the newest is needed to continue."""
_MOST_LISTED = 6


class Journal:
    """The journal of a run."""

    def __init__(self, path: Path, report: Callable[[str, int, int], None] | None = None) -> None:
        """``report``: called by `LineFile` when writing begins to fail, and when it works again."""
        self.path = path
        self._file = LineFile(path, report, sync=True, most_waiting=_MOST_WAITING)
        self._sequence: int | None = None
        """Sequence number of the next line."""

    def begin(self, plan: RunPlan, term: int = 0) -> Record:
        """Begin a new start of the run under the lease of that term: earlier decisions no longer count.
        Raises ``OSError`` if the start could not be written."""
        line = {"time": time.time(), "plan": plain(plan)} | ({"term": term} if term else {})
        append_line(self.path, line | {"sequence": 0}, sync=True)
        self._sequence = 1
        return line

    def write(self, actions: Sequence[PolicyAction], state: RunState) -> None:
        """Write a decision. Call it before the first action is carried out."""
        self.append(self.entry(actions, state))

    @staticmethod
    def entry(actions: Sequence[PolicyAction], state: RunState) -> dict[str, Any]:
        """Return the entry with the current values, because a thread may write it later."""
        decided = {"actions": [encode(action) for action in actions], "state": plain(state)}
        return {"time": time.time(), **decided}

    def append(self, entry: dict[str, Any]) -> None:
        """Append a line, which is on disk when this returns. Raises ``OSError`` if it is kept in memory
        instead (`retry`)."""
        if self._sequence is None:
            self._sequence = 1 + max(
                (_sequence(record) for record in _newest_start(self.records())), default=0
            )
        number, self._sequence = self._sequence, self._sequence + 1
        if not self._file.append(entry | {"sequence": number}):
            raise OSError(f"{self._file.problem}; it is kept in memory until there is room")

    @property
    def num_waiting(self) -> int:
        """Number of lines that are only in memory."""
        return self._file.num_waiting

    def retry(self) -> None:
        """Write the lines that are in memory, if there is room now."""
        self._file.flush()

    def left_over(self, events: Sequence[Record] = (), *, was_driven: bool = False) -> "Leftovers":
        """Return what the next start needs from the last one. ``events``: events of the run. ``was_driven``:
        whether there was a journal. If lines are damaged or missing, the events replace them as far as
        possible."""
        tail = JsonlTail(self.path)
        records = tail.poll()
        problem = tail.problem
        try:
            plan, state = NewestEntries.of(records).parse(self.path)
            last = plan if state is None else state
            found = Leftovers(last.newest_step, last.skipped_steps)
        except (OSError, ValueError) as error:  # there was no plan, or one of another version
            found = Leftovers()
            if was_driven:
                problem = problem or (str(error) if records or tail.num_wrong else "it is missing or empty")
        damaged = tail.num_wrong + count_missing(records)
        if not problem and damaged:
            problem = f"{damaged} of its lines are damaged or missing"
        if not problem:
            return found
        newest, known = _known_from_events(events)
        skipped = tuple(sorted({*found.skipped_steps, *known}))
        steps = [step for step in (newest, found.newest_step) if step is not None]
        return Leftovers(min(steps, default=None), skipped, problem)

    def replay(self) -> tuple[RunPlan, RunState | None]:
        """Return the newest plan and state; the state is ``None`` if there was no decision yet. Raises
        ``ValueError`` if there is no plan."""
        return self.newest().parse(self.path)

    def newest(self, *others: Iterable[Record]) -> "NewestEntries":
        """Return the newest entries of this file, or of another store that is newer."""
        return max(map(NewestEntries.of, (self.records(), *others)), key=lambda one: one.mark)

    def records(self) -> list[Record]:
        """Return all readable lines."""
        return JsonlTail(self.path).poll()

    def last_term(self) -> int:
        """Return the highest lease term of any line; 0 if there is none."""
        return max((_mark(record)[0] for record in self.records()), default=0)


@dataclass(frozen=True)
class Leftovers:
    """What a start of the run leaves for the next one."""

    newest_step: int | None = None
    """Newest step that can be trusted, if the ranks had not gone back to it; ``None``: no limit."""
    skipped_steps: tuple[int, ...] = ()
    problem: str = ""
    """Problem with the journal; decisions that no event reports are then lost."""

    def text(self) -> str:
        """Describe the problem, and what the events replace, for an event."""
        known = ", ".join(map(str, self.skipped_steps[:_MOST_LISTED])) or "none"
        more = len(self.skipped_steps) - _MOST_LISTED
        known += f" and {more} more" if more > 0 else ""
        newest = "" if self.newest_step is None else f", goes back to step {self.newest_step}"
        skips = f"skips the batches of steps {known}{newest}"
        return f"journal.jsonl: {self.problem}; from the run's events: {skips}"


@dataclass
class NewestEntries:
    """The newest plan and state of a list of lines."""

    mark: tuple[int, int] = (-1, 0)
    """Term and number of the newest entry."""
    plan: Record | None = None
    state: Record | None = None

    @classmethod
    def of(cls, records: Iterable[Record]) -> "NewestEntries":
        """Select the newest plan and state from all lines, in the order in which they were written."""
        found = cls()
        for record in records:
            mark, is_plan = _mark(record), "plan" in record
            # only a person starts a run without a lease
            if mark < found.mark and not (is_plan and mark == (0, 0)):
                continue
            found.mark = mark
            if is_plan:
                found.plan, found.state = record, None
            else:
                found.state = record if "state" in record else found.state
        return found

    def parse(self, source: object) -> tuple[RunPlan, RunState | None]:
        """Parse plan and state. Raises ``ValueError``."""
        if self.plan is None:
            raise ValueError(f"{source} has no plan")
        state = None if self.state is None else read(RunState, self.state["state"])
        return read(RunPlan, self.plan["plan"]), state


def _known_from_events(events: Sequence[Record]) -> tuple[int | None, set[int]]:
    """Return the newest step that can be trusted, if no start went back to it, and the skipped steps."""
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
    """Return how many lines since the newest start are missing, according to the line numbers."""
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
