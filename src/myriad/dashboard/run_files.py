"""What a run's folder says, read as it grows: what the run is, its steps, its events. Never writes.

A file that is half-written or wrong is left out, counted and told; it is looked at again when it has changed.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from myriad.dashboard.insight.findings import ranks_of
from myriad.dashboard.insight.ranks import Ranks
from myriad.errors import MyriadError
from myriad.jsonl import JsonlTail, Record
from myriad.run import Run, StepLines

if TYPE_CHECKING:
    from myriad.job import Job

__all__ = ["RunFiles"]


@dataclass
class RunFiles:
    """Of one run. Raises `BadInputError` where there is none."""

    run: Run
    job: "Job" = field(init=False)
    metrics: list[Record] = field(init=False)
    """One a step, in order, without those that a resumed attempt has replaced."""
    events: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.job = self.run.job()
        self._steps, self._events_tail = StepLines(self.run.metrics_path), JsonlTail(self.run.events_path)
        self.metrics = self._steps.lines

    @property
    def ranks(self) -> Ranks:
        """As the job's layout says."""
        return ranks_of(self.job)

    def poll(self) -> bool:
        """Reads what was added; whether there was anything."""
        lines, events = self._steps.poll(), self._events_tail.poll()
        self.events += events
        if any(event.get("event") == "start" for event in events):
            with contextlib.suppress(MyriadError, OSError):
                self.job = self.run.job()  # a resumed run may go on for longer
        return bool(lines or events)

    @property
    def num_wrong_lines(self) -> int:
        """Of the steps', that are wrong or have a wrong figure."""
        return self._steps.num_wrong

    def last(self, event: str) -> Record:
        """The newest of its name; empty: there was none."""
        return next((each for each in reversed(self.events) if each.get("event") == event), {})

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


def number(value: Any) -> float | None:
    """As a number, or ``None`` where a line has something else."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
