"""One run as a row of a table of runs: its state, its figures, and its job's values.

States are those of `myriad.run.run_status`, speed and MFU those of `myriad.run.run_speed`, as everywhere.
"""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from myriad.errors import BadInputError
from myriad.run import Run
from myriad.run.run_figures import LAYOUT_AXES, RunFigures, read_figures
from myriad.run.run_notes import RunNotes, read_notes
from myriad.run.run_status import RUNNING, State, state_now
from myriad.system.jsonl import Record

__all__ = ["RunRow", "find_runs", "read_row", "row_of"]

_MOST_DEPTH = 3
"""Folders between the given one and a run: runs/SWEEP/RUN has one."""


@dataclass(frozen=True, kw_only=True)
class RunRow(RunFigures):
    """A run in a table."""

    path: Path
    name: str
    state: State
    seconds: float | None = None
    """Time from the first event or step to the last one; of a running run, to now."""
    changed: float | None = None
    """Time of the last event or step, else of the job file."""
    notes: RunNotes = field(default_factory=RunNotes)

    @property
    def job_name(self) -> str | None:
        """The job's name; ``None`` if the job cannot be read."""
        return self.job.get("name")

    def as_json(self) -> dict[str, Any]:
        """Return plain values for ``--json``, without the whole job."""
        return {
            "run": str(self.path),
            "name": self.name,
            "state": self.state,
            "problem": self.problem or None,
            "job": self.job_name,
            "layout": {axis: self.job.get(f"layout.{axis}") for axis in LAYOUT_AXES} if self.job else None,
            "steps": self.steps,
            "steps_planned": self.steps_planned,
            "tokens": self.tokens,
            "loss": self.loss,
            "best_validation": self.best_validation,
            "best_validation_step": self.best_validation_step,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "started": self.started,
            "seconds": self.seconds,
            "note": self.notes.note,
            "tags": list(self.notes.tags),
            "archived": self.notes.archived,
        }


def find_runs(folders: Iterable[str | Path]) -> list[Run]:
    """Return the runs that the folders are or hold, each once.

    Hidden folders and folders inside a run are not searched. Raises `BadInputError` for a path that is not a
    folder."""
    found: dict[Path, Run] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise BadInputError("FOLDER", str(folder), "must be a run folder or a folder of runs")
        for path in _run_paths(folder, _MOST_DEPTH):
            found.setdefault(path.resolve(), Run(path))
    return list(found.values())


def _run_paths(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / "job.toml").is_file():
        yield folder
    elif depth:
        try:
            with os.scandir(folder) as entries:
                names = sorted(one.name for one in entries if one.is_dir() and not one.name.startswith("."))
        except OSError:  # a folder of another user
            return
        for name in names:
            yield from _run_paths(folder / name, depth - 1)


def read_row(
    run: Run, metrics: Sequence[Record] | None = None, events: Sequence[Record] | None = None
) -> RunRow:
    """Read a run; lines that are not given are read from its files."""
    return row_of(run, read_figures(run, metrics, events))


def row_of(run: Run, figures: RunFigures) -> RunRow:
    """Return the row of a run now, from what its files say."""
    state = state_now(
        run,
        [{"event": name} for name in figures.newest_events],
        steps=figures.steps,
        planned=figures.steps_planned,
        newest=figures.last_line,
        step_seconds=figures.step_seconds,
    )
    if figures.problem and state not in RUNNING:
        state = "unreadable"
    started, newest = figures.started, figures.last_line
    end = time.time() if state in RUNNING else newest
    return RunRow(
        **vars(figures),
        path=run.path,
        name=run.path.resolve().name,
        state=state,
        seconds=None if started is None or end is None else max(0.0, end - started),
        changed=_modified(run.job_path) if newest is None else newest,
        notes=read_notes(run),
    )


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
