"""One run as a row of a table of runs: its state, its figures, and its job's values.

States are those of `myriad.run.run_status`, speed and MFU those of `myriad.run.run_speed`, as everywhere.
"""

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from myriad.errors import BadInputError
from myriad.job.job_changes import flat_values
from myriad.run import Run
from myriad.run.run_lines import count_steps, figure_of
from myriad.run.run_notes import RunNotes, read_notes
from myriad.run.run_speed import Peaks, run_speed
from myriad.run.run_status import RUNNING, STATE_EVENTS, State, newest_event, state_now
from myriad.system.jsonl import Record

if TYPE_CHECKING:
    from myriad.job import Job

__all__ = ["RunFigures", "RunRow", "find_runs", "layout_text", "read_figures", "read_row", "row_of"]

_MOST_DEPTH = 3
"""Folders between the given one and a run: runs/SWEEP/RUN has one."""
_OF_CHANGE = ("time", "step", "key", "before", "after", "user")
_MOST_CHANGES = 50
_AXES = ("dp", "pp", "cp", "tp", "ep")


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """What the files of a run say, at any time. Unknown figures are ``None``."""

    problem: str = ""
    """Why job.toml cannot be read; "": it can."""
    job: Mapping[str, Any] = field(default_factory=dict)
    """Values of the job by dotted key; empty if it cannot be read."""
    layout: str = ""
    steps: int = 0
    """Steps done."""
    steps_planned: int | None = None
    tokens: int | None = None
    loss: float | None = None
    """Loss of the newest step that has one."""
    best_validation: float | None = None
    best_validation_step: int | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    step_seconds: float = 0.0
    """Mean time of a step; 0: unknown."""
    started: float | None = None
    """Time of the first event or step, in seconds since the epoch."""
    last_line: float | None = None
    """Time of the last event or step."""
    newest_events: Sequence[str] = ()
    """Names of the events that determine the state, each once, in order of its newest occurrence."""
    changes: Sequence[Mapping[str, Any]] = ()
    """Changes of the job by resumes: ``step``, ``key``, ``before``, ``after``, ``user``."""
    holds_unsaved_step: bool = False
    """Whether the newest step is only in memory, because it could not be stored."""
    is_requeued: bool = False
    """Whether its Slurm job has been requeued and not started since."""


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
            "layout": {axis: self.job.get(f"layout.{axis}") for axis in _AXES} if self.job else None,
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


def read_figures(
    run: Run, metrics: Sequence[Record] | None = None, events: Sequence[Record] | None = None
) -> RunFigures:
    """Read what the files of a run say. It takes seconds for 100,000 steps."""
    metrics = run.read_metrics() if metrics is None else metrics
    events = run.read_events() if events is None else events
    try:
        job, problem = run.job(), ""
    except BadInputError as error:
        job, problem = None, str(error)
    speed, best = run_speed(metrics, Peaks(events)), _best_validation(events)
    started, newest = _first_and_last_time(metrics, events)
    losses = (figure_of(line.get("loss")) for line in reversed(metrics))
    names = dict.fromkeys(str(one["event"]) for one in reversed(events) if one["event"] in STATE_EVENTS)
    return RunFigures(
        problem=problem,
        job=flat_values(job) if job else {},
        layout=layout_text(job) if job else "",
        steps=count_steps(metrics, events).done,
        steps_planned=job.train.steps if job else None,
        tokens=metrics[-1].get("tokens") if metrics else None,
        loss=next((loss for loss in losses if loss is not None), None),
        best_validation=best[0] if best else None,
        best_validation_step=best[1] if best else None,
        tokens_per_second=speed.tokens_per_second if speed else None,
        mfu=speed.mfu if speed else None,
        step_seconds=speed.step_seconds if speed else 0.0,
        started=started,
        last_line=newest,
        newest_events=[*names][::-1],
        changes=[
            {key: event.get(key) for key in _OF_CHANGE} for event in events if event["event"] == "job_changed"
        ][-_MOST_CHANGES:],
        holds_unsaved_step=newest_event(events, ("held", "checkpoint", "finish", "start")) == "held",
        is_requeued=_is_requeued(events),
    )


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


def layout_text(job: "Job") -> str:
    """Return the axes of the layout that are larger than one: ``dp2 tp2``."""
    sizes = ((axis, getattr(job.layout, axis)) for axis in _AXES)
    return " ".join(f"{axis}{size}" for axis, size in sizes if size > 1) or "1 rank"


def _is_requeued(events: Sequence[Record]) -> bool:
    names = ("requeue", "start", "finish")
    newest = next((event for event in reversed(events) if event["event"] in names), {})
    return newest.get("event") == "requeue" and "not requeued" not in newest.get("problem", "")


def _best_validation(events: Sequence[Record]) -> tuple[float, int | None] | None:
    """Return the lowest validation loss with its step. A step that a resume repeated counts with its newest
    loss."""
    by_step: dict[int | None, float] = {}
    for event in events:
        if event["event"] == "validation" and (loss := figure_of(event.get("loss"))) is not None:
            by_step[event.get("step")] = loss
    return min(((loss, step) for step, loss in by_step.items()), default=None, key=lambda one: one[0])


def _first_and_last_time(
    metrics: Sequence[Record], events: Sequence[Record]
) -> tuple[float | None, float | None]:
    times = [figure_of(line.get("time")) for line in (*metrics[:1], *metrics[-1:], *events)]
    known = [each for each in times if each is not None]
    return min(known, default=None), max(known, default=None)


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
