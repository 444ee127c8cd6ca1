"""What a run's folder says, read as it grows: what the run is, its steps, its events. Never writes.

A file that is half-written or wrong is left out, counted and told; it is looked at again when it has changed.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from myriad.comm.layout import AXES
from myriad.dashboard.curves import Curves
from myriad.dashboard.insight.findings import ranks_of
from myriad.dashboard.insight.ranks import Ranks
from myriad.dashboard.run_look import attempt_of
from myriad.errors import MyriadError
from myriad.jsonl import Record, late_events
from myriad.run import Run
from myriad.run_lines import EventLines, Peaks, StepCount, StepLines, count_steps

if TYPE_CHECKING:
    from myriad.job import Job

__all__ = ["RunFiles"]

_BEGINS = ("start", "restart")
_MOST_FIRST_LINE = 2**16
_MOST_SECONDS, _START_SECONDS = 2**33, 1.0
"""An attempt's start is told by a rank's clock, after it began; the attempt before ended longer ago."""


@dataclass
class RunFiles:
    """Of one run. Raises `BadInputError` where there is none."""

    run: Run
    job: "Job" = field(init=False)
    """As its newest attempt computes it."""
    metrics: list[Record] = field(init=False)
    """One a step, in order, without those that a resumed attempt has replaced."""
    curves: Curves = field(init=False)
    events: list[Record] = field(init=False)
    peaks: Peaks = field(init=False)
    """Behind the MFU of each step."""
    layout_since_ns: int = field(init=False)
    """Since when ranks have their places in the grid; 0: always."""
    is_gone: bool = field(init=False, default=False)
    """The folder was there before, and is not now."""
    num_runs: int = field(init=False, default=0)
    """How many runs have been in this folder: one that is removed and trained again is another run."""

    def __post_init__(self) -> None:
        self._begin(self.run.job())

    def _begin(self, job: "Job") -> None:
        self.job = self._own_job = job
        self._has_looked, self._first_line = False, b""
        self._steps, self._events_tail = StepLines(self.run.metrics_path), EventLines(self.run.events_path)
        self.metrics, self.curves, self.events = self._steps.lines, Curves(), []
        self.peaks, self.layout_since_ns = Peaks(), 0
        self.num_runs += 1

    @property
    def ranks(self) -> Ranks:
        """As the attempt's layout says."""
        return ranks_of(self.job)

    def poll(self) -> bool:
        """Reads what was added; whether there was anything."""
        self.is_gone = not self.run.exists
        first_line = self._read_first_line()
        if first_line and self._first_line not in (b"", first_line):
            with contextlib.suppress(MyriadError, OSError):  # its job.toml may be half-written: the next look
                self._begin(self.run.job())
        self._first_line = self._first_line or first_line
        before = self._events_tail.offset
        lines, events = self._steps.poll(), self._events_tail.poll()
        if events and self._events_tail.offset < before:  # cut short, and read from its beginning
            self.events.clear()
        self.curves.add(lines)
        self.events[:] = late_events(self.events + events) if events else self.events
        if events:
            self.peaks = Peaks(self.events)
        if begins := [event for event in events if event.get("event") in _BEGINS]:
            self._follow_job(begins)
        self._has_looked = True
        return bool(lines or events)

    def _read_first_line(self) -> bytes:
        """With which events.jsonl begins: another run's is another one. An inode says nothing: a copy that
        rsync keeps up to date has a new one each time."""
        with contextlib.suppress(OSError):
            handle = os.open(self.run.events_path, os.O_RDONLY | os.O_NONBLOCK)
            with open(handle, "rb") as file:
                line = file.readline(_MOST_FIRST_LINE) if stat.S_ISREG(os.fstat(handle).st_mode) else b""
                return line if line.endswith(b"\n") else b""
        return b""

    def _follow_job(self, begins: list[Record]) -> None:
        """A resumed run may go on for longer, and in another layout."""
        with contextlib.suppress(MyriadError, OSError):
            self._own_job = self.run.job()
        before, self.job = _grid(self.job), attempt_of(self._own_job, self.events)
        if not self._has_looked:
            self.layout_since_ns = _since_ns(begins, self.job.layout.world)
        elif _grid(self.job) != before:
            self.layout_since_ns = _began_ns(begins[-1])

    @property
    def no_room_at(self) -> float:
        """When rank 0 last tried in vain to add the line of a step; 0: it was not in vain."""
        return self._steps.no_room_at

    @property
    def problems(self) -> list[str]:
        """Files that cannot be read, and why."""
        problems = {"metrics.jsonl": self._steps.problem, "events.jsonl": self._events_tail.problem}
        return [f"{name} cannot be read: {problem}" for name, problem in problems.items() if problem]

    @property
    def num_wrong_lines(self) -> int:
        """Number of lines of steps and events that are torn, wrong or have a wrong figure."""
        return self._steps.num_wrong + self._events_tail.num_wrong

    @property
    def steps(self) -> StepCount:
        """Done, and those without a line."""
        return count_steps(self.metrics, self.events)

    def last(self, *events: str) -> Record:
        """The newest of these names; empty: there was none."""
        return next((each for each in reversed(self.events) if each.get("event") in events), {})

    def span_paths(self) -> Iterator[tuple[Path, tuple[int, int]]]:
        """Files of spans inside of this folder, the newest first, each with what changes when it does."""
        folder = self.run.path.resolve() / "spans"
        if folder.is_symlink():
            return
        found: list[tuple[int, int, Path]] = []
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(".parquet") and entry.is_file(follow_symlinks=False):
                    seen = entry.stat(follow_symlinks=False)
                    found.append((seen.st_mtime_ns, seen.st_size, folder / entry.name))
        for changed, size, path in sorted(found, reverse=True):
            yield path, (changed, size)


def _grid(job: "Job") -> tuple[int, ...]:
    """What decides which rank does what."""
    return tuple(getattr(job.layout, axis) for axis in AXES)


def _since_ns(begins: list[Record], world: int) -> int:
    """When the first of the newest attempts of so many ranks began; 0: all have had as many."""
    first = begins[-1]
    for event in reversed([one for one in begins if isinstance(one.get("world"), int)]):
        if event["world"] != world:
            return _began_ns(first)
        first = event
    return 0


def _began_ns(event: Record) -> int:
    at = number(event.get("time"))
    if at is None or not 0 <= at < _MOST_SECONDS:
        return 0
    return int((at - (_START_SECONDS if event["event"] == "start" else 0.0)) * 1e9)


def number(value: Any) -> float | None:
    """As a number, or ``None`` where a line has something else."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
